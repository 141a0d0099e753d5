"""Tier rice: the encoder's two passes. `scan` finds the changes, `write` makes bits of them.

A gap takes its low bits from the gap after it, so `write` goes backwards, and puts each change's bits before those of
the next. The stream is read forwards, as `rice_read.py` says. Numba would make a float of int64 and uint64 together:
words are uint64, everything that counts is int64.
"""

from __future__ import annotations

import numpy as np

from stretto.weights.compiled import compiled
from stretto.weights.rice_tables import GROUP, ONES, SIZE, SIZES, WAY, K, split
from stretto.weights.rice_tiles import TILE, measure, room
from stretto.weights.vector import (
    BLOCK,
    LANES,
    differs,
    exponent,
    get,
    number,
    ones,
    put,
    step,
    trailing_zeros,
    weight,
)

LONGEST = 24
"""A quotient from here on is written in full, in 32 bits after so many ones."""

MOST_BITS = 256
"""More than one change can take."""

_AT_ONCE = 4
_U64 = np.uint64


@compiled
def _find(old_C, new_C, start, stop, positions):
    """Where two tiles differ, into `positions`, which has LANES places more than a tile: how many. Compares bits."""
    count, at = 0, start
    while at + LANES <= stop:
        different = differs(old_C, new_C, at)
        found = ones(different)
        for k in range(_AT_ONCE):  # always as many, so that the processor has no branch to guess
            put(positions, count + k, at + trailing_zeros(different))
            different &= different - _U64(1)
        for k in range(_AT_ONCE, found):
            put(positions, count + k, at + trailing_zeros(different))
            different &= different - _U64(1)
        count += found
        at += LANES
    for i in range(at, stop):
        put(positions, count, i)
        count += get(old_C, i) != get(new_C, i)
    return count


@compiled
def scan(old_C, new_C, table, flat, foot, gaps, olds, news, changed, larger, excess):
    """All changes: sum of the weights of the elements since the change before, old and new bits; per exponent the
    changes, those of more than one ulp, and the sum of |step| - 1. Returns how many, or -1 if there is no room."""
    shifts, sums = room(1)
    here = np.empty(TILE + LANES, np.int64)
    size, count, before, passed = old_C.size, 0, np.int64(0), np.int64(0)
    for start in range(0, size, TILE):
        stop = min(start + TILE, size)
        total = measure(old_C, start, stop, table, flat, foot, shifts, sums, 0)
        found = _find(old_C, new_C, start, stop, here)
        if count + found > gaps.size:
            return -1
        for k in range(found):
            at = get(here, k)
            i = at - start
            first = i & ~(BLOCK - 1)
            through = before + get(sums, i // BLOCK) + weight(shifts, first, i - first)
            put(gaps, count, through - passed)
            passed = through + (np.int64(1) << get(shifts, i))
            put(olds, count, get(old_C, at))
            put(news, count, get(new_C, at))
            count += 1
            group = exponent(old_C, at)
            beyond = abs(step(old_C, new_C, at)) - 1
            put(changed, group, get(changed, group) + 1)
            if beyond > 0:
                put(larger, group, get(larger, group) + 1)
                put(excess, group, get(excess, group) + beyond)
        before += total
    return count


@compiled
def _put(words, at, free, held, value, bits):
    """`value` before what was written last, up to 57 bits of it: the word begun, its free low bits, its bits."""
    free -= bits
    low = _U64(value) << _U64(free & 63)
    over = np.int64(free < 0)
    whole = held | (_U64(value) >> _U64(-free & 63) if over else low)
    put(words, at, whole)
    return at - over, free + (over << 6), low if over else whole


@compiled
def _put_rice(words, at, free, held, value, k):
    quotient = value >> k
    if quotient < LONGEST:
        rest = value & ((np.int64(1) << k) - 1)
        return _put(words, at, free, held, ((np.int64(1) << quotient) - 1) | (rest << (quotient + 1)), quotient + 1 + k)
    at, free, held = _put(words, at, free, held, value, 32)
    return _put(words, at, free, held, (np.int64(1) << LONGEST) - 1, LONGEST)


@compiled
def write(gaps, olds, news, codes, classes, centres, words, end):
    """The stream, so that it ends where bit `end` of `words` begins: where it begins, or -1 if there is no room."""
    width = olds.itemsize * 8
    at, free = end >> 6, end & 63
    held = words[at] & ~((_U64(1) << _U64(free)) - _U64(1))
    left = np.zeros(centres.size, np.int64)  # +-1 of the class from here on to the next larger step
    after = np.int64(0)
    code = get(codes, exponent(olds, gaps.size - 1)) if gaps.size else np.int64(0)
    for k in range(gaps.size - 1, -1, -1):
        if (at << 6) < MOST_BITS:
            return np.int64(-1)
        way, size, t = (code >> WAY) & 31, (code >> SIZE) & 31, code & 31
        far = step(olds, news, k)
        sign, rest = np.int64(far < 0), abs(far) - 1
        if way < ONES:
            group = code >> GROUP
            if rest > 0:
                at, free, held = _put_rice(words, at, free, held, left[group], way)
                at, free, held = _put_rice(words, at, free, held, rest - 1, size)
                left[group] = 0
            else:
                left[group] += 1
        elif way > ONES:
            if way > SIZES:
                sign, rest = split(way, centres[code >> GROUP], number(olds, k), number(news, k), width)
            at, free, held = _put_rice(words, at, free, held, rest, size)
        gap = get(gaps, k) + (after & ((np.int64(1) << t) - 1))
        after = gap
        code = get(codes, exponent(olds, k - 1)) if k > 0 else np.int64(0)
        t = code & 31
        quotient, keep = gap >> K, K - t
        rest = ((gap & ((np.int64(1) << K) - 1)) >> t) | (sign << keep)
        if quotient < LONGEST:
            value = ((np.int64(1) << quotient) - 1) | (rest << (quotient + 1))
            at, free, held = _put(words, at, free, held, value, quotient + 2 + keep)
        else:
            at, free, held = _put(words, at, free, held, rest, keep + 1)
            value = (np.int64(1) << LONGEST) - 1 | (quotient << LONGEST)
            at, free, held = _put(words, at, free, held, value, LONGEST + 32)
    for group in range(centres.size - 1, -1, -1):
        if (at << 6) < MOST_BITS:
            return np.int64(-1)
        way = np.int64(classes[group] >> WAY) & 31
        if way < ONES:
            at, free, held = _put_rice(words, at, free, held, left[group], way)
    words[at] = held
    return (at << 6) + free
