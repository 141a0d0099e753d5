"""Weight deltas, bit-exact: which elements changed, and by how many units in the last place.

    data = encode(old, new)                       the publisher
    patches = decode(old, data, shape, dtype)     a reader, off to the side: nothing is changed yet
    apply(patches, tensor)                        in place, as fast as memory: this is all that serving waits for

A tensor is cut into chunks, which are coded by themselves and on several cores. For each chunk one of five tiers:

    same    nothing changed
    rice    few changed: near the bound given the old exponents (`rice.py`, needs numba)
    split   few changed, with numpy and zstandard alone                           } `dense.py`
    dense   many changed                                                          }
    full    no old value, or one that does not help                               }

    frame:  format, width | has-base, elements, log2 of a chunk, then per chunk: tier, length, payload

Numbers are LEB128. Any 8, 16 or 32-bit pattern goes through unchanged: values are only ever compared as integers. A
patch holds new values, not differences, so that applying it twice is applying it once. A wrong base may go unnoticed
here; the chain's state hashes notice it (`chain.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TypeVar

import numpy as np

from stretto.weights import dense
from stretto.weights.state import bits
from stretto.weights.streams import CodecError, Reader, put_number

FORMAT = 3
"""Version of the byte layout. A reader refuses any other by name."""

CHUNK_BITS = 22
"""2^this elements are coded together: what one core works on, and what sets the memory it needs."""

LARGEST_CHUNK_BITS = 26
"""What a reader accepts: positions are 32 bits, sums of weights stay far from 64."""

SMALL = 1 << 15
"""Up to so many elements the tables of tier rice may cost more than it saves, and split is tried too."""

MANY = 0.5
"""Share of changed elements from which the dense tiers are tried too."""

TOO_MANY = 0.8
"""Share from which only they are."""

_HAS_BASE = 0x80

_T = TypeVar("_T")
_R = TypeVar("_R")


class Tier(enum.IntEnum):
    """How a chunk is coded. Numbers are part of the format: never reuse one."""

    SAME = 0
    RICE = 1
    SPLIT = 2
    DENSE = 3
    FULL = 4


@dataclass(frozen=True)
class Patch:
    """New values for the elements `start` to `stop` of a flat tensor: at `positions` (from `start` on, uint32,
    ascending), or all of them if that is None. Unsigned integers of the tensor's width."""

    start: int
    stop: int
    positions: np.ndarray | None
    values: np.ndarray


def encode(old: np.ndarray | None, new: np.ndarray, tier: Tier | None = None, threads: int = 1) -> bytes:
    """Bytes from which `decode` makes `new`, given `old` (same shape and width; None: without a base).

    `tier` forces one for every chunk that changed. Raises CodecError for a dtype that is not 8, 16 or 32 bits wide and
    for arrays that do not match.
    """
    new_N = _flat(new)
    if old is not None and (old.shape != new.shape or old.dtype.itemsize != new.dtype.itemsize):
        raise CodecError(
            f"the base is {old.dtype} {old.shape} and the new tensor {new.dtype} {new.shape}: "
            "a delta needs two tensors of one shape and width"
        )
    old_N = None if old is None else _flat(old)
    out = bytearray((FORMAT, new_N.itemsize | (0 if old is None else _HAS_BASE)))
    put_number(out, new_N.size)
    out.append(CHUNK_BITS)
    chunk = 1 << CHUNK_BITS

    def one(start: int) -> tuple[Tier, bytes]:
        span = slice(start, start + chunk)
        return _encode_chunk(None if old_N is None else old_N[span], new_N[span], tier)

    for used, payload in on_cores(threads, one, range(0, new_N.size, chunk)):
        out.append(used)
        put_number(out, len(payload))
        out += payload
    return bytes(out)


def decode(
    old: np.ndarray | None, data: bytes | memoryview, shape: tuple[int, ...], dtype: np.dtype, threads: int = 1
) -> list[Patch]:
    """What has to be written into a tensor of `shape` and `dtype` that holds `old`, in the order of elements. Chunks
    in which nothing changed have no patch. Neither `old` nor any tensor is changed.

    Raises CodecError for a format or tier this program does not know, truncated or damaged bytes, and a base or shape
    that does not fit.
    """
    dtype = np.dtype(dtype)
    reader = Reader(data)
    version = reader.byte()
    if version != FORMAT:
        raise CodecError(f"delta has format {version}, this program reads {FORMAT}: update the older side")
    width = reader.byte()
    needs_base, itemsize = bool(width & _HAS_BASE), width & ~_HAS_BASE
    size, chunk_bits = reader.number(), reader.byte()
    if itemsize != dtype.itemsize or size != int(np.prod(shape, dtype=np.int64)):
        raise CodecError(f"delta holds {size} elements of {itemsize} bytes, asked for was {dtype} {tuple(shape)}")
    if chunk_bits > LARGEST_CHUNK_BITS:
        raise CodecError(f"delta is damaged: chunks of 2^{chunk_bits} elements, 2^{LARGEST_CHUNK_BITS} is the largest")
    if needs_base and old is None:
        raise CodecError("delta needs the version it was made from, and there is none")
    if old is not None and needs_base and (old.size != size or old.dtype.itemsize != itemsize):
        raise CodecError(f"delta of {size} elements of {itemsize} bytes does not fit a base of {old.dtype} {old.shape}")
    old_N = _flat(old) if needs_base and old is not None else None
    pieces, chunk = [], 1 << chunk_bits
    for start in range(0, size, chunk):
        number, payload = reader.byte(), reader.bytes(reader.number())
        pieces.append((start, min(start + chunk, size), number, payload))
    reader.finish()

    def one(piece: tuple[int, int, int, memoryview]) -> Patch | None:
        start, stop, number, payload = piece
        return _decode_chunk(number, None if old_N is None else old_N[start:stop], payload, start, stop, itemsize)

    return [patch for patch in on_cores(threads, one, pieces) if patch is not None]


def apply(patches: Sequence[Patch], tensor: np.ndarray, threads: int = 1) -> None:
    """Write into `tensor`, in place. It must be contiguous and of the shape and width that was decoded.

    Raises CodecError, before anything is written, for a tensor that is not.
    """
    if not tensor.flags.c_contiguous or not tensor.flags.writeable:
        raise CodecError("a delta can only be applied to a contiguous tensor that may be written to")
    target_N = tensor.reshape(-1).view(f"<u{tensor.itemsize}")
    for patch in patches:
        if patch.stop > target_N.size or patch.values.dtype != target_N.dtype:
            raise CodecError(
                f"a delta for elements {patch.start} to {patch.stop} of {patch.values.itemsize} bytes does not fit a "
                f"tensor of {tensor.dtype} {tensor.shape}"
            )
    kernels = _rice()

    def one(patch: Patch) -> None:
        part = target_N[patch.start : patch.stop]
        if patch.positions is None:
            part[:] = patch.values
        elif kernels is not None:
            kernels.scatter(part, patch.positions, patch.values)
        else:
            part[patch.positions] = patch.values

    on_cores(threads, one, patches)


def restore(
    old: np.ndarray | None, data: bytes | memoryview, shape: tuple[int, ...], dtype: np.dtype, threads: int = 1
) -> np.ndarray:
    """The new tensor, in memory of its own: `decode` and `apply` on a copy of `old`."""
    patches = decode(old, data, shape, dtype, threads)
    dtype = np.dtype(dtype).newbyteorder("<")
    new = np.zeros(shape, dtype) if old is None else bits(old).copy().view(dtype).reshape(shape)
    apply(patches, new, threads)
    return new


def on_cores(threads: int, work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """`work` on each item, in order, by as many threads. The coders release the interpreter lock."""
    items = list(items)
    if threads <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def _encode_chunk(old_C: np.ndarray | None, new_C: np.ndarray, tier: Tier | None) -> tuple[Tier, bytes]:
    if old_C is None:
        return Tier.FULL, dense.encode_full(new_C)
    if tier is not None and tier != Tier.RICE:
        return _forced(tier, old_C, new_C)
    rice = _rice()
    if rice is None:
        if tier is not None:
            raise CodecError("tier rice needs numba, which is not installed")
        return _without_numba(old_C, new_C)
    room = new_C.size if tier is not None else int(TOO_MANY * new_C.size) + 1
    count, payload = rice.encode(old_C, new_C, room)
    if count == 0:
        return Tier.SAME, b""
    if 0 < count < MANY * new_C.size and new_C.size <= SMALL and tier is None:
        split = dense.encode_split(old_C, new_C)
        return (Tier.SPLIT, split) if len(split) < len(payload) else (Tier.RICE, payload)
    if tier is not None or 0 < count < MANY * new_C.size:
        return Tier.RICE, payload
    return _smallest([(Tier.RICE, payload)] if count > 0 else [], old_C, new_C)


def _without_numba(old_C: np.ndarray, new_C: np.ndarray) -> tuple[Tier, bytes]:
    changed = int(np.count_nonzero(old_C != new_C))
    if changed == 0:
        return Tier.SAME, b""
    if changed > TOO_MANY * new_C.size:
        return _smallest([], old_C, new_C)
    split = Tier.SPLIT, dense.encode_split(old_C, new_C)
    return split if changed < MANY * new_C.size else _smallest([split], old_C, new_C)


def _smallest(found: list[tuple[Tier, bytes]], old_C: np.ndarray, new_C: np.ndarray) -> tuple[Tier, bytes]:
    found = [*found, (Tier.DENSE, dense.encode_dense(old_C, new_C))]
    if min(len(payload) for _, payload in found) > new_C.nbytes // 2:  # so far from the base that it may not help
        found.append((Tier.FULL, dense.encode_full(new_C)))
    return min(found, key=lambda pair: len(pair[1]))


def _forced(tier: Tier, old_C: np.ndarray, new_C: np.ndarray) -> tuple[Tier, bytes]:
    if np.array_equal(old_C, new_C):
        return Tier.SAME, b""
    if tier == Tier.SPLIT:
        return tier, dense.encode_split(old_C, new_C)
    if tier == Tier.DENSE:
        return tier, dense.encode_dense(old_C, new_C)
    if tier == Tier.FULL:
        return tier, dense.encode_full(new_C)
    raise CodecError(f"tier {tier.name.lower()} cannot hold changes")


def _decode_chunk(
    number: int, old_C: np.ndarray | None, payload: memoryview, start: int, stop: int, itemsize: int
) -> Patch | None:
    if number == Tier.FULL:
        return Patch(start, stop, None, dense.decode_full(payload, stop - start, itemsize))
    if number not in (Tier.SAME, Tier.RICE, Tier.SPLIT, Tier.DENSE):
        known = ", ".join(f"{tier.value} ({tier.name.lower()})" for tier in Tier)
        raise CodecError(f"delta uses coding tier {number}, this program knows {known}: update it")
    if old_C is None:
        raise CodecError(f"delta is damaged: tier {number} needs a base, and the header says there is none")
    if number == Tier.SAME:
        if payload:
            raise CodecError(f"delta is damaged: {len(payload)} bytes for a chunk in which nothing changed")
        return None
    if number == Tier.DENSE:
        return Patch(start, stop, None, dense.decode_dense(old_C, payload))
    if number == Tier.SPLIT:
        return Patch(start, stop, *dense.decode_split(old_C, payload))
    rice = _rice()
    if rice is None:
        raise CodecError("delta uses coding tier rice, which needs numba: install it")
    return Patch(start, stop, *rice.decode(old_C, payload))


@cache
def _rice() -> ModuleType | None:
    """Imported when first needed: numba takes a second to load."""
    try:
        from stretto.weights import rice
    except ImportError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        return None
    return rice


def warm_up(*dtypes: str) -> None:
    """Compile (or load from numba's cache) the coders for unsigned `dtypes`, by default bf16's bits, so that the first
    version does not wait for it."""
    for dtype in dtypes or ("uint16",):
        old = np.arange(256).astype(dtype)
        apply(decode(old, encode(old, old ^ old.dtype.type(1), Tier.RICE), old.shape, old.dtype), old)


def _flat(array: np.ndarray) -> np.ndarray:
    if array.dtype.itemsize not in (1, 2, 4):
        raise CodecError(f"deltas of {array.dtype} are not supported: give 8, 16 or 32-bit values")
    return bits(array).reshape(-1)
