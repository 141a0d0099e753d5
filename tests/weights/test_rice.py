"""Tier rice: near the bound, safe on any bytes, and the same on every path through its kernels."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.weights import codec, rice, rice_read, rice_tables
from stretto.weights.codec import Tier, apply, decode, encode
from stretto.weights.codec_report import bound_given_exponent, synthetic_step, to_bf16
from stretto.weights.streams import CodecError


def step(lr: float, size: int = 1 << 20) -> tuple[np.ndarray, np.ndarray]:
    masters = {"w": np.random.default_rng(0).normal(0, 0.02, size).astype(np.float32)}
    old, new = synthetic_step(masters, lr, seed=1)
    return old["w"], new["w"]


@pytest.mark.parametrize(("lr", "most"), [(1e-6, 1.06), (3e-6, 1.05), (1e-5, 1.06), (1e-4, 1.1)])
def test_near_the_bound_given_the_old_exponent(lr: float, most: float) -> None:
    old, new = step(lr)
    assert len(encode(old, new, Tier.RICE)) < most * bound_given_exponent(old, new)


def test_changes_that_do_not_depend_on_the_exponent_are_near_it_too() -> None:
    rng = np.random.default_rng(3)
    old, _ = step(1e-6)
    new = np.where(rng.random(old.size) < 0.01, old ^ 1, old).astype(np.uint16)
    assert len(encode(old, new, Tier.RICE)) < 1.08 * bound_given_exponent(old, new)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 2047, 2049, 70_001])
def test_forced_round_trip_at_the_edges_of_tiles(dtype: type, size: int) -> None:
    rng = np.random.default_rng(size)
    top = int(np.iinfo(dtype).max)
    old = rng.integers(0, top, size, dtype=dtype, endpoint=True)
    for share in (0.001, 0.3, 1.0):
        new = np.where(rng.random(size) < share, rng.integers(0, top, size, dtype=dtype, endpoint=True), old)
        new[-1] = old[-1] ^ 1
        target = old.copy()
        apply(decode(old, encode(old, new, Tier.RICE), old.shape, old.dtype), target)
        assert np.array_equal(target, new)


def test_a_change_after_a_very_long_way() -> None:
    """The gap's quotient is then written in full."""
    old = np.full(200_000, 0x3C00, np.uint16)
    new = old.copy()
    new[:2000] += 1
    new[-1] ^= 0x8000
    assert np.array_equal(codec.restore(old, encode(old, new, Tier.RICE), old.shape, old.dtype), new)


def test_decoding_changes_nothing_and_applying_twice_is_applying_once() -> None:
    old, new = step(1e-5, 5000)
    before = old.copy()
    patches = decode(old, encode(old, new), old.shape, old.dtype)
    assert np.array_equal(old, before)
    for _ in range(2):
        apply(patches, old)
        assert np.array_equal(old, new)


def test_two_threads_make_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "CHUNK_BITS", 12)
    old, new = step(1e-5, 50_000)
    data = encode(old, new, threads=2)
    assert data == encode(old, new)
    assert np.array_equal(codec.restore(old, data, old.shape, old.dtype, threads=2), new)


def test_a_tensor_that_does_not_fit_stays_as_it_is() -> None:
    old, new = step(1e-5, 5000)
    patches = decode(old, encode(old, new), old.shape, old.dtype)
    for target in (old[:100].copy(), old.astype(np.uint32), old[::2]):
        before = target.copy()
        with pytest.raises(CodecError):
            apply(patches, target)
        assert np.array_equal(target, before)


def test_without_numba_split_is_used_and_rice_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = step(1e-5, 50_000)
    data = encode(old, new)
    monkeypatch.setattr(codec, "_rice", lambda: None)
    assert np.array_equal(codec.restore(old, encode(old, new), old.shape, old.dtype), new)
    with pytest.raises(CodecError, match="tier rice, which needs numba"):
        decode(old, data, old.shape, old.dtype)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_bits_round_trip_in_several_lanes(data: st.DataObject) -> None:
    """Straight weights and others, few changes and many, steps that have a centre and steps that don't."""
    size = data.draw(st.sampled_from([5, 2049, 9000, 70_001]))
    rng = np.random.default_rng(data.draw(st.integers(0, 50)))
    dtype = data.draw(st.sampled_from([np.uint8, np.uint16, np.uint32]))
    top = np.iinfo(dtype).max
    old = rng.integers(0, top, size, dtype=dtype, endpoint=True)
    old = old if data.draw(st.booleans()) else (old >> dtype(3)) * dtype(2)
    far = dtype(data.draw(st.sampled_from([1, 3, 50, top // 2, top])))
    new = np.where(rng.random(size) < data.draw(st.sampled_from([0.001, 0.1, 0.9])), old + far, old).astype(dtype)
    new[0] = old[0] ^ dtype(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rice, "_MANY", data.draw(st.sampled_from([0, 10**9])))
        count, payload = rice.encode(old, new, size)
    positions, values = rice.decode(old, memoryview(payload))
    assert count == positions.size
    old[positions] = values
    assert np.array_equal(old, new)


@pytest.mark.parametrize("way", [rice_tables.OUTWARD, rice_tables.VALUES])
@pytest.mark.parametrize("width", [8, 16, 32])
def test_a_step_is_a_bit_and_a_number_and_back(way: int, width: int) -> None:
    """At the ends of the number line, where steps wrap around, too."""
    low, high = -(1 << (width - 1)), (1 << (width - 1)) - 1
    for old, new, centre in product((low, -1, 0, 5, high), (low, -7, 0, 1, high), (0, 3, high)):
        if old != new:
            sign, number = rice_tables.split(way, np.int64(centre), np.int64(old), np.int64(new), width)
            assert sign in (0, 1) and 0 <= number < 1 << 32
            back = rice_read.joined(way, np.int64(centre), np.int64(old), np.int64(sign), np.int64(number))
            assert (int(back) - new) % (1 << width) == 0


def test_values_near_zero_that_always_change_cost_little_more_than_their_entropy() -> None:
    """A centre for classes in which each step has a size of its own."""
    rng = np.random.default_rng(0)
    masters = np.where(rng.random(1 << 18) < 0.1, rng.normal(0, 1e-7, 1 << 18), rng.normal(0, 0.05, 1 << 18))
    masters = masters.astype(np.float32)
    moved = masters - np.float32(1e-6) * rng.uniform(0.8, 1, masters.size).astype(np.float32)
    old, new = to_bf16(masters), to_bf16(moved)
    assert len(encode(old, new, Tier.RICE)) < 1.25 * bound_given_exponent(old, new)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_it_read_or_write_elsewhere(data: st.DataObject) -> None:
    """Any damage: an error or other values at positions within the chunk, in ascending order."""
    size = data.draw(st.sampled_from([5, 64, 300, 5000]))
    rng = np.random.default_rng(data.draw(st.integers(0, 50)))
    dtype = data.draw(st.sampled_from([np.uint8, np.uint16, np.uint32]))
    old = rng.integers(0, np.iinfo(dtype).max, size, dtype=dtype)
    new = np.where(rng.random(size) < 0.2, old + dtype(1), old).astype(dtype)
    new[0] = old[0] ^ 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rice, "_MANY", data.draw(st.sampled_from([0, 10**9])))
        payload = bytearray(rice.encode(old, new, size)[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))] if data.draw(st.booleans()) else payload
    other = old if data.draw(st.booleans()) else rng.integers(0, np.iinfo(dtype).max, size, dtype=dtype)
    try:
        positions, values = rice.decode(other, memoryview(bytes(payload)))
    except CodecError:
        return
    assert positions.size == values.size <= size
    assert np.all(np.diff(positions.astype(np.int64)) > 0) and positions[-1] < size
