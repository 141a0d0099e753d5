"""Tier rice: weights of the elements of a tile, and their running sum at each block. Encoder and decoder do this to
every element, so it is what their speed depends on.
"""

from __future__ import annotations

import numpy as np

from stretto.weights.compiled import compiled
from stretto.weights.vector import AHEAD, BLOCK, LANES, accumulate, exponent, get, put, slope

TILE = 2048
"""Elements whose weights lie in the nearest cache; together they stay below 2^32."""

SUMS = TILE // BLOCK + 1 + AHEAD
"""Room for the sums of a tile: at the start of each block, at the end, then numbers that no sum reaches."""


@compiled
def room(lanes):
    """What `measure` fills."""
    return np.zeros(lanes * TILE, np.uint8), np.full(lanes * SUMS, 0xFFFFFFFF, np.uint32)


@compiled
def measure(old_C, start, stop, table, flat, foot, shifts, sums, lane):
    """Of a tile, into `shifts` (TILE bytes a lane) t of each element, by `table`, or faster by the line if `foot` is
    not negative; into `sums` (SUMS a lane) the running sum of the weights 2^t. Returns the sum of all."""
    base, place, size, at = lane * TILE, lane * SUMS, stop - start, 0
    if foot >= 0:
        while at + LANES <= size:
            slope(old_C, start + at, flat, foot, shifts, base + at)
            at += LANES
    for i in range(at, size):
        put(shifts, base + i, get(table, exponent(old_C, start + i)))
    end = (size + LANES - 1) // LANES * LANES
    for i in range(size, end):
        put(shifts, base + i, 0)
    put(sums, place, 0)
    total = np.uint32(0)
    for first in range(0, end, LANES):
        total = accumulate(shifts, base + first, total, sums, place + 1 + first // BLOCK)
    if size < TILE:
        for i in range(place + 1 + end // BLOCK, place + 1 + end // BLOCK + AHEAD):
            put(sums, i, 0xFFFFFFFF)
    return np.int64(total) - (end - size)
