"""Pins: micro-batches hold each sample once within the budget, common prefixes are computed once, rows follow their
tokens, and loss and gradient depend on none of it."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.trainer.losses import BehaviourLogprobs, CurrentLogprobs, policy_loss
from stretto.trainer.packing import SHARED_COST, join, pack, plan, shared
from stretto.trainer.samples import Sample
from stretto.trainer.step import Distribution, predict, without_routes

ON_POLICY = Distribution(1.0, 1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=40), st.integers(1, 100))
def test_plan_holds_each_once_within_the_budget(pairs, budget):
    lengths, common = [length for length, _ in pairs], [min(pair) for pair in pairs]
    ranges = plan(lengths, common, budget)
    assert [i for start, end in ranges for i in range(start, end)] == list(range(len(pairs)))
    for start, end in ranges:
        inside = range(start + 1, end)
        cost = lengths[start] + sum(lengths[i] - common[i] + SHARED_COST * common[i] for i in inside)
        assert cost <= budget + 1e-6 or end - start == 1


def tree(spec, rng: np.random.Generator, count: int) -> list[Sample]:
    """Samples that branch off one another: random cuts of earlier ones, continued at random."""
    samples: list[Sample] = []
    for number in range(count):
        ids = rng.integers(0, spec.vocab_size, rng.integers(3, 25))
        if samples:
            parent = samples[rng.integers(len(samples))]
            cut = int(rng.integers(0, parent.tokens + 1))
            keep = int(rng.integers(0, len(ids))) if cut else len(ids)  # 0: a prefix of its parent
            ids = np.concatenate([parent.ids_T[:cut], ids[:keep]])
        layers, k = spec.route_shape
        routes = (ids + np.arange(len(ids)))[:, None, None] + np.arange(layers)[:, None] + np.arange(k)
        predict_N = np.flatnonzero(rng.random(len(ids)) < 0.5)
        predict_N = predict_N if len(predict_N) else np.array([0])
        samples.append(
            Sample(
                rollout=f"r{number}",
                ids_T=ids,
                routes_TLK=(routes % spec.experts).astype(np.int32),
                predict_N=predict_N,
                targets_N=rng.integers(0, spec.vocab_size, len(predict_N)),
                behaviour_N=-rng.random(len(predict_N)).astype(np.float32) - 3,
                versions_N=np.zeros(len(predict_N), np.int32),
                advantage=float(rng.standard_normal()),
                share=0.01,
            )
        )
    return samples


def test_rows_follow_their_tokens(maker):
    """Routes, targets and positions of every sample are found at its place on the packed axis."""
    samples = maker.prepare(maker.batch()).samples
    micro = join(samples)
    start = at = 0
    for sample in samples:
        end, stop = start + sample.tokens, at + len(sample.targets_N)
        assert micro.ids_T[start:end].tolist() == sample.ids_T.tolist()
        assert micro.routes_TLK[start:end].tolist() == sample.routes_TLK.tolist()
        assert micro.positions_T[start:end].tolist() == list(range(sample.tokens))
        assert (micro.predict_N[at:stop] - start).tolist() == sample.predict_N.tolist()
        assert micro.advantage_N[at:stop].tolist() == pytest.approx([sample.advantage] * len(sample.targets_N))
        start, at = end, stop
    assert start == len(micro.ids_T) and at == len(micro.targets_N)


@pytest.mark.parametrize("seed", range(5))
def test_common_prefixes_are_computed_once_and_nothing_changes(model, spec, seed):
    samples = tree(spec, np.random.default_rng(seed), 16)
    shared_micro = pack(samples, 10**6)[0]
    plain_micro = join(shared_micro.samples, share=False)
    contexts = {s.ids_T[: t + 1].tobytes() for s in samples for t in range(s.tokens)}
    assert len(shared_micro.ids_T) == len(contexts) < len(plain_micro.ids_T)
    for change in (lambda micro: micro, without_routes):
        loss, gradient = gradients(model, [change(shared_micro)])
        plain_loss, plain_gradient = gradients(model, [change(plain_micro)])
        assert loss == pytest.approx(plain_loss, abs=1e-6)
        assert torch.allclose(gradient, plain_gradient, atol=1e-6)


def test_equal_tokens_with_other_experts_are_not_shared(maker):
    sample = maker.prepare(maker.batch()).samples[0]
    routes = sample.routes_TLK.copy()
    routes[2] = (routes[2] + 1) % 4
    assert shared([sample, sample, dataclasses.replace(sample, routes_TLK=routes)]) == [0, sample.tokens, 2]


def gradients(model, micros):
    model.zero_grad(set_to_none=False)
    total = 0.0
    for micro in micros:
        logp = predict(model, micro, ON_POLICY).logp_N
        loss = policy_loss(
            CurrentLogprobs(logp), BehaviourLogprobs(micro.behaviour_N), micro.advantage_N, micro.share_N, "tis", 2.0
        ).total
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("normalizer", ["token", "sequence", "constant"])
def test_loss_and_gradient_do_not_depend_on_packing(maker, normalizer):
    samples = maker.prepare(maker.batch(segments=2), normalizer=normalizer).samples
    whole, whole_gradient = gradients(maker.model, pack(samples, 10**6))
    assert whole_gradient.norm() > 1e-3
    for budget in (1, 40, 100):
        micros = pack(samples, budget)
        assert len(micros) > 1
        loss, gradient = gradients(maker.model, micros)
        assert loss == pytest.approx(whole, abs=1e-6)
        assert torch.allclose(gradient, whole_gradient, atol=1e-6)
