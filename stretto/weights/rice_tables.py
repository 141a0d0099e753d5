"""Tier rice: how likely is a change of each exponent, and which codes suit its steps? Decided from a sample, then from
what is counted; compiled by numba, for a chunk a matter of microseconds.

A *class* is one exponent or several neighbours with one weight 2^t. Its steps are coded in one of these ways:

    ONES      all are +-1: a sign
    RUNS      most are: a sign, and how many +-1 there are until the next larger step, and that one's size
    SIZES     a sign and a size each
    OUTWARD   the step away from zero, less a centre: of values that go on the way they went
    VALUES    the new value, less a centre: of values so small that the step replaces them
"""

from __future__ import annotations

import math

import numpy as np

from stretto.weights.compiled import compiled
from stretto.weights.vector import HEAVIEST, exponent, get, number, put

K = HEAVIEST
"""Bits of a gap's remainder: the rarest change it tells apart is one in 2^20."""

VALUES, OUTWARD, SIZES, ONES = 31, 30, 29, 28
"""In place of RUNS' Rice parameter, which is smaller."""

WAY, SIZE, GROUP = 5, 10, 16
"""Where a code, an exponent's number, has how its steps are coded, their Rice parameter and the class; t is lowest."""

SEEN = 96
"""Changes of a class from which a centre is found."""

_GOLDEN = math.log((1 + math.sqrt(5)) / 2)
_RUN = 64
"""Neighbours that a sample takes together."""


@compiled
def sample(old_C, new_C, stride, counts, changed):
    """Per exponent, how many elements and how many changes every `stride`-th run of neighbours has."""
    other = np.zeros_like(counts)  # in turns: a sum need not wait for the last one to be in memory
    for start in range(0, old_C.size, _RUN * stride):
        stop = min(start + _RUN, old_C.size)
        for i in range(start, stop - 1, 2):
            first, second = exponent(old_C, i), exponent(old_C, i + 1)
            put(counts, first, get(counts, first) + 1)
            put(other, second, get(other, second) + 1)
        if (stop - start) & 1:
            counts[exponent(old_C, stop - 1)] += 1
        for i in range(start, stop):
            if get(old_C, i) != get(new_C, i):
                changed[exponent(old_C, i)] += 1
    counts += other


@compiled
def weigh(counts, changed, shifts):
    """log2 of the weight of each exponent, from what `sample` counted: straight where that costs no more than a
    hundredth, since a straight line is computed faster than looked up.

    An exponent in which nothing was seen to change gets half a change; one of which nothing was seen, its neighbour's.
    """
    t = K
    for value in range(counts.size):
        if counts[value] > 0:
            rate = -math.log1p(-min((changed[value] + 0.5) / (counts[value] + 1.0), 0.9999))
            t = max(0, min(K, int(np.rint(K + math.log2(rate / math.log(2.0))))))
        shifts[value] = t
    free, sign = 0.0, 0
    for value in range(counts.size):
        free += _cost(counts[value], changed[value], shifts[value])
        sign += changed[value]
    best, flat, foot = np.inf, 0, 0
    for end in range(_lowest(shifts), K + counts.size):
        cost, at = _straight(counts, changed, end)
        if cost < best:
            best, flat, foot = cost, at, end
    if best <= free + 0.01 * (free + 2 * sign) + 2:
        for value in range(counts.size):
            shifts[value] = K if value <= flat else max(0, min(K, foot - value))


@compiled
def _lowest(shifts):
    """The first exponent that has not the heaviest weight."""
    for value in range(shifts.size):
        if shifts[value] < K:
            return value
    return shifts.size


@compiled
def _cost(count, changed, t):
    """Bits of the gaps to these changes, and of passing so many elements."""
    return changed * (K - t) + count * 2.0 ** (t - K)


@compiled
def _straight(counts, changed, foot):
    """Bits with weights `foot` less the exponent, and the exponent up to which the heaviest is better."""
    total, ahead, best, flat = 0.0, 0.0, 0.0, -1
    for value in range(counts.size):
        if counts[value] > 0:
            sloped = _cost(counts[value], changed[value], max(0, min(K, foot - value)))
            total += sloped
            ahead += _cost(counts[value], changed[value], K) - sloped
            if ahead < best:
                best, flat = ahead, value
    return total + best, flat


@compiled
def line(shifts):
    """(flat, foot), both below 256, if the weights are a straight line: K below `flat`, from there on `foot` less the
    exponent, within 0 and K. (0, -1) if not."""
    flat = _lowest(shifts)
    if flat == shifts.size:
        return 0, -1
    foot = np.int64(shifts[flat]) + flat
    for value in range(flat, shifts.size):
        if shifts[value] != max(0, min(K, foot - value)):
            return 0, -1
    return (flat, foot) if foot < 256 else (0, -1)


@compiled
def golomb(count, mean):
    """The best parameter for that many geometric numbers of that mean, and the bits they then take."""
    if mean <= 0:
        return 0, float(count)
    ratio = math.log1p(1 / mean)  # of the logarithm of the probability, from one number to the next
    k = max(0, min(ONES - 1, 1 + math.floor(math.log2(_GOLDEN / ratio))))
    return k, count * (k + 1 + 1 / math.expm1(min(700.0, ratio * 2.0**k)))


@compiled
def choose(shifts, changed, larger, excess, lengths, group_shifts, ways, sizes):
    """Classes and their codes from what is counted per exponent: changes, those of more than one ulp, the sum of
    |step| - 1. Returns how many classes there are."""
    groups = 0
    sums = np.zeros((lengths.size, 3), np.int64)
    for value in range(changed.size):
        t = shifts[value]
        if groups == 0 or t != group_shifts[groups - 1] or (t == K and changed[value] > 0):
            lengths[groups], group_shifts[groups] = 0, t
            groups += 1
        lengths[groups - 1] += 1
        sums[groups - 1, 0] += changed[value]
        sums[groups - 1, 1] += larger[value]
        sums[groups - 1, 2] += excess[value]
    for group in range(groups):
        all_, large, beyond = sums[group]
        ways[group], sizes[group] = ONES, 0
        if large > 0:
            gap, gap_cost = golomb(large + 1, (all_ - large) / (large + 1))
            size, size_cost = golomb(large, (beyond - large) / large)
            always, always_cost = golomb(all_, beyond / all_)
            ways[group], sizes[group] = gap, size
            if always_cost < gap_cost + size_cost:
                ways[group], sizes[group] = SIZES, always
    return groups


@compiled
def wrapped(value, width):
    """Into `width` bits, signed."""
    return ((value + (np.int64(1) << (width - 1))) & ((np.int64(1) << width) - 1)) - (np.int64(1) << (width - 1))


@compiled
def outward(old, new, width):
    """How far the number went away from zero, both in numeric order."""
    step = wrapped(new - old, width)
    return -step if old < 0 else step


@compiled
def magnitude(value):
    return -1 - value if value < 0 else value


@compiled
def zigzag(value):
    """0, -1, 1, -2 -> 0, 1, 2, 3"""
    return (value << 1) ^ (value >> 63)


@compiled
def split(way, centre, old, new, width):
    """A change of a class that is not RUNS, as one bit and a number for Rice."""
    if way == VALUES:
        return np.int64(new < 0), zigzag(wrapped(magnitude(new) - centre, width))
    if way == OUTWARD:
        number = zigzag(wrapped(outward(old, new, width) - centre, width))
        return number & 1, number >> 1
    step = wrapped(new - old, width)
    return np.int64(step < 0), abs(step) - 1


@compiled
def centre_all(olds, news, classes, ways, sizes, centres):
    """For classes with a size for each step: would a code with a centre be shorter? Judged by SEEN changes of each."""
    groups, width = ways.size, olds.itemsize * 8
    seen, taken = np.empty((groups, SEEN, 2), np.int64), np.zeros(groups, np.int64)
    stride = max(1, olds.size // (SEEN * 64))
    wanted = 0
    for group in range(groups):
        wanted += ways[group] == SIZES
    if wanted == 0:
        return
    for k in range(0, olds.size, stride):
        group = classes[exponent(olds, k)]
        if ways[group] == SIZES and taken[group] < SEEN:
            seen[group, taken[group], 0], seen[group, taken[group], 1] = number(olds, k), number(news, k)
            taken[group] += 1
    found, by_size = np.empty(SEEN, np.int64), np.empty(SEEN, np.int64)
    for group in range(groups):
        count = taken[group]
        if count < SEEN // 8:
            continue
        best = np.inf
        for way in (SIZES, OUTWARD, VALUES):
            centre = np.int64(0)
            if way != SIZES:
                for k in range(count):
                    old, new = seen[group, k]
                    found[k] = outward(old, new, width) if way == OUTWARD else magnitude(new)
                by_size[:count] = found[:count]
                by_size[:count].sort()
                centre = by_size[count >> 1]
            for k in range(count):
                old, new = seen[group, k]
                found[k] = split(way, centre, old, new, width)[1]
            size, bits = _fit(found[:count])
            bits += 0.0 if way == SIZES else 16.0 / stride
            if bits < best:
                best, ways[group], sizes[group], centres[group] = bits, way, size, centre


@compiled
def _fit(numbers):
    """The best Rice parameter, and the bits."""
    best, parameter = np.inf, 0
    for k in range(31):
        bits = 0.0
        for value in numbers:
            quotient = value >> k
            bits += quotient + 1 + k if quotient < 24 else 24 + 32
        if bits < best:
            best, parameter = bits, k
    return parameter, best
