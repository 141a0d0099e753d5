"""Draws follow the distribution whose log-probabilities are reported, row by row, whatever the other rows are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.sampler import kept, sample, uniforms


def draw(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, uniform: np.ndarray):
    count = len(uniform)
    rows = logits.expand(count, -1).clone()
    return sample(
        rows,
        np.full(count, temperature, np.float32),
        np.full(count, top_p),
        np.full(count, top_k),
        uniform,
    )


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1, 1, 0), (0.6, 1, 0), (1.5, 0.8, 0), (1, 1, 3), (1, 0.7, 5)]
)
def test_frequencies_are_the_reported_probabilities(temperature, top_p, top_k):
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 1.5
    marks = (np.arange(20_000) + 0.5) / 20_000  # every quantile once, in place of luck
    ids, logprobs, support = draw(logits, temperature, top_p, top_k, marks)
    for token in np.unique(ids):
        share = np.exp(logprobs[ids == token])
        assert np.ptp(share) == 0
        assert (ids == token).mean() == pytest.approx(share[0], abs=2e-4)
    allowed = kept(logits / temperature, top_p, top_k)[0].numpy()
    assert set(np.unique(ids)) == set(np.flatnonzero(allowed))
    if top_p < 1 or top_k:
        assert (support.mask(0, 100) == allowed).all()
    else:
        assert support is None


def test_kept_takes_the_shortest_prefix_that_reaches_top_p_and_the_lowest_ids_on_ties() -> None:
    z_NV = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    assert kept(z_NV, 0.4).tolist() == [[False, True, False, False]]
    assert kept(z_NV, 0.45).tolist() == [[False, True, True, False]]
    assert kept(z_NV, 1e-9).tolist() == [[False, True, False, False]]
    assert kept(z_NV, 1.0).all()
    assert kept(z_NV, 1.0, 3).tolist() == [[False, True, True, True]]
    assert kept(z_NV, 0.5, 2).tolist() == [[False, True, False, False]]  # 0.4 of 0.7 reaches one half
    assert kept(torch.zeros(1, 6), 0.5).tolist() == [[True] * 3 + [False] * 3]


def test_greedy_takes_the_first_of_the_best_and_reports_the_untempered_logprob():
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    ids, logprobs, support = draw(logits, 0, 0.5, 1, np.array([0.9]))
    assert support is None
    assert ids.tolist() == [1]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]))


@given(st.integers(2, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_rows_do_not_know_each_other(rows, seed):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((rows, 20)).astype(np.float32))
    temperature = rng.choice([0, 0.5, 1, 2], rows).astype(np.float32)
    top_p, top_k, uniform = rng.choice([1.0, 0.9, 0.3], rows), rng.choice([0, 2, 50], rows), rng.random(rows)
    ids, logprobs, support = sample(logits, temperature, top_p, top_k, uniform)
    for n in range(rows):
        one = slice(n, n + 1)
        alone = sample(logits[one], temperature[one], top_p[one], top_k[one], uniform[one])
        assert (alone.ids_N[0], alone.logprobs_N[0]) == (ids[n], logprobs[n])
        if support is not None:
            whole = np.ones((1, 20), bool) if alone.support is None else alone.support.mask(0, 1)
            assert (support.mask(n, n + 1) == whole).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-32])
def test_the_ends_of_the_interval_give_tokens_with_mass(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -200.0]])
    ids, logprobs, _ = draw(logits, 1, 1, 0, np.array([uniform]))
    assert ids[0] in (1, 2) and np.isfinite(logprobs[0])


def test_nan_logits_are_seen():
    assert np.isnan(draw(torch.tensor([[0.0, torch.nan]]), 1, 1, 0, np.array([0.5]))[1][0])


def test_uniforms_are_uniform_and_differ_by_seed_and_position():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(100))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(values)) > 19_990
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 1000).max() < 150
    grid = values.reshape(100, 200)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03
