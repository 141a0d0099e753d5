"""Pins: the loss and gradient of a batch do not depend on how it is split into micro-batches, under any objective,
also where a coefficient looks at a whole sequence or another policy is asked."""

import dataclasses

import numpy as np
import pytest
import torch

from stretto.config import TrainerConfig, presets
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.shadow import Shadow
from stretto.trainer.step import Distribution, Shadows, learn

EVERY = [
    *({"preset": name} for name in presets()),
    *({"correction": name, "correction_cap": 3.0} for name in ("none", "sequence-tis", "sequence-mask")),
    {"correction": "geometric-mask", "correction_floor": 0.95, "correction_cap": 1.05},
    {"kl": 0.1},
]


def gradients(maker, samples, start, **settings):
    """(loss, gradients, report) of one step; nothing is changed, as the learning rate is 0."""
    optimizer = MasterAdamW(maker.model, (0.9, 0.97), 0.0)
    seen = {}
    clip = optimizer.clip

    def keep(max_norm):
        seen.update((name, p.grad.clone()) for name, p in optimizer.parameters.items() if p.grad is not None)
        return clip(max_norm)

    optimizer.clip = keep  # type: ignore[method-assign]
    config = TrainerConfig.model_validate(settings)
    shadows = Shadows(start if config.proximal == "ema" else None, start if config.kl else None)
    report = learn(maker.model, optimizer, samples, config, Distribution(1.0, 1.0), 0.0, shadows=shadows)
    return report, torch.cat([seen[name].flatten() for name in sorted(seen)])


@pytest.mark.parametrize("normalizer", ["token", "sequence", "constant"])
@pytest.mark.parametrize("settings", EVERY, ids=lambda settings: "-".join(map(str, settings.values())))
def test_any_split_gives_the_same_loss_and_gradient(maker, settings, normalizer):
    rng = np.random.default_rng(1)
    samples = [
        dataclasses.replace(s, behaviour_N=(s.behaviour_N + rng.normal(0, 0.2, len(s.behaviour_N))).astype(np.float32))
        for s in maker.prepare(maker.batch(segments=2), normalizer=normalizer).samples
    ]
    optimizer = MasterAdamW(maker.model, (0.9, 0.97), 0.0)
    start = Shadow({n: m + 0.02 * torch.randn(m.shape) for n, m in optimizer.masters.items()})
    settings = {**settings, "normalizer": normalizer, "max_grad_norm": 1e9}
    whole, whole_gradient = gradients(maker, samples, start, microbatch_tokens=10**6, **settings)
    assert whole_gradient.norm() > 1e-4
    for budget in (1, 40, 100):
        report, gradient = gradients(maker, samples, start, microbatch_tokens=budget, **settings)
        assert report.loss == pytest.approx(whole.loss, abs=1e-6)
        assert torch.allclose(gradient, whole_gradient, atol=1e-6)
        assert report.clipped == whole.clipped and report.moved == pytest.approx(whole.moved, rel=1e-4)


def test_GRP_8_the_segments_of_a_rollout_weigh_one_together(maker):
    """A rollout cut into three segments by compaction must not count three times."""
    prepared = maker.prepare(maker.batch(segments=3), normalizer="sequence")
    assert len(prepared.samples) == 3 * 8
    weights: dict[str, float] = {}
    for sample in prepared.samples:
        weights[sample.rollout] = weights.get(sample.rollout, 0.0) + sample.share * len(sample.targets_N)
    assert list(weights.values()) == pytest.approx([1 / 8] * 8)
    for normalizer in ("token", "constant"):  # here every token weighs alike, whatever its segment
        assert (
            len({sample.share for sample in maker.prepare(maker.batch(segments=3), normalizer=normalizer).samples}) == 1
        )


def test_GRP_11_a_fully_masked_micro_batch_reaches_every_parameter(maker):
    """Zero gradient, not none: with several ranks, one that has nothing to learn takes part in the same collectives."""
    samples = [dataclasses.replace(s, behaviour_N=s.behaviour_N - 9.0) for s in maker.prepare(maker.batch()).samples]
    report, gradient = gradients(maker, samples, None, correction="icepop", microbatch_tokens=40)
    assert report.clipped == 1.0 and report.loss == 0.0
    assert len(gradient) == sum(p.numel() for p in maker.model.parameters()) and not gradient.any()
