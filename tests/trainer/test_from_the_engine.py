"""From the engine's draw to the trainer's log-probs, through harness, payload, packing: the ratio on policy is one.

Two turns of one session with an observation between, under every way to cut the distribution.
"""

from __future__ import annotations

import queue

import msgspec
import numpy as np
import pytest
import torch

from stretto.config import EngineConfig
from stretto.engine.runner import Runner, Serving
from stretto.engine.sampler import kept, sample
from stretto.harness.history import History
from stretto.model.logprobs import token_logprobs
from stretto.records import Batch, BatchItem, GenerateRequest, GenerateResponse, Sampling, encode
from stretto.trainer.learner import geometry
from stretto.trainer.packing import join, pack
from stretto.trainer.samples import BatchError, Sample, prepare
from stretto.trainer.step import Distribution, predict

CUTS = [(1.0, 0), (0.9, 0), (0.5, 0), (1.0, 5), (0.8, 12)]


class Engine:
    """The real one, in this process."""

    def __init__(self, model):
        self._events: queue.Queue = queue.Queue()
        config = EngineConfig(slots=8, max_tokens=96, prefill_tokens=64)
        self.runner = Runner(model, config, serving=Serving(0, ""), seed=0, deliver=self._take)
        self.runner.start()

    def _take(self, events) -> None:
        for event in events:
            self._events.put(event)

    def generate(self, requests: list[GenerateRequest]) -> list[GenerateResponse]:
        for request in requests:
            self.runner.submit(request)
        ended = [self._events.get(timeout=30) for _ in requests]
        return [event.response for event in sorted(ended, key=lambda event: event.job.key)]


@pytest.fixture
def engine(model):
    engine = Engine(model)
    yield engine
    engine.runner.stop()


def play(engine: Engine, sampling: Sampling, rollouts: int = 4) -> list[History]:
    prompt = list(range(5, 25))
    histories = [History(prompt, sampling.truncated) for _ in range(rollouts)]
    for turn in range(2):
        requests = [
            GenerateRequest(
                ids=list(history.ids),
                max_tokens=14,
                stop=[],
                sampling=msgspec.structs.replace(sampling, seed=n),
                session=f"s{n}",
                routes_from=history.rows,
            )
            for n, history in enumerate(histories)
        ]
        for history, response in zip(histories, engine.generate(requests), strict=True):
            history.take(response)
            if turn == 0:
                history.give([1, 2, 3])
    return histories


def batch(histories: list[History], make_rollout) -> tuple[Batch, list[bytes]]:
    names = [f"g-{n}" for n in range(len(histories))]
    items = [
        BatchItem(rollout=name, group="g", key=name, reward=0.0, advantage=1.0 + n, oldest_version=0)
        for n, name in enumerate(names)
    ]
    payloads = [encode(make_rollout(name, [history.segment()])) for name, history in zip(names, histories, strict=True)]
    whole = Batch(
        run="t",
        version=0,
        items=items,
        groups=1,
        rollouts=len(items),
        dropped_equal=0,
        solve_rate=0.0,
        staleness=[0] * len(items),
    )
    return whole, payloads


def samples_of(histories, make_rollout, spec, truncated: bool) -> list[Sample]:
    made, payloads = batch(histories, make_rollout)
    return prepare(
        made,
        payloads,
        geometry(spec),
        max_staleness=0,
        replay=True,
        truncated=truncated,
        normalizer="constant",
        budget=64,
    ).samples


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(("top_p", "top_k"), CUTS)
def test_ENG_5_ENG_6_the_ratio_is_one_on_policy(engine, model, make_rollout, temperature, top_p, top_k):
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    samples = samples_of(play(engine, sampling), make_rollout, model.spec, sampling.truncated)
    distribution = Distribution(temperature, top_p, top_k)
    for budget in (1, 60, 10**6):
        for micro in pack(samples, budget):
            with torch.no_grad():
                predicted = predict(model, micro, distribution)
            np.testing.assert_allclose((predicted.logp_N - micro.behaviour_N).exp().numpy(), 1.0, atol=1e-5)
            assert predicted.disagreement == 0
            assert (micro.support is None) == (not sampling.truncated)


def test_ENG_5_under_other_weights_the_set_is_still_the_engines(engine, model, make_rollout):
    """Recomputing the cut would move its border: then a token's ratio would jump for no reason of its own."""
    sampling = Sampling(top_p=0.6)
    samples = samples_of(play(engine, sampling), make_rollout, model.spec, True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        micro = join(samples)
        logp_N = predict(model, micro, Distribution(1.0, 0.6)).logp_N
        hidden_TD = model(micro.ids_T, micro.positions_T, micro.attend, routes_TLK=micro.routes_TLK).hidden_TD
        logits_NV = model.logits(hidden_TD[micro.predict_N])
    own_NV, engines_NV = kept(logits_NV, 0.6), torch.from_numpy(micro.support.mask(0, len(micro.support)))
    assert (own_NV != engines_NV).any(), "the border must have moved, or this shows nothing"
    wanted_NV = logits_NV.masked_fill(~engines_NV, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(logp_N, wanted_NV.gather(1, micro.targets_N[:, None]).squeeze(1), atol=1e-5, rtol=1e-5)
    assert logp_N.isfinite().all()


@pytest.mark.parametrize(("top_p", "top_k"), CUTS)
def test_ENG_5_equal_hidden_states_give_equal_logprobs_to_the_bit(model, top_p, top_k):
    """In exact arithmetic, all that is left between the two sides is how the hidden states were computed."""
    hidden_ND = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    rows = np.ones(40)
    temperature_N, uniform_N = (1.3 * rows).astype(np.float32), np.random.default_rng(0).random(40)
    with torch.no_grad():
        logits_NV = model.logits(hidden_ND)
        settings = temperature_N, top_p * rows, (top_k * rows).astype(int), uniform_N
        drawn, fast = (sample(logits_NV.clone(), *settings, exact=exact) for exact in (True, False))
        targets_N = torch.from_numpy(drawn.ids_N).long()
        logp_N, _ = token_logprobs(model, hidden_ND, targets_N, 1.3, drawn.support, chunk=40)
    assert logp_N.numpy().tolist() == drawn.logprobs_N.tolist()
    assert fast.ids_N.tolist() == drawn.ids_N.tolist()
    np.testing.assert_allclose(fast.logprobs_N, drawn.logprobs_N, atol=1e-6)


def test_ENG_5_what_was_cut_and_what_was_not_are_never_mixed_up(engine, model, make_rollout):
    cut, full = (play(engine, Sampling(top_k=top_k)) for top_k in (4, 0))
    with pytest.raises(BatchError, match="rollout g-0, segment 0: .* nothing says which tokens were left"):
        samples_of(full, make_rollout, model.spec, truncated=True)
    with pytest.raises(BatchError, match="rollout g-0, segment 0: .* neither rollouts.top_p nor rollouts.top_k"):
        samples_of(cut, make_rollout, model.spec, truncated=False)
