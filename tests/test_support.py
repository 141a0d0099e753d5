"""Supports: any set of tokens comes back exactly, takes the smallest of three forms, and damage is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.support import Support


def sets(vocab: int, sizes: list[int], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kept_NV = np.zeros((len(sizes), vocab), bool)
    for row, size in zip(kept_NV, sizes, strict=True):
        row[rng.choice(vocab, size, replace=False)] = True
    return kept_NV


VOCABULARIES = st.sampled_from([1, 2, 7, 8, 64, 255, 256, 257, 1000])


@settings(deadline=None, max_examples=80)
@given(st.data(), VOCABULARIES, st.integers(0, 12), st.integers(0, 99))
def test_any_sets_come_back(data, vocab, count, seed):
    sizes = data.draw(st.lists(st.integers(1, vocab), min_size=count, max_size=count))
    kept_NV = sets(vocab, sizes, seed)
    support = Support.open(Support.of(kept_NV).seal())
    assert len(support) == count and support.counts_N.tolist() == sizes
    start, end = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    assert (support.mask(start, end) == kept_NV[start:end]).all()
    parts = support.split()
    assert all((part.mask(0, 1) == kept_NV[n]).all() for n, part in enumerate(parts))
    joined = Support.join([Support.none(vocab), *parts[:start], *parts[start:], *parts])
    assert (joined.mask(0, 2 * count) == np.concatenate([kept_NV, kept_NV])).all()
    ids_N = np.random.default_rng(seed).integers(0, vocab, count)
    assert (support.contains(ids_N) == kept_NV[np.arange(count), ids_N]).all()


@pytest.mark.parametrize("vocab", [1 << 16, (1 << 16) + 1, 151_936])
def test_wide_vocabularies(vocab):
    kept_NV = sets(vocab, [1, 2, 5000, vocab // 2, vocab - 5000, vocab - 1, vocab])
    kept_NV[0], kept_NV[0, -1] = False, True
    support = Support.open(Support.of(kept_NV).seal())
    assert (support.mask(0, 7) == kept_NV).all()
    assert support.contains(np.full(7, vocab - 1)).tolist() == kept_NV[:, -1].tolist()


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [(1, 3), (100, 300), (6330, 18990), (6331, 18992), (75_000, 18992), (151_836, 300), (151_936, 0)],
)
def test_the_smallest_form_is_taken(size, bytes_):
    """Of 151,936 tokens: ids of 3 bytes, one bit each, ids left out."""
    assert len(Support.of(sets(151_936, [size])).data) == bytes_


def test_a_trained_policys_sets_cost_a_few_bytes():
    sizes = [1] * 70 + [2] * 20 + [5] * 10
    chunk = Support.of(sets(151_936, sizes)).seal()
    assert len(chunk.sets) / len(sizes) < 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: msgspec.structs.replace(c, count=5), "can't take|outside|another number"),
        (lambda c: msgspec.structs.replace(c, vocab=90), "outside 1 to 90"),
        (lambda c: msgspec.structs.replace(c, vocab=3), "can't take|outside 1 to 3"),
        (lambda c: msgspec.structs.replace(c, sets=c.sets[:-3]), "can't be decompressed"),
        (lambda c: msgspec.structs.replace(c, sets=b"hello"), "can't be decompressed"),
        (lambda c: Support(100, np.array([0]), np.zeros(0, np.uint8)).seal(), "sizes outside 1 to 100"),
        (lambda c: Support(100, np.array([101]), np.zeros(13, np.uint8)).seal(), "sizes outside 1 to 100"),
    ],
)
def test_damage_is_a_sentence(change, says):
    chunk = Support.of(sets(100, [3, 50, 99, 100])).seal()
    with pytest.raises(ValueError, match=says):
        Support.open(change(chunk))


def test_vocabularies_are_not_mixed():
    with pytest.raises(ValueError, match="can't be joined"):
        Support.join([Support.none(3), Support.none(4)])
