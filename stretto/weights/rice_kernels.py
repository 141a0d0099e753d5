"""The loops of `rice.py`, compiled by numba: no allocation, no exceptions, the interpreter lock released.

One bit stream, low bits first, in 64-bit words. For each change, in the order of the elements:

    unary   quotient of the gap by 2^K                          (24 ones: 32 bits instead)
    bits    remainder of the gap without its low t bits, t being that of the change before
    1 bit   sign of the step
    Rice    how many changes of this class are still +-1, if not known        } only where the class
    Rice    the step's magnitude, less what it is at least, if it is not one  } has larger steps

Numba would make a float of int64 and uint64 together: words and masks are uint64, everything that counts is int64.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from stretto.weights.vector import differs, trailing_zeros

K = 20
"""Bits of the remainder, and the largest weight's logarithm: the rarest change it tells apart is one in 2^20."""

LONGEST = 24
"""A quotient from here on is written in full."""

ALWAYS = 31
"""In place of a Rice parameter for the gaps between large steps: every step of the class has its magnitude."""

NEVER = 31
"""In place of t: nothing in this class changes."""

SAMPLE = 64
_TILE = 2048

_U64 = np.uint64
_GOLDEN = math.log((1 + math.sqrt(5)) / 2)

_compile = njit(nogil=True, cache=True, boundscheck=False)


@_compile
def sample(old_C, new_C, shift, mask, stride, counts, changed):
    """Per bucket, how many elements and how many changes every `stride`-th run of SAMPLE elements has. Returns how
    many elements were looked at."""
    seen = 0
    for start in range(0, old_C.size, SAMPLE * stride):
        stop = min(start + SAMPLE, old_C.size)
        for i in range(start, stop):
            bucket = (np.int64(old_C[i]) >> shift) & mask
            counts[bucket] += 1
            changed[bucket] += old_C[i] != new_C[i]
        seen += stop - start
    return seen


@_compile
def _rice(count, mean):
    """The best parameter for that many geometric numbers of that mean, and the bits they then take."""
    if mean <= 0:
        return 0, float(count)
    ratio = math.log1p(1 / mean)  # of the logarithm of the probability, from one number to the next
    k = max(0, min(30, 1 + math.floor(math.log2(_GOLDEN / ratio))))
    return k, count * (k + 1 + 1 / math.expm1(min(700.0, ratio * 2.0**k)))


@_compile
def weigh(counts, changed, shifts):
    """log2 of the weight of each bucket, from what `sample` counted. A bucket in which nothing was seen to change gets
    half a change; one of which nothing was seen, its neighbour's weight."""
    t = K
    for bucket in range(counts.size):
        if counts[bucket] > 0:
            rate = -math.log1p(-min((changed[bucket] + 0.5) / (counts[bucket] + 1.0), 0.9999))
            t = max(0, min(K, int(np.rint(K + math.log2(rate / math.log(2.0))))))
        shifts[bucket] = t


@_compile
def choose(shifts, changed, larger, excess, lengths, group_shifts, gap_bits, size_bits):
    """Classes and their parameters from what is counted per exponent: changes, those of more than one ulp, the sum of
    |step| - 1. Returns how many classes there are."""
    groups = 0
    sums = np.zeros((lengths.size, 3), np.int64)
    for bucket in range(changed.size):
        t = shifts[bucket]
        if groups == 0 or t != group_shifts[groups - 1] or (t == K and changed[bucket] > 0):
            lengths[groups], group_shifts[groups] = 0, t
            groups += 1
        lengths[groups - 1] += 1
        sums[groups - 1, 0] += changed[bucket]
        sums[groups - 1, 1] += larger[bucket]
        sums[groups - 1, 2] += excess[bucket]
    for group in range(groups):
        all_, large, beyond = sums[group]
        gap_bits[group], size_bits[group] = 0, 0
        if all_ > 0:
            gap, gap_cost = _rice(large + 1, (all_ - large) / (large + 1))
            size, size_cost = _rice(large, (beyond - large) / max(1, large))
            always, always_cost = _rice(all_, beyond / all_)
            if always_cost < gap_cost + size_cost:
                gap, size = ALWAYS, always
            gap_bits[group], size_bits[group] = gap, size
    return groups


@_compile
def _sum(tile_C, shift, weights, sums):
    """Running sum of the weights at the start of each block of the tile, and at its end; returns how many blocks."""
    # A function of its own over a view that starts at 0: where an index may be negative for all that the compiler
    # knows, it is checked, and that halves the speed.
    total = np.int64(0)
    whole = tile_C.size >> 3
    for block in range(whole):
        sums[block] = total
        weight = np.uint32(0)
        for i in range(block << 3, (block << 3) + 8):
            weight += weights[tile_C[i] >> shift]
        total += np.int64(weight)
    sums[whole] = total
    if tile_C.size & 7:
        for i in range(whole << 3, tile_C.size):
            total += np.int64(weights[tile_C[i] >> shift])
        whole += 1
        sums[whole] = total
    return whole


@_compile
def _find(old_T, new_T, positions):
    """Where two tiles differ, into `positions`, as long as they are: how many. Compares bits."""
    count = 0
    for block in range(old_T.size >> 6):
        first = block << 6
        different = differs(old_T, new_T, first)
        while different != 0:
            positions[count] = first + trailing_zeros(different)
            different &= different - _U64(1)
            count += 1
    for i in range(old_T.size & ~63, old_T.size):
        if old_T[i] != new_T[i]:
            positions[count] = i
            count += 1
    return count


@_compile
def scan(old_C, new_C, shift, mask, width, weights, gaps, buckets, steps):
    """All changes: sum of the weights of the elements since the change before, bucket and step. Returns how many, or -1
    if there is no room for them."""
    half = np.int64(1) << (width - 1)
    full = (np.int64(1) << width) - 1
    sums = np.empty((_TILE >> 3) + 1, np.int64)
    here = np.empty(_TILE, np.int32)
    size, count, before, passed = old_C.size, 0, np.int64(0), np.int64(0)
    for start in range(0, size, _TILE):
        old_T, new_T = old_C[start : min(start + _TILE, size)], new_C[start : min(start + _TILE, size)]
        blocks = _sum(old_T, shift, weights, sums)
        found = _find(old_T, new_T, here)
        if count + found > gaps.size:
            return -1
        for k in range(found):
            i = here[k]
            weight = before + sums[i >> 3]
            if i | 7 < old_T.size:
                for j in range(8):  # all of the block, so that the processor has no branch to guess
                    other = np.int64(weights[old_T[_U64((i & ~7) + j)] >> shift])
                    weight += other & -np.int64(j < (i & 7))
            else:
                for j in range(i & ~7, i):
                    weight += np.int64(weights[old_T[j] >> shift])
            value, after = np.int64(old_T[i]), np.int64(new_T[i])
            bucket = (value >> shift) & mask
            value ^= (half - 1) & -(value >> (width - 1))
            after ^= (half - 1) & -(after >> (width - 1))
            gaps[count] = weight - passed
            passed = weight + np.int64(weights[bucket])
            buckets[count] = bucket
            steps[count] = ((after - value + half) & full) - half
            count += 1
        before += sums[blocks]
    return count


@_compile
def count_steps(buckets, steps, changed, larger, excess):
    """Per bucket the changes, those of more than one ulp, and the sum of |step| - 1."""
    for k in range(buckets.size):
        bucket = buckets[k]
        beyond = abs(np.int64(steps[k])) - 1
        changed[bucket] += 1
        larger[bucket] += beyond > 0
        excess[bucket] += beyond


@_compile
def _rice_bits(value, k):
    quotient = value >> k
    return quotient + 1 + k if quotient < LONGEST else LONGEST + 32


@_compile
def link(gaps, buckets, steps, shifts, classes, gap_bits, size_bits, runs):
    """Give each gap the slot that the next one's low bits name; into `runs` how many changes of the class, from this
    one on, are +-1. Returns how many bits `write` will write."""
    bits = np.int64(0)
    left = np.full(256, -1, np.int64)  # -1: no change of the class is further on
    slots = np.int64(0)
    for k in range(gaps.size - 1, -1, -1):
        bucket = buckets[k]
        gap = gaps[k] + (slots & ((np.int64(1) << np.int64(shifts[bucket])) - 1))
        gaps[k] = slots = gap
        quotient = gap >> K
        known = np.int64(shifts[buckets[k - 1]]) if k > 0 else np.int64(0)
        bits += (quotient + 1 if quotient < LONGEST else LONGEST + 32) + K - known + 1
        group = classes[bucket]
        beyond = abs(np.int64(steps[k])) - 1
        if gap_bits[group] == ALWAYS:
            bits += _rice_bits(beyond, np.int64(size_bits[group]))
        elif beyond > 0:
            bits += _rice_bits(beyond - 1, np.int64(size_bits[group]))
            if left[group] >= 0:
                bits += _rice_bits(left[group], np.int64(gap_bits[group]))
            left[group] = 0
        else:
            left[group] = max(left[group], 0) + 1
        runs[k] = max(left[group], 0)
    for group in range(gap_bits.size):
        if left[group] >= 0:
            bits += _rice_bits(left[group], np.int64(gap_bits[group]))
    return bits


@_compile
def _put(words, at, used, value, bits):
    """Append up to 57 bits: (word begun, bits used of it)."""
    words[at] |= _U64(value) << _U64(used)
    words[at + 1] = (_U64(value) >> _U64(1)) >> _U64(63 - used)
    used += bits
    return at + (used >> 6), used & 63


@_compile
def _put_rice(words, at, used, value, k):
    quotient = value >> k
    if quotient < LONGEST:
        at, used = _put(words, at, used, (np.int64(1) << quotient) - 1, quotient + 1)
        return _put(words, at, used, value & ((np.int64(1) << k) - 1), k)
    at, used = _put(words, at, used, (np.int64(1) << LONGEST) - 1, LONGEST)
    return _put(words, at, used, value, 32)


@_compile
def write(gaps, buckets, steps, runs, shifts, classes, gap_bits, size_bits, words):
    """The stream into `words` (zeros): how many bits it is."""
    at, used, known = np.int64(0), np.int64(0), np.int64(0)
    owed = np.full(256, -1, np.int64)
    for k in range(gaps.size):
        gap, step, bucket = gaps[k], np.int64(steps[k]), buckets[k]
        quotient = gap >> K
        rest = ((gap & ((np.int64(1) << K) - 1)) >> known) | (np.int64(step < 0) << (K - known))
        if quotient < LONGEST:
            at, used = _put(
                words, at, used, ((np.int64(1) << quotient) - 1) | (rest << (quotient + 1)), quotient + 2 + K - known
            )
        else:
            at, used = _put(words, at, used, (np.int64(1) << LONGEST) - 1 | (quotient << LONGEST), LONGEST + 32)
            at, used = _put(words, at, used, rest, K + 1 - known)
        known = np.int64(shifts[bucket])
        group = classes[bucket]
        if gap_bits[group] == ALWAYS:
            at, used = _put_rice(words, at, used, abs(step) - 1, np.int64(size_bits[group]))
            continue
        if owed[group] < 0:
            owed[group] = runs[k]
            at, used = _put_rice(words, at, used, np.int64(runs[k]), np.int64(gap_bits[group]))
        if owed[group] == 0:
            at, used = _put_rice(words, at, used, abs(step) - 2, np.int64(size_bits[group]))
        owed[group] -= 1
    return at * 64 + used


@_compile
def _peek(words, at):
    """The 64 bits from bit `at` on."""
    word, bit = at >> 6, _U64(at & 63)
    return (words[word] >> bit) | ((words[word + 1] << _U64(1)) << (_U64(63) - bit))


@_compile
def _ones(bits):
    """How many of the low bits are ones, up to LONGEST."""
    return trailing_zeros(~bits | _U64(1 << LONGEST))


@_compile
def _get_rice(words, at, k):
    """(value, where the next begins)"""
    bits = _peek(words, at)
    quotient = _ones(bits)
    if quotient < LONGEST:
        rest = np.int64((bits >> _U64(quotient + 1)) & ((_U64(1) << _U64(k)) - _U64(1)))
        return (quotient << k) | rest, at + quotient + 1 + k
    return np.int64((bits >> _U64(LONGEST)) & _U64(0xFFFFFFFF)), at + LONGEST + 32


@_compile
def read(old_C, words, bits, shift, mask, width, weights, shifts, classes, gap_bits, size_bits, positions, values):
    """Positions of the changes and the new values. Returns how many there are: fewer than `positions` holds, or -1, if
    the stream is damaged. `words` has four words more than `bits` needs."""
    half = np.int64(1) << (width - 1)
    full = (np.int64(1) << width) - 1
    size, count = old_C.size, positions.size
    sums = np.empty((_TILE >> 3) + 1, np.int64)
    owed = np.full(256, -1, np.int64)
    found, at, known, slot = 0, np.int64(0), np.int64(0), np.int64(0)
    negative = np.int64(0)
    target, passed = (
        np.int64(-1),
        np.int64(0),
    )  # weights from the tile's start to the next change (-1: unread), and last
    start = 0
    while found < count and start < size:
        tile_C = old_C[start : min(start + _TILE, size)]
        total = sums[_sum(tile_C, shift, weights, sums)]
        block = 0
        while True:
            if target < 0:
                if at > bits:
                    return found
                word = _peek(words, at)
                quotient = _ones(word)
                if quotient < LONGEST:
                    word >>= _U64(quotient + 1)
                    at += quotient + 1
                else:
                    quotient = np.int64((word >> _U64(LONGEST)) & _U64(0xFFFFFFFF))
                    at += LONGEST + 32
                    word = _peek(words, at)
                rest = np.int64(word & ((_U64(1) << _U64(K - known)) - _U64(1)))
                negative = np.int64((word >> _U64(K - known)) & _U64(1))
                at += K - known + 1
                target = passed + ((quotient << K) | (rest << known) | slot)
            if target >= total:
                target -= total
                break
            while sums[block + 1] <= target:
                block += 1
            inside = target - sums[block]
            i = np.int64(block) << 3
            skipped, running = np.int64(0), np.int64(0)
            if i + 8 <= tile_C.size:
                chosen = i
                for j in range(8):
                    running += np.int64(weights[tile_C[_U64(i + j)] >> shift])
                    before = running <= inside
                    chosen += before
                    skipped = running if before else skipped
                i = chosen
            else:
                running = np.int64(weights[tile_C[i] >> shift])
                while running <= inside:
                    skipped = running
                    i += 1
                    running += np.int64(weights[tile_C[i] >> shift])
            value = np.int64(tile_C[i])
            bucket = (value >> shift) & mask
            slot = inside - skipped
            known = np.int64(shifts[bucket])
            group = classes[bucket]
            magnitude = np.int64(1)
            if gap_bits[group] == ALWAYS:
                beyond, at = _get_rice(words, at, np.int64(size_bits[group]))
                magnitude += beyond
            else:
                if owed[group] < 0:
                    if at > bits:
                        return found
                    owed[group], at = _get_rice(words, at, np.int64(gap_bits[group]))
                if owed[group] == 0:
                    if at > bits:
                        return found
                    beyond, at = _get_rice(words, at, np.int64(size_bits[group]))
                    magnitude += beyond + 1
                owed[group] -= 1
            passed = sums[block] + skipped + np.int64(weights[tile_C[i] >> shift])
            value ^= (half - 1) & -(value >> (width - 1))
            value = (value + (magnitude ^ -negative) + negative) & full
            value ^= (half - 1) & -(value >> (width - 1))
            positions[found] = start + i
            values[found] = value
            found += 1
            target = -1
            if found == count:
                return count if at == bits and slot == 0 else -1
        passed = 0
        start += _TILE
    return found


@_compile
def scatter(target_C, positions, values):
    """In place. The caller has checked the positions."""
    for k in range(positions.size):
        target_C[positions[k]] = values[k]
