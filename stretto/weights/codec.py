"""Weight deltas, bit-exact: what changed, in units in the last place, grouped by the old value's exponent.

Floats are looked at as integers in numeric order, so that a training step is a few small steps on the number line
(mostly +-1 ulp). The receiver holds the old value, and its exponent says how likely a change is: elements are put in
the order of that exponent first, which both sides can do, so that like sits beside like. Then, per chunk of 2^20
elements, one of four tiers, all numpy and zstandard:

    same    nothing changed
    gaps    few changed: distances between changed elements, and their steps, in separate streams
    planes  many changed: a bitmap, and the steps split into byte planes
    full    no old value, or one that does not help: the new bits, sign rotated to the low end, in byte planes

    frame:  format, width | has-base, elements, then per chunk: tier, length, payload       (numbers are LEB128)
    stream: raw length, stored length, bytes     (stored as they are when zstd does not make them smaller)

Any 8, 16 or 32-bit pattern goes through unchanged, NaN payloads and negative zeros included: values are never
compared as floats. A wrong base can't be noticed here; the chain's state hashes do that (`chain.py`).

Left out: a coder that reaches the bound given the old exponent (Golomb-Rice or ANS with one parameter per exponent).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard

from stretto.weights.state import bits

FORMAT = 1
"""Version of the byte layout. A reader refuses any other by name."""

CHUNK = 1 << 20
"""Elements coded together: bounds memory, and lets positions be small numbers."""

DENSE_SHARE = 0.15
"""Share of changed elements from which a bitmap is smaller than gaps (measured with `codec_report`)."""

_HAS_BASE = 0x80
_ESCAPE = 255


class CodecError(ValueError):
    """A sentence: why these bytes are not a delta that this program can apply to that base."""


class Tier(enum.IntEnum):
    """How a chunk is coded. Numbers are part of the format: never reuse one."""

    SAME = 0
    GAPS = 1
    PLANES = 2
    FULL = 3


def encode(old: np.ndarray | None, new: np.ndarray) -> bytes:
    """Bytes from which `decode` makes `new`, given `old` (same shape and width; None: without a base).

    Raises CodecError for a dtype that is not 8, 16 or 32 bits wide and for arrays that do not match.
    """
    new_N = _flat(new)
    if old is not None and (old.shape != new.shape or old.dtype.itemsize != new.dtype.itemsize):
        raise CodecError(
            f"the base is {old.dtype} {old.shape} and the new tensor {new.dtype} {new.shape}: "
            "a delta needs two tensors of one shape and width"
        )
    old_N = None if old is None else _flat(old)
    out = bytearray((FORMAT, new_N.itemsize | (0 if old is None else _HAS_BASE)))
    _put_number(out, new_N.size)
    for start in range(0, new_N.size, CHUNK):
        piece_C = new_N[start : start + CHUNK]
        tier, payload = _encode_chunk(None if old_N is None else old_N[start : start + CHUNK], piece_C)
        out.append(tier)
        _put_number(out, len(payload))
        out += payload
    return bytes(out)


def decode(old: np.ndarray | None, data: bytes | memoryview, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The new tensor, of `shape` and `dtype`. `old` is not changed.

    Raises CodecError for a format or tier this program does not know, truncated or damaged bytes, and a base or shape
    that does not fit.
    """
    dtype = np.dtype(dtype)
    reader = _Reader(data)
    version = reader.byte()
    if version != FORMAT:
        raise CodecError(f"delta has format {version}, this program reads {FORMAT}: update the older side")
    width = reader.byte()
    needs_base, itemsize = bool(width & _HAS_BASE), width & ~_HAS_BASE
    size = reader.number()
    if itemsize != dtype.itemsize or size != int(np.prod(shape, dtype=np.int64)):
        raise CodecError(f"delta holds {size} elements of {itemsize} bytes, asked for was {dtype} {tuple(shape)}")
    if needs_base and old is None:
        raise CodecError("delta needs the version it was made from, and there is none")
    if old is not None and needs_base and (old.size != size or old.dtype.itemsize != itemsize):
        raise CodecError(f"delta of {size} elements of {itemsize} bytes does not fit a base of {old.dtype} {old.shape}")
    old_N = _flat(old) if needs_base and old is not None else None
    new_N = np.empty(size, f"<u{itemsize}")
    for start in range(0, size, CHUNK):
        number, payload = reader.byte(), reader.bytes(reader.number())
        stop = min(start + CHUNK, size)
        new_N[start:stop] = _decode_chunk(
            number, None if old_N is None else old_N[start:stop], payload, stop - start, itemsize
        )
    reader.finish()
    return new_N.view(dtype.newbyteorder("<")).reshape(shape)


def steps(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Distance from `old` to `new` on the number line in ulps, zig-zag coded (0, -1, 1, -2 -> 0, 1, 2, 3): unsigned, of
    the same width, flat. A bijection for a given `old`: overflow wraps."""
    old_N, new_N = _flat(old), _flat(new)
    return _zigzag(_ordered(new_N) - _ordered(old_N))


def exponents(old: np.ndarray) -> np.ndarray:
    """uint8, flat: the bits that hold the exponent of bf16, fp32 or fp8 e4m3. For any other type of these widths they
    are simply the high bits, which group values just as well."""
    old_N = _flat(old)
    shift, mask = {1: (3, 0x0F), 2: (7, 0xFF), 4: (23, 0xFF)}[old_N.itemsize]
    return ((old_N >> shift) & mask).astype(np.uint8)


def _encode_chunk(old_C: np.ndarray | None, new_C: np.ndarray) -> tuple[Tier, bytes]:
    if old_C is None:
        return Tier.FULL, _encode_full(new_C)
    steps_C = steps(old_C, new_C)
    changed = int(np.count_nonzero(steps_C))
    if changed == 0:
        return Tier.SAME, b""
    tier = Tier.GAPS if changed < DENSE_SHARE * new_C.size else Tier.PLANES
    payload = _CODERS[tier].encode(steps_C[_order(old_C)])
    if len(payload) > new_C.nbytes // 2:  # so far from the base that it may not help
        full = _encode_full(new_C)
        if len(full) < len(payload):
            return Tier.FULL, full
    return tier, payload


def _decode_chunk(number: int, old_C: np.ndarray | None, payload: memoryview, size: int, itemsize: int) -> np.ndarray:
    if number == Tier.FULL:
        return _decode_full(payload, size, itemsize)
    if number not in _CODERS and number != Tier.SAME:
        known = ", ".join(f"{tier.value} ({tier.name.lower()})" for tier in Tier)
        raise CodecError(f"delta uses coding tier {number}, this program knows {known}: update it")
    if old_C is None:
        raise CodecError(f"delta is damaged: tier {number} needs a base, and the header says there is none")
    if number == Tier.SAME:
        return old_C
    steps_C = np.empty(size, f"<u{itemsize}")
    steps_C[_order(old_C)] = _CODERS[Tier(number)].decode(payload, size, itemsize)
    return _unordered(_ordered(old_C) + _unzigzag(steps_C))


def _encode_gaps(steps_C: np.ndarray) -> bytes:
    where = np.flatnonzero(steps_C)
    out = bytearray()
    _put_number(out, where.size)
    _put_escaped(out, (np.diff(where, prepend=-1) - 1).astype("<u4"))
    _put_escaped(out, steps_C[where] - steps_C.dtype.type(1))
    return bytes(out)


def _decode_gaps(payload: memoryview, size: int, itemsize: int) -> np.ndarray:
    reader = _Reader(payload)
    count = reader.number()
    if count > size:
        raise CodecError(f"delta is damaged: {count} changes in a chunk of {size} elements")
    gaps, values = reader.escaped(count, 4), reader.escaped(count, itemsize)
    reader.finish()
    where = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and where[-1] >= size:
        raise CodecError(f"delta is damaged: a change at element {where[-1]} of a chunk of {size}")
    steps_C = np.zeros(size, f"<u{itemsize}")
    steps_C[where] = values + values.dtype.type(1)
    return steps_C


def _encode_planes(steps_C: np.ndarray) -> bytes:
    changed_C = steps_C != 0
    out = bytearray()
    _put_stream(out, np.packbits(changed_C))
    _put_planes(out, steps_C[changed_C] - steps_C.dtype.type(1))
    return bytes(out)


def _decode_planes(payload: memoryview, size: int, itemsize: int) -> np.ndarray:
    reader = _Reader(payload)
    changed_C = np.unpackbits(reader.stream((size + 7) // 8), count=size).view(bool)
    values = reader.planes(int(np.count_nonzero(changed_C)), itemsize)
    reader.finish()
    steps_C = np.zeros(size, f"<u{itemsize}")
    steps_C[changed_C] = values + values.dtype.type(1)
    return steps_C


def _encode_full(new_C: np.ndarray) -> bytes:
    out = bytearray()
    top = new_C.itemsize * 8 - 1
    _put_planes(out, (new_C << 1) | (new_C >> top))
    return bytes(out)


def _decode_full(payload: memoryview, size: int, itemsize: int) -> np.ndarray:
    reader = _Reader(payload)
    rotated_C = reader.planes(size, itemsize)
    reader.finish()
    return (rotated_C >> 1) | (rotated_C << (itemsize * 8 - 1))


@dataclass(frozen=True)
class _Coder:
    """Steps of one chunk, sorted by the old exponent, to bytes and (given size and width) back."""

    encode: Callable[[np.ndarray], bytes]
    decode: Callable[[memoryview, int, int], np.ndarray]


_CODERS = {
    Tier.GAPS: _Coder(_encode_gaps, _decode_gaps),
    Tier.PLANES: _Coder(_encode_planes, _decode_planes),
}
"""The tiers that code steps. A new one: a number in `Tier`, a line here, and the choice in `_encode_chunk`."""


def _order(old_C: np.ndarray) -> np.ndarray:
    """Permutation that puts elements of one exponent together, smallest exponent first."""
    return np.argsort(exponents(old_C), kind="stable")


def _ordered(bits_N: np.ndarray) -> np.ndarray:
    """Sign and magnitude to two's complement, as unsigned: -0 becomes -1, so that no two patterns meet."""
    return bits_N ^ (_sign(bits_N) >> 1)


_unordered = _ordered  # the sign bit stays, so the same flip undoes it


def _zigzag(distance_N: np.ndarray) -> np.ndarray:
    return (distance_N << 1) ^ _sign(distance_N)


def _unzigzag(steps_N: np.ndarray) -> np.ndarray:
    one = steps_N.dtype.type(1)
    return (steps_N >> one) ^ (~(steps_N & one) + one)


def _sign(bits_N: np.ndarray) -> np.ndarray:
    """All ones where the top bit is set, else zero."""
    return (bits_N.view(f"<i{bits_N.itemsize}") >> (bits_N.itemsize * 8 - 1)).view(bits_N.dtype)


def _flat(array: np.ndarray) -> np.ndarray:
    if array.dtype.itemsize not in (1, 2, 4):
        raise CodecError(f"deltas of {array.dtype} are not supported: give 8, 16 or 32-bit values")
    return bits(array).reshape(-1)


def _put_number(out: bytearray, value: int) -> None:
    """LEB128: seven bits a byte, low ones first."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_stream(out: bytearray, array: np.ndarray) -> None:
    raw = array.tobytes()
    packed = _compressor().compress(raw) if len(raw) > 16 else raw
    _put_number(out, len(raw))
    if len(packed) < len(raw):
        _put_number(out, len(packed))
        out += packed
    else:
        _put_number(out, len(raw))
        out += raw


def _put_escaped(out: bytearray, values: np.ndarray) -> None:
    """One byte each; a value of 255 or more is 255 there and written in full in a second stream."""
    wide = values >= _ESCAPE
    _put_stream(out, np.where(wide, _ESCAPE, values).astype(np.uint8))
    _put_stream(out, values[wide])


def _put_planes(out: bytearray, values: np.ndarray) -> None:
    for plane in values.view(np.uint8).reshape(-1, values.itemsize).T:
        _put_stream(out, plane)


class _Reader:
    """Reads what the `_put` functions wrote; every shortage is a CodecError."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = memoryview(data).cast("B")
        self.at = 0

    def bytes(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise CodecError(f"delta is cut off: {count} bytes expected, {len(self.data) - self.at} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.bytes(1)[0]

    def number(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            part = self.byte()
            value |= (part & 0x7F) << shift
            if part < 0x80:
                return value
        raise CodecError("delta is damaged: a number has no end")

    def stream(self, size: int) -> np.ndarray:
        """uint8 [size]"""
        raw, stored = self.number(), self.number()
        if raw != size or stored > raw:
            raise CodecError(f"delta is damaged: a stream of {raw} bytes stored in {stored}, {size} expected")
        data = self.bytes(stored)
        if stored < raw:
            try:
                data = _decompressor().decompress(data, max_output_size=raw)
            except zstandard.ZstdError as error:
                raise CodecError(f"delta is damaged: {error}") from error
            if len(data) != raw:
                raise CodecError(f"delta is damaged: a stream unpacks to {len(data)} bytes, {raw} expected")
        return np.frombuffer(data, np.uint8)

    def escaped(self, count: int, itemsize: int) -> np.ndarray:
        narrow = self.stream(count)
        wide = narrow == _ESCAPE
        values = narrow.astype(f"<u{itemsize}")
        values[wide] = self.stream(int(np.count_nonzero(wide)) * itemsize).view(f"<u{itemsize}")
        return values

    def planes(self, count: int, itemsize: int) -> np.ndarray:
        planes = np.empty((count, itemsize), np.uint8)
        for plane in range(itemsize):
            planes[:, plane] = self.stream(count)
        return planes.reshape(-1).view(f"<u{itemsize}")

    def finish(self) -> None:
        if self.at != len(self.data):
            raise CodecError(f"delta is damaged: {len(self.data) - self.at} bytes too many")


def _parameters() -> zstandard.ZstdCompressionParameters:
    # Level 1: higher ones gain under 1 %. Without magic number and size, which the stream header makes redundant.
    return zstandard.ZstdCompressionParameters.from_level(
        1, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
    )


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(compression_params=_parameters())


def _decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
