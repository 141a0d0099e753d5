"""Pins: micro-batches hold each sample once within the budget, common prefixes are computed once, rows follow their
tokens, and loss and gradient depend on none of it."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config import TrainerConfig
from stretto.trainer.corrections import Sequences
from stretto.trainer.losses import BehaviourLogprobs, CurrentLogprobs, policy_loss
from stretto.trainer.packing import SHARED_COST, Astray, balanced, join, pack, plan, shared, work
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


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=1, max_size=9), st.integers(1, 9000))
def test_micro_batches_are_even_in_flops(pairs, budget):
    """As few as the budget allows; without shared prefixes the largest is the smallest of all ways to cut into so many,
    with them it is no larger than it was."""
    lengths, common = [length for length, _ in pairs], [min(pair) for pair in pairs]
    least, ranges = plan(lengths, common, budget), balanced(lengths, common, budget)
    assert len(ranges) <= len(least)

    def largest(cuts):
        return max(work(lengths[a], 0) + sum(work(lengths[i], common[i]) for i in range(a + 1, b)) for a, b in cuts)

    def fits(a, b):
        cost = lengths[a] + sum(lengths[i] - (1 - SHARED_COST) * common[i] for i in range(a + 1, b))
        return b - a == 1 or cost <= budget

    def ways():
        for inner in itertools.combinations(range(1, len(lengths)), len(least) - 1):
            cuts = list(itertools.pairwise([0, *inner, len(lengths)]))
            if all(fits(a, b) for a, b in cuts):
                yield cuts

    assert largest(ranges) <= largest(least)
    common = [0] * len(lengths)
    least = plan(lengths, common, budget)
    assert largest(balanced(lengths, common, budget)) <= min(map(largest, ways())) * (1 + 1e-4) + 1e-3


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
                route_ids_T=ids.copy(),
                support=None,
                predict_N=predict_N,
                targets_N=rng.integers(0, spec.vocab_size, len(predict_N)),
                behaviour_N=-rng.random(len(predict_N)).astype(np.float32) - 3,
                versions_N=np.zeros(len(predict_N), np.int32),
                advantage=float(rng.standard_normal()),
                share=0.01,
            )
        )
    return samples


def test_RPL_2_rows_follow_their_tokens(maker):
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


@pytest.mark.parametrize("seed", range(3))
def test_RPL_2_routes_and_ids_stay_together_whatever_is_shared_or_cut(spec, seed):
    """Each node has the route row that its sample holds for that very token."""
    samples = tree(spec, np.random.default_rng(seed), 12)
    cut = [
        dataclasses.replace(s, ids_T=s.ids_T[:n], routes_TLK=s.routes_TLK[:n], route_ids_T=s.route_ids_T[:n])
        for s, n in ((s, 1 + int(s.predict_N.max())) for s in samples)
    ]
    for chosen in (samples, cut):
        for budget in (1, 50, 10**6):
            for micro in pack(chosen, budget):
                assert torch.equal(micro.ids_T, micro.route_ids_T)
                wanted = (micro.ids_T + micro.positions_T)[:, None, None] + torch.arange(2)[:, None] + torch.arange(2)
                assert torch.equal(micro.routes_TLK, wanted % spec.experts)


def test_RPL_2_routes_that_moved_by_one_token_are_not_trained_on(maker):
    good, *others = maker.prepare(maker.batch()).samples
    rolled = np.roll(good.routes_TLK, 1, axis=0), np.roll(good.route_ids_T, 1)
    moved = dataclasses.replace(good, routes_TLK=rolled[0], route_ids_T=rolled[1])
    with pytest.raises(Astray, match="after packing, routes belong to other tokens"):
        join([moved, *others])
    micro = join([good, *others])
    shorter = dataclasses.replace(micro, routes_TLK=micro.routes_TLK[1:], route_ids_T=micro.route_ids_T[1:])
    for wrong in (shorter, dataclasses.replace(micro, route_ids_T=micro.route_ids_T.roll(1))):
        with pytest.raises(Astray, match="after micro-batching"):
            predict(maker.model, wrong, ON_POLICY)
    predict(maker.model, without_routes(shorter), ON_POLICY)


def test_RPL_3_nothing_is_padded(maker):
    """Every row that reaches the router, and its load statistics, is a token of a rollout."""
    samples = maker.prepare(maker.batch()).samples
    for micro in pack(samples, 60):
        contexts = {s.ids_T[: t + 1].tobytes() for s in micro.samples for t in range(s.tokens)}
        output = maker.model(micro.ids_T, micro.positions_T, micro.attend, capture=True)
        assert len(output.router_logits[0]) == len(output.routes_TLK) == len(micro.ids_T) == len(contexts)


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
            CurrentLogprobs(logp),
            BehaviourLogprobs(micro.behaviour_N),
            micro.advantage_N,
            micro.share_N,
            Sequences.of_lengths([len(sample.targets_N) for sample in micro.samples]),
            TrainerConfig(),
        ).total
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("normalizer", ["token", "sequence", "constant"])
def test_ENG_8_loss_and_gradient_do_not_depend_on_packing(maker, normalizer):
    samples = maker.prepare(maker.batch(segments=2), normalizer=normalizer).samples
    whole, whole_gradient = gradients(maker.model, pack(samples, 10**6))
    assert whole_gradient.norm() > 1e-3
    for budget in (1, 40, 100):
        micros = pack(samples, budget)
        assert len(micros) > 1
        loss, gradient = gradients(maker.model, micros)
        assert loss == pytest.approx(whole, abs=1e-6)
        assert torch.allclose(gradient, whole_gradient, atol=1e-6)
