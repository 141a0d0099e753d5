"""Pins the instrument: zero where nothing differs, and each planted difference shows where it belongs."""

import dataclasses

import pytest
import torch

from stretto.trainer.mismatch import HeldVersions, measure
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.step import Distribution

DISTRIBUTION = Distribution(1.0, 1.0)


@pytest.fixture
def held(maker):
    held = HeldVersions(MasterAdamW(maker.model, (0.9, 0.97), 0.0), keep=3)
    held.add(5)
    return held


def perturb(model, scale, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((parameter + scale * noise).bfloat16())


def test_nothing_differs(maker, held):
    samples = maker.prepare(maker.batch(version=5)).samples
    values = measure(maker.model, held, samples, 5, DISTRIBUTION, 4096)
    assert values["tokens"] == sum(len(s.targets_N) for s in samples)
    assert abs(values["k1"]) < 1e-6 and values["k3"] < 1e-9 and values["max_dlogp"] < 1e-4
    assert values["k3_without_replay"] < 1e-9 and values["disagreement"] == 0.0
    assert values["coverage"] == 1.0  # the last token of a segment is no input
    assert values["stale_tokens"] == 0 and values["stale_k3"] is None


def test_replay_repairs_choices_of_experts_that_differ_by_numerics(maker, held):
    """The engine's routers are off by a little, so that near ties fall the other way."""
    routers = [layer.mlp.gate.weight for layer in maker.model.layers]
    clean = [router.detach().clone() for router in routers]
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in routers:
            router.add_(1e-3 * torch.randn(router.shape, generator=noise))
        samples = maker.prepare(maker.batch(version=5, groups=6)).samples
        for router, weight in zip(routers, clean, strict=True):
            router.copy_(weight)
    values = measure(maker.model, held, samples, 5, DISTRIBUTION, 4096)
    assert 0 < values["disagreement"] < 0.05
    assert values["k3"] < values["k3_without_replay"] / 10
    assert values["max_dlogp"] < values["max_dlogp_without_replay"] / 5


def test_corrupted_routes_raise_the_mismatch_and_the_disagreement(maker, held):
    samples = maker.prepare(maker.batch(version=5)).samples
    shifted = [dataclasses.replace(s, routes_TLK=(s.routes_TLK + 1) % 4) for s in samples]
    values = measure(maker.model, held, shifted, 5, DISTRIBUTION, 4096)
    assert values["disagreement"] > 0.5 and values["k3"] > 1e-4 and values["k3_without_replay"] < 1e-9


def test_numerics_and_staleness_are_kept_apart(maker, held):
    samples = maker.prepare(maker.batch(version=6, sampled_by=5)).samples
    perturb(maker.model, 0.05)
    held.add(6)
    values = measure(maker.model, held, samples, 6, DISTRIBUTION, 4096)
    assert values["k3"] < 1e-9, "version 5 itself has no mismatch"
    assert values["stale_tokens"] == values["tokens"] and values["stale_k3"] > 1e-3
    assert values["stale_max_dlogp"] > 0.05 and values["stale_disagreement"] > 0


def test_only_rollouts_of_one_held_version_count(maker, held):
    samples = maker.prepare(maker.batch(version=6, sampled_by=4)).samples  # version 4 is not held
    held.add(6)
    values = measure(maker.model, held, samples, 6, DISTRIBUTION, 4096)
    assert values["tokens"] == 0 and values["k3"] is None and values["stale_tokens"] > 0


def test_measuring_leaves_the_model_as_it_was(maker):
    optimizer = MasterAdamW(maker.model, (0.9, 0.97), 0.0)
    held = HeldVersions(optimizer, keep=2)
    held.add(5)
    samples = maker.prepare(maker.batch(version=5)).samples
    with torch.no_grad():
        for master in optimizer.masters.values():
            master += 0.01
    optimizer.round_into_model()
    before = [p.detach().clone() for p in maker.model.parameters()]
    measure(maker.model, held, samples, 5, DISTRIBUTION, 4096)
    assert all(torch.equal(a, b) for a, b in zip(before, maker.model.parameters(), strict=True))
    held.add(6)
    held.add(7)
    assert 5 not in held and 6 in held and 7 in held


def test_without_replay_there_is_one_measure(maker, held):
    samples = maker.prepare(maker.batch(version=5), replay=False).samples
    values = measure(maker.model, held, samples, 5, DISTRIBUTION, 4096)
    assert values["k3"] == values["k3_without_replay"] and values["coverage"] is None
