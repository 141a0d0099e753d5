"""Pins the measures of engine against trainer: each by its formula, by lag, over the micro-batches of a real step."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.config import TrainerConfig
from stretto.trainer.agreement import ALL, Agreement, Rows, divergence
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.samples import UNKNOWN
from stretto.trainer.step import Distribution, learn

LOGPROB = st.floats(-30, 0, width=32)


def test_each_measure_by_its_formula():
    engine, trainer = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    found = divergence(trainer, engine)
    assert found.tokens == 3
    assert found.k1 == pytest.approx((0.5 - 1.0) / 3)
    assert found.k3 == pytest.approx(((math.exp(-0.5) - 1 + 0.5) + (math.exp(1) - 1 - 1)) / 3)
    assert found.mean_dlogp == pytest.approx(0.5) and found.max_dlogp == 1.0
    gaps = [abs(math.exp(a) - math.exp(b)) for a, b in ((-1.5, -1.0), (-1.0, -2.0))]
    assert found.mean_dp == pytest.approx(sum(gaps) / 3)
    assert found.f2 == pytest.approx(1 / 3), "e^1 is more than 2, e^-0.5 is more than 1/2"
    expected = np.corrcoef(trainer.exp().numpy(), engine.exp().numpy())[0, 1]
    assert found.correlation == pytest.approx(expected, rel=1e-5)


def test_a_ratio_and_its_inverse_count_alike_in_f2():
    engine = torch.full((4,), -2.0)
    assert divergence(engine + torch.tensor([0.8, -0.8, 0.6, -0.6]), engine).f2 == 0.5


def test_quantiles_do_not_interpolate_between_far_outliers():
    engine = torch.zeros(1000)
    trainer = torch.zeros(1000)
    trainer[0] = -8.0
    found = divergence(trainer, engine)
    assert (found.p99_dlogp, found.p999_dlogp, found.max_dlogp) == (0.0, 0.0, 8.0)
    trainer[1:11] = -0.1
    found = divergence(trainer, engine)
    assert (found.p99_dlogp, found.p999_dlogp) == (pytest.approx(0.1), pytest.approx(0.1))


@given(st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=40))
def test_never_negative_never_overflowing(pairs):
    trainer, engine = (torch.tensor(column) for column in zip(*pairs, strict=True))
    found = divergence(trainer, engine)
    assert 0 <= found.k3 < math.inf and abs(found.k1) <= found.mean_dlogp + 1e-9
    assert found.mean_dlogp <= found.max_dlogp and 0 <= found.f2 <= 1
    assert found.p99_dlogp <= found.p999_dlogp <= found.max_dlogp
    assert found.correlation is None or -1.0001 <= found.correlation <= 1.0001


def test_impossible_tokens_stay_finite():
    found = divergence(torch.tensor([1e4, -math.inf]), torch.tensor([-1e4, -1.0]))
    assert math.isfinite(found.k3) and found.f2 == 1.0


def test_lags_are_kept_apart():
    agreement = Agreement()
    known, no = torch.tensor([[True], [True], [False]]), torch.zeros(3, 1, dtype=torch.bool)
    rows = Rows(known, torch.tensor([[True], [False], [False]]), no)
    agreement.add(torch.tensor([-1.0, -1.0, -3.0]), torch.full((3,), -1.0), torch.tensor([7, 7, 5]), rows)
    agreement.add(torch.tensor([-2.0]), torch.tensor([-1.0]), torch.tensor([5]), Rows(~no[:1], no[:1], ~no[:1]))
    buckets = agreement.buckets(7)
    assert list(buckets) == [ALL, "0", "2"]
    assert [bucket.divergence.tokens for bucket in buckets.values()] == [4, 2, 2]
    assert buckets["0"].divergence.max_dlogp == 0.0 and buckets["2"].divergence.max_dlogp == 2.0
    assert buckets["0"].rows.shares() == {"coverage": 1.0, "disagreement": 0.5, "replaced": 0.0}
    assert buckets["2"].rows.shares() == {"coverage": 0.5, "disagreement": 0.0, "replaced": 1.0}
    assert buckets[ALL].rows.shares()["coverage"] == 0.75


def test_nothing_measured_is_no_bucket():
    assert Agreement().buckets(3) == {}


def step(maker, samples, **settings):
    optimizer = MasterAdamW(maker.model, (0.9, 0.97), 0.0)
    config = TrainerConfig(microbatch_tokens=64, **settings)
    return learn(maker.model, optimizer, samples, config, Distribution(1.0), 0.0).agreement


def test_every_step_compares_all_its_tokens(maker):
    samples = maker.prepare(maker.batch(version=5)).samples
    samples += maker.prepare(maker.batch(version=5, sampled_by=4)).samples
    buckets = step(maker, samples).buckets(5)
    assert list(buckets) == [ALL, "0", "1"]
    assert buckets[ALL].divergence.tokens == sum(len(s.targets_N) for s in samples)
    for bucket in buckets.values():
        assert bucket.divergence.k3 < 1e-9 and bucket.divergence.max_dlogp < 1e-4
        assert bucket.rows.shares() == {"coverage": 1.0, "disagreement": 0.0, "replaced": 0.0}


def test_rows_that_are_wrong_or_missing_show_at_their_lag(maker):
    good = maker.prepare(maker.batch(version=5)).samples
    old = maker.prepare(maker.batch(version=5, sampled_by=4)).samples
    bad = [dataclasses.replace(s, routes_TLK=(s.routes_TLK + 1) % 4) for s in old]
    buckets = step(maker, good + bad, replay_ratio=0.8).buckets(5)
    assert buckets["0"].rows.shares()["replaced"] == 0.0
    assert buckets["1"].rows.shares()["replaced"] > 0.3 and buckets["1"].rows.shares()["disagreement"] > 0.5
    blind = [dataclasses.replace(s, routes_TLK=np.full_like(s.routes_TLK, UNKNOWN)) for s in old]
    buckets = step(maker, good + blind).buckets(5)
    assert buckets["1"].rows.shares() == {"coverage": 0.0, "disagreement": None, "replaced": None}
    assert buckets["0"].rows.shares()["coverage"] == 1.0


def test_without_replay_there_are_no_rows(maker):
    samples = maker.prepare(maker.batch(version=5), replay=False).samples
    values = step(maker, samples).buckets(5)[ALL].values()
    assert values["coverage"] is values["replaced"] is values["disagreement"] is None and values["tokens"] > 0
