"""The tiers of the codec that need numpy and zstandard only.

    split   few changed: distances between changed elements, and their steps, in separate streams
    dense   many changed: every step, sorted by the old exponent, in byte planes
    full    no old value, or one that does not help: the new bits, sign rotated to the low end, in byte planes

Each is a pair of functions from and to the bytes of one chunk. Values are unsigned integers, flat.
"""

from __future__ import annotations

import numpy as np

from stretto.weights.numberline import exponents, moved, steps
from stretto.weights.streams import CodecError, Reader, put_escaped, put_number, put_planes


def encode_split(old_C: np.ndarray, new_C: np.ndarray) -> bytes:
    where = np.flatnonzero(old_C != new_C)
    steps_N = steps(old_C[where], new_C[where])
    out = bytearray()
    put_number(out, where.size)
    put_escaped(out, (np.diff(where, prepend=-1) - 1).astype("<u4"))
    put_escaped(out, steps_N - steps_N.dtype.type(1))
    return bytes(out)


def decode_split(old_C: np.ndarray, payload: memoryview) -> tuple[np.ndarray, np.ndarray]:
    """Positions (uint32, ascending) and the new values there."""
    reader = Reader(payload)
    count = reader.number()
    if count > old_C.size:
        raise CodecError(f"delta is damaged: {count} changes in a chunk of {old_C.size} elements")
    gaps, values = reader.escaped(count, 4), reader.escaped(count, old_C.itemsize)
    reader.finish()
    where = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and where[-1] >= old_C.size:
        raise CodecError(f"delta is damaged: a change at element {where[-1]} of a chunk of {old_C.size}")
    return where.astype(np.uint32), moved(old_C[where], values + values.dtype.type(1))


def encode_dense(old_C: np.ndarray, new_C: np.ndarray) -> bytes:
    out = bytearray()
    put_planes(out, steps(old_C, new_C)[_order(old_C)])
    return bytes(out)


def decode_dense(old_C: np.ndarray, payload: memoryview) -> np.ndarray:
    reader = Reader(payload)
    steps_C = np.empty_like(old_C)
    steps_C[_order(old_C)] = reader.planes(old_C.size, old_C.itemsize)
    reader.finish()
    return moved(old_C, steps_C)


def _order(old_C: np.ndarray) -> np.ndarray:
    """Elements of one exponent together, smallest exponent first: both sides know it, and like sits beside like."""
    return np.argsort(exponents(old_C), kind="stable")


def encode_full(new_C: np.ndarray) -> bytes:
    out = bytearray()
    put_planes(out, (new_C << 1) | (new_C >> (new_C.itemsize * 8 - 1)))
    return bytes(out)


def decode_full(payload: memoryview, size: int, itemsize: int) -> np.ndarray:
    reader = Reader(payload)
    rotated_C = reader.planes(size, itemsize)
    reader.finish()
    return (rotated_C >> 1) | (rotated_C << (itemsize * 8 - 1))
