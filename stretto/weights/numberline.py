"""Floats as integers in numeric order, so that a training step is a short way on a number line, mostly +-1.

Bits are only ever looked at as integers of their width: NaN payloads, infinities and both zeros are numbers like all
others here, and no two patterns meet.
"""

from __future__ import annotations

import numpy as np

from stretto.weights.state import bits

FIELDS = {1: (3, 0x0F), 2: (7, 0xFF), 4: (23, 0xFF)}
"""Bytes of an element: where its exponent is, as shift and mask. Of fp8 e4m3, bf16, fp32; for any other type of these
widths they are simply high bits, which group values just as well."""


def steps(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Distance from `old` to `new` in ulps, zig-zag coded (0, -1, 1, -2 -> 0, 1, 2, 3): unsigned, of the same width,
    flat. A bijection for a given `old`: overflow wraps."""
    return zigzag(ordered(bits(new).reshape(-1)) - ordered(bits(old).reshape(-1)))


def moved(old_N: np.ndarray, steps_N: np.ndarray) -> np.ndarray:
    """The new bits: undoes `steps`. Both unsigned, flat, of one width."""
    return ordered(ordered(old_N) + unzigzag(steps_N))


def exponents(old: np.ndarray) -> np.ndarray:
    """uint8, flat: see FIELDS."""
    old_N = bits(old).reshape(-1)
    shift, mask = FIELDS[old_N.itemsize]
    return ((old_N >> shift) & mask).astype(np.uint8)


def ordered(bits_N: np.ndarray) -> np.ndarray:
    """Sign and magnitude to two's complement, as unsigned: -0 becomes -1. Its own inverse, as the sign bit stays."""
    return bits_N ^ (_sign(bits_N) >> 1)


def zigzag(distance_N: np.ndarray) -> np.ndarray:
    return (distance_N << 1) ^ _sign(distance_N)


def unzigzag(steps_N: np.ndarray) -> np.ndarray:
    one = steps_N.dtype.type(1)
    return (steps_N >> one) ^ (~(steps_N & one) + one)


def _sign(bits_N: np.ndarray) -> np.ndarray:
    """All ones where the top bit is set, else zero."""
    return (bits_N.view(f"<i{bits_N.itemsize}") >> (bits_N.itemsize * 8 - 1)).view(bits_N.dtype)
