"""The codec: bit-exact for any patterns, dtypes and shapes; small where little changed; damage is an error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stretto.weights import codec, numberline
from stretto.weights.codec import Tier, decode, encode, restore
from stretto.weights.codec_report import synthetic_step
from stretto.weights.streams import CodecError

DTYPES = [np.uint8, np.int8, np.uint16, np.int16, np.float16, np.uint32, np.int32, np.float32]


def check(old: np.ndarray | None, new: np.ndarray) -> bytes:
    data = encode(old, new)
    before = None if old is None else old.tobytes()
    back = restore(old, data, new.shape, new.dtype)
    assert back.dtype == new.dtype and back.shape == new.shape
    assert back.tobytes() == new.tobytes()
    assert old is None or old.tobytes() == before
    return data


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Any bits, and the same with some elements moved a little, or replaced."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12))
    old = draw(hnp.arrays(unsigned, shape, elements=st.integers(0, np.iinfo(unsigned).max)))
    other = draw(hnp.arrays(unsigned, shape, elements=st.integers(0, np.iinfo(unsigned).max)))
    share = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    chosen = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < share
    moved = old + unsigned.type(1) if draw(st.booleans()) else other
    return old.view(dtype), np.where(chosen, moved, old).astype(unsigned).view(dtype)


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_round_trip_of_any_bits(pair: tuple[np.ndarray, np.ndarray]) -> None:
    check(*pair)
    check(None, pair[1])


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.1, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_round_trip_across_chunks(monkeypatch: pytest.MonkeyPatch, share: float, dtype: type) -> None:
    monkeypatch.setattr(codec, "CHUNK_BITS", 10)
    rng = np.random.default_rng(1)
    old = rng.integers(0, np.iinfo(dtype).max, 4321, dtype=dtype)
    check(old, np.where(rng.random(4321) < share, old + 1, old).astype(dtype))


def test_every_pair_of_special_values() -> None:
    """NaN payloads, infinities, both zeros, subnormals: each may become each."""
    special = np.array([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FFF, 0x3F80, 0xBF80], np.uint16)
    old, new = (side.reshape(-1) for side in np.meshgrid(special, special))
    check(old, new)


def test_the_number_line_is_a_bijection_in_order() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    line = numberline.ordered(every).view(np.int16)
    assert np.array_equal(numberline.ordered(line.view(np.uint16)), every)
    finite = every[(every & 0x7F80) != 0x7F80]
    values = (finite.astype(np.uint32) << 16).view(np.float32)
    assert np.all(np.diff(values[np.argsort(numberline.ordered(finite).view(np.int16))]) >= 0)
    assert np.array_equal(numberline.unzigzag(numberline.zigzag(every)), every)


def test_strided_and_big_endian() -> None:
    base = np.arange(60, dtype=np.uint16).reshape(6, 10)
    new = base.copy()
    new[::2] += 3
    check(base.T[::2], new.T[::2])
    assert np.array_equal(restore(base, encode(base, new.astype(">u2")), base.shape, base.dtype), new)


def test_nothing_changed_costs_nothing() -> None:
    old = np.random.default_rng(0).integers(0, 1 << 16, 100_000, dtype=np.uint16)
    assert len(check(old, old.copy())) < 10


@pytest.mark.parametrize(("lr", "ratio"), [(1e-6, 150), (1e-5, 30), (1e-4, 8.3), (6e-4, 4.0)])
def test_size_at_learning_rates(lr: float, ratio: float) -> None:
    """Floors a little under what is measured: a worse coder must not slip in."""
    masters = {"w": np.random.default_rng(0).normal(0, 0.02, (1024, 1024)).astype(np.float32)}
    old, new = synthetic_step(masters, lr, seed=1)
    assert old["w"].nbytes / len(check(old["w"], new["w"])) > ratio


def test_a_base_that_does_not_help_costs_no_more_than_none() -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.normal(0, 0.02, 50_000).astype(np.float16) for _ in range(2))
    assert len(check(old, new)) <= len(check(None, new)) + 10
    noise = rng.integers(0, 1 << 16, 50_000, dtype=np.uint16)
    assert len(check(old.view(np.uint16), noise)) < noise.nbytes * 1.01


def test_unknown_format_and_tier_are_refused_by_name() -> None:
    old = np.arange(100, dtype=np.uint16)
    data = bytearray(encode(old, old + 1))
    with pytest.raises(CodecError, match="delta has format 9, this program reads 3"):
        decode(old, bytes([9]) + data[1:], old.shape, old.dtype)
    data[4] = 77
    with pytest.raises(CodecError, match=r"coding tier 77, this program knows 0 \(same\), 1 \(rice\)"):
        decode(old, bytes(data), old.shape, old.dtype)
    assert sorted(Tier) == list(range(len(Tier)))


def test_what_does_not_fit_is_refused() -> None:
    old = np.arange(100, dtype=np.uint16)
    data = encode(old, old + 1)
    with pytest.raises(CodecError, match="there is none"):
        decode(None, data, old.shape, old.dtype)
    with pytest.raises(CodecError, match="does not fit a base"):
        decode(old[:50], data, old.shape, old.dtype)
    with pytest.raises(CodecError, match="delta holds 100 elements of 2 bytes, asked for was uint16"):
        decode(old, data, (99,), old.dtype)
    with pytest.raises(CodecError, match="two tensors of one shape and width"):
        encode(old, old.astype(np.uint32))
    with pytest.raises(CodecError, match="float64"):
        encode(None, np.zeros(3))


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_damage_is_an_error_or_other_values_never_a_crash(share: float) -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(0, 1 << 14, 3000, dtype=np.uint16)
    data = encode(old, np.where(rng.random(3000) < share, old + 1, old).astype(np.uint16))
    for cut in range(len(data)):
        with pytest.raises(CodecError):
            decode(old, data[:cut], old.shape, old.dtype)
    with pytest.raises(CodecError, match="too many"):
        decode(old, data + b"\0", old.shape, old.dtype)
    for at in range(0, len(data), 7):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        try:
            decode(old, bytes(bad), old.shape, old.dtype)
        except CodecError:
            continue
