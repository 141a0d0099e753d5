"""Pins the parts of `stretto bench replay` that its numbers rest on: the engine that is made to say recorded tokens,
planted faults, the measure, the timing, and what is printed of the checks."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
import torch
from rich.console import Console

from stretto.bench import cost
from stretto.bench.forced import force
from stretto.bench.replay_table import LIMITS, MEANING, met, show
from stretto.bench.variants import corrupted, measure, said_by, shifted
from stretto.config import EngineConfig
from stretto.model.attention import PackedCausal
from stretto.model.checkpoint import random_init
from stretto.model.logprobs import token_logprobs
from stretto.model.numerics import Numerics
from stretto.model.spec import ModelSpec
from stretto.records import NOT_SAMPLED, Segment
from stretto.trainer.samples import Sample

SPEC = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    experts=4,
    experts_per_token=2,
    expert_size=16,
    norm_topk_prob=True,
    tie_embeddings=True,
    initializer_range=0.3,
)
SMALL = EngineConfig(slots=8, max_tokens=96, prefill_tokens=16)


@pytest.fixture
def network():
    torch.set_num_threads(1)
    return random_init(SPEC, seed=0, numerics=Numerics())


@pytest.fixture
def segments() -> list[Segment]:
    """Random conversations: a prompt that some share, two turns, an observation between them, and after them."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 64, 20)
    found = []
    for number in range(6):
        lengths = [3, *rng.integers(1, 9, 3).tolist(), 2]
        ids = np.concatenate([prompt if number % 2 else prompt[::-1], rng.integers(0, 64, sum(lengths))])
        sampled = np.concatenate([np.zeros(20, bool), np.repeat([False, True, False, True, False], lengths)])
        found.append(
            Segment(
                ids=ids.astype("<i4").tobytes(),
                logprobs=np.where(sampled, -1.0, np.nan).astype("<f4").tobytes(),
                versions=np.where(sampled, 0, NOT_SAMPLED).astype("<i4").tobytes(),
                support=None,
                routes=[],
                route_shape=SPEC.route_shape,
                route_bits=8,
            )
        )
    return found


def sample(segment: Segment) -> Sample:
    sampled_N = np.flatnonzero(segment.sampled_T)
    ids = segment.ids_T[: sampled_N[-1] + 1].astype(np.int64)
    return Sample(
        rollout="r",
        ids_T=ids[:-1],
        routes_TLK=None,
        route_ids_T=ids[:-1],
        support=None,
        predict_N=sampled_N - 1,
        targets_N=ids[sampled_N],
        behaviour_N=segment.logprobs_T[sampled_N],
        versions_N=np.zeros(len(sampled_N), np.int32),
        advantage=1.0,
        share=1.0,
    )


@pytest.fixture
def said(network, segments) -> list[Sample]:
    return said_by([sample(segment) for segment in segments], force(network, segments, SMALL).scored)


def test_the_forced_engine_says_what_the_network_says_of_the_same_tokens(network, segments, said):
    for segment, one in zip(segments, said, strict=True):
        ids_T = torch.from_numpy(one.ids_T)
        out = network(ids_T, torch.arange(len(ids_T)), PackedCausal([len(ids_T)]), capture=True)
        logp_N, _ = token_logprobs(network, out.hidden_TD[one.predict_N], torch.from_numpy(one.targets_N))
        assert np.allclose(one.behaviour_N, logp_N.detach().numpy(), atol=1e-5)
        assert len(one.behaviour_N) == segment.sampled_T.sum()
        assert np.array_equal(one.routes_TLK, out.routes_TLK.numpy())


def test_it_sends_routes_turn_by_turn_or_none_at_all(network, segments):
    sent = force(network, segments, SMALL)
    for segment, one in zip(segments, sent.scored, strict=True):
        assert len(one.chunks) == 2, "one a turn"
        rows = np.concatenate(
            [chunk.open(segment.ids_T[chunk.start : chunk.end], SPEC.route_shape, 8) for chunk in one.chunks]
        )
        assert np.array_equal(rows, one.routes_TLK)
    bare = force(network, segments, SMALL, capture=False)
    assert all(not one.chunks and one.routes_TLK.size == 0 for one in bare.scored)
    assert bare.sampled == sent.sampled == sum(int(segment.sampled_T.sum()) for segment in segments)


def test_nothing_planted_nothing_found(network, said):
    for replay in (False, True):
        found = measure(network, said, replay, 0.8)
        assert found.used_differ == 0.0 and found.bucket.divergence.max_dlogp < 1e-4
    assert found.bucket.rows.shares() == {"coverage": 1.0, "disagreement": 0.0, "replaced": 0.0}


def test_faults_are_planted_as_told_and_the_filter_finds_them(network, said):
    damaged = corrupted(said, 0.25, SPEC.experts, seed=1)
    rows = [(a.routes_TLK != b.routes_TLK).any(-1) for a, b in zip(damaged, said, strict=True)]
    hit = np.concatenate([row.reshape(-1) for row in rows]).mean()
    assert 0.15 < hit < 0.25, "a random row may by chance be the right one"
    for one in damaged:
        assert (np.sort(one.routes_TLK, -1)[..., 1:] != np.sort(one.routes_TLK, -1)[..., :-1]).all()
    strict, filtered = (measure(network, damaged, True, ratio) for ratio in (0.0, 0.8))
    assert filtered.bucket.divergence.k3 < strict.bucket.divergence.k3
    assert 0.05 < filtered.bucket.rows.shares()["replaced"] < 0.5
    moved = shifted(said)
    assert np.array_equal(moved[0].routes_TLK[1:], said[0].routes_TLK[:-1])
    assert measure(network, moved, True, 0.8).bucket.rows.shares()["replaced"] > 0.05


def test_costs_are_ratios_to_the_rounds_own_baseline(monkeypatch):
    """The machine becomes slower from round to round: the ratio stays what it is."""
    clock = [0.0]
    factor = {"base": 1.0, "other": 1.5}
    now = {"base": 0, "other": 0}

    def case(name):
        def run():
            now[name] += 1
            clock[0] += factor[name] * now[name]

        return run

    monkeypatch.setattr(time, "process_time", lambda: clock[0])
    found = cost.alternate({name: case(name) for name in factor}, dict.fromkeys(factor, "base"), rounds=5)
    assert found["base"].relative == 1.0 and found["other"].relative == pytest.approx(1.5)


def test_every_check_has_a_limit_and_a_meaning():
    assert set(LIMITS) == set(MEANING) == {
        "k3_removed", "disagreement_removed", "tail_removed_by_replay", "step_time_cost", "engine_cost",
        "corrupt_k3_over_clean", "shift_alarm", "exact_max_abs_dlogp", "exact_cost",
    }  # fmt: skip
    assert met("k3_removed", 0.91) and not met("k3_removed", 0.89)
    assert met("exact_max_abs_dlogp", 0.0) and not met("exact_max_abs_dlogp", 1e-9)
    assert met("shift_alarm", True) and not met("shift_alarm", False)
    assert not met("exact_max_abs_dlogp", float("nan")) and met("tail_removed_by_replay", 0.2) is None


def test_what_does_not_hold_is_said():
    share = {"k3": 1e-4, "replaced": 0.0}
    row = dict.fromkeys(("k1", "k3", "mean_dlogp", "p99_dlogp", "p999_dlogp", "max_dlogp", "mean_dp", "f2"), 1e-4)
    row |= {"engine": "bfloat16", "lag": 0, "variant": "no replay", "used_differ": 0.01}
    row |= dict.fromkeys(("disagreement", "replaced", "coverage"))
    result = {
        "sampled_tokens": 10, "rollouts": 1, "rows": [row],
        "filter": [{"ratio": 0.8, **dict.fromkeys(("clean", "corrupt", "shift", "stale"), share)}],
        "step": {"no replay": {"seconds": 1.0, "relative": 1.0}}, "engine": {},
        "bytes_per_token": {"raw": 8.0, "wire": 4.0},
        "checks": dict.fromkeys(LIMITS, 0.9) | {"shift_alarm": True},
    }  # fmt: skip
    out = io.StringIO()
    show(result, Console(file=out, width=200))
    said = {line.split("=")[0].split()[-1]: line for line in out.getvalue().splitlines() if " = " in line}
    assert said["step_time_cost"].lstrip().startswith("NOT MET") and said["k3_removed"].lstrip().startswith("met")
