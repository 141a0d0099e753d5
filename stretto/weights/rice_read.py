"""Tier rice: the decoder. One change must be known before the next can be read, and a processor has time for several
such chains at once. So a chunk with many changes has a stream for each of its four parts (*lanes*).

One stream, low bits first. First, for each class that is RUNS, the +-1 until its first larger step (Rice). Then for
each change, in the order of the elements:

    unary   quotient of the gap by 2^K                          (24 ones: 32 bits instead)
    bits    remainder of the gap without its low t bits, t being that of the change before
    1 bit   sign of the step
    Rice    in classes that have them: the step's size, and the +-1 until the next larger one
"""

from __future__ import annotations

import numpy as np

from stretto.weights.compiled import compiled
from stretto.weights.rice_tables import GROUP, ONES, SIZE, SIZES, VALUES, WAY, K
from stretto.weights.rice_tiles import SUMS, TILE, measure, room
from stretto.weights.rice_write import LONGEST
from stretto.weights.vector import (
    AHEAD,
    BLOCK,
    exponent,
    fetch,
    get,
    number,
    put,
    reached,
    set_number,
    sum_within,
    trailing_zeros,
    within,
)

LANES = 4

_U64 = np.uint64
_AT, _PASSED, _KNOWN, _BLOCK, _TOTAL, _TILE, _OUT, _END = range(8)
"""What is known of a lane: the next bit; where in its tile's weights the next gap begins, and t of the change before;
the block of that change; the tile's weight and first element; places among all changes of the next one and the end."""

_STATE = 8
_NO_END = 1 << 62
"""Changes of a class until its next larger step, if it is not RUNS."""


@compiled
def _peek(words, at):
    """The 64 bits from bit `at` on."""
    word, bit = at >> 6, _U64(at & 63)
    return (_U64(get(words, word)) >> bit) | ((_U64(get(words, word + 1)) << _U64(1)) << (_U64(63) - bit))


@compiled
def _ones(bits):
    """How many of the low bits are ones, up to LONGEST."""
    return trailing_zeros(~bits | _U64(1 << LONGEST))


@compiled
def _get_rice(words, at, k):
    """(value, where the next begins)"""
    bits = _peek(words, at)
    quotient = _ones(bits)
    if quotient < LONGEST:
        rest = np.int64((bits >> _U64(quotient + 1)) & ((_U64(1) << _U64(k)) - _U64(1)))
        return (quotient << k) | rest, at + quotient + 1 + k
    return np.int64((bits >> _U64(LONGEST)) & _U64(0xFFFFFFFF)), at + LONGEST + 32


@compiled
def joined(way, centre, old, sign, value):
    """Undoes `split`: the new value, but for bits beyond its width."""
    if way == VALUES:
        size = centre + ((value >> 1) ^ -(value & 1))
        return -1 - size if sign else size
    away = centre + (value ^ -sign)
    return old - away if old < 0 else old + away


@compiled
def read(old_C, words, starts, ends, counts, part, table, flat, foot, codes, classes, centres, positions, values):
    """Positions of the changes and the new values, of each lane `counts` behind those of the lanes before; each lane is
    `part` elements. Bits `starts` to `ends` of `words` are theirs, which has six words more. Returns whether the stream
    is whole and fits."""
    lanes, groups = counts.size, centres.size
    shifts, sums = room(lanes)
    runs = np.full(lanes * groups, _NO_END)
    state = np.zeros(lanes * _STATE, np.int64)
    out, going = np.int64(0), 0
    for lane in range(lanes):
        at = starts[lane]
        for group in range(groups):
            way = np.int64(classes[group] >> WAY) & 31
            if way < ONES:
                if at > ends[lane]:
                    return False
                runs[lane * groups + group], at = _get_rice(words, at, way)
        going += counts[lane] > 0
        if counts[lane] == 0 and at != ends[lane]:
            return False
        mine = lane * _STATE
        state[mine + _AT], state[mine + _TILE], state[mine + _OUT] = at, lane * part - TILE, out
        out += counts[lane]
        state[mine + _END] = out
    last = ends[lanes - 1]
    while going > 0:
        for lane in range(lanes):
            mine = lane * _STATE
            at, o = get(state, mine + _AT), get(state, mine + _OUT)
            if o == get(state, mine + _END):
                continue
            if at > last:
                return False
            word = _peek(words, at)
            quotient = _ones(word)
            if quotient < LONGEST:
                word >>= _U64(quotient + 1)
                at += quotient + 1
                fresh = 63 - quotient
            else:
                quotient = np.int64((word >> _U64(LONGEST)) & _U64(0xFFFFFFFF))
                at += LONGEST + 32
                word = _peek(words, at)
                fresh = np.int64(64)
            t = get(state, mine + _KNOWN)
            keep = K - t
            rest = np.int64(word & ((_U64(1) << _U64(keep)) - _U64(1)))
            word >>= _U64(keep)
            sign = np.int64(word & _U64(1))
            word >>= _U64(1)
            at += keep + 1
            fresh -= keep + 1
            target = get(state, mine + _PASSED) + ((quotient << K) | (rest << t))
            b = get(state, mine + _BLOCK)
            while target >= get(state, mine + _TOTAL):
                target -= get(state, mine + _TOTAL)
                start = get(state, mine + _TILE) + TILE
                stop = min(start + TILE, (lane + 1) * part, old_C.size)
                if start >= stop:
                    return False
                put(state, mine + _TILE, start)
                put(state, mine + _TOTAL, measure(old_C, start, stop, table, flat, foot, shifts, sums, lane))
                for ahead in range(start + TILE, start + 2 * TILE, 64 // old_C.itemsize):
                    fetch(old_C, ahead)
                b = np.int64(0)
            while True:
                ahead = reached(sums, lane * SUMS + b + 1, target)
                b += ahead
                if ahead < AHEAD:
                    break
            before = get(sums, lane * SUMS + b)
            place = lane * TILE + b * BLOCK
            more = within(shifts, place, target - before)
            skipped = before + sum_within(shifts, place, target - before)
            i = get(state, mine + _TILE) + b * BLOCK + more
            code = get(codes, exponent(old_C, i))
            way, size = (code >> WAY) & 31, (code >> SIZE) & 31
            t = code & 31
            # A size is read in any case, and then perhaps not used: no branch to guess.
            sized = -np.int64(way > ONES)
            quotient = _ones(word)
            value = (
                (quotient << size) | np.int64((word >> _U64(quotient + 1)) & ((_U64(1) << _U64(size)) - _U64(1)))
            ) & sized
            bits = (quotient + 1 + size) & sized
            if bits > fresh or quotient & sized == LONGEST:
                value, at = _get_rice(words, at, size)
            else:
                at += bits
            old = number(old_C, i)
            run = lane * groups + (code >> GROUP)
            left = get(runs, run) - 1
            if left < 0:
                value, at = _get_rice(words, at, size)
                value += 1
                left, at = _get_rice(words, at, way)
            put(runs, run, left)
            new = old + ((value + 1) ^ -sign) + sign
            if way > SIZES:
                new = joined(way, get(centres, code >> GROUP), old, sign, value)
            put(positions, o, i)
            set_number(values, o, new)
            o += 1
            put(state, mine + _AT, at)
            put(state, mine + _OUT, o)
            put(state, mine + _BLOCK, b)
            put(state, mine + _KNOWN, t)
            put(state, mine + _PASSED, (np.int64(1) << t) + target)
            if o == get(state, mine + _END):
                if at != ends[lane] or target != skipped:
                    return False
                going -= 1
    return True


@compiled
def scatter(target_C, positions, values):
    """In place. The caller has checked the positions."""
    for k in range(positions.size):
        target_C[positions[k]] = values[k]
