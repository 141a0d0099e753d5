"""Where a tensor changed and by how much, near the fewest bits that a reader of the old values needs.

How likely an element changes follows from its exponent: the larger the value, the wider its cell, the rarer a step
leaves it. So each *class* of exponents gets a weight 2^t next to its probability, and a gap between changes is not the
number of elements but the sum of their weights. Measured like that, gaps are distributed alike everywhere, and one
Golomb-Rice parameter K serves: an element of weight 2^t costs K - t bits and about one and a half of quotient.

    weights     1 1 4 1 64 4 1 1 16 ...            a change of the element with weight 16: any of 16 gaps names it.
    gap to it   ------------------>|..............|    Which one carries t bits for free: the low bits of the next gap.

Steps are a sign, and for the few that are larger than one ulp a magnitude, both sides of it Rice-coded per class.

    payload: changes, classes, (exponents in it, t | gaps << 5 | sizes << 10 as two bytes) for each, bits, stream
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from stretto.weights import rice_kernels as kernels
from stretto.weights.numberline import FIELDS
from stretto.weights.rice_kernels import NEVER, K, scatter
from stretto.weights.streams import CodecError, Reader, put_number

__all__ = ["decode", "encode", "scatter"]

_SAMPLED = 1 << 16
"""Elements from which how common each exponent is gets estimated."""


@dataclass(frozen=True)
class Plan:
    """Classes of exponents: how many exponents each has (from 0 on; the rest never changes), log2 of its weight, and
    the Rice parameters of its steps. uint8 arrays, one element per class."""

    lengths: np.ndarray  # less one, so that 256 fits
    shifts: np.ndarray
    gap_bits: np.ndarray
    size_bits: np.ndarray

    def tables(self, buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """weights uint32 [2, buckets], flat; shifts and classes uint8 [buckets]; parameters by class"""
        shifts, classes = np.zeros(buckets, np.uint8), np.zeros(buckets, np.uint8)
        weights = np.zeros((2, buckets), np.uint32)
        lengths = self.lengths.astype(np.int64) + 1
        used = int(lengths.sum())
        shifts[:used] = np.repeat(self.shifts, lengths)
        classes[:used] = np.repeat(np.arange(lengths.size), lengths)
        weights[:, :used] = np.where(shifts[:used] == NEVER, 0, np.uint32(1) << shifts[:used])
        return weights.reshape(-1), shifts, classes, self.gap_bits, self.size_bits


def encode(old_C: np.ndarray, new_C: np.ndarray, most: int) -> tuple[int, bytes]:
    """How many of at most 2^26 elements changed, and the payload. (-1, b"") if more than `most` did."""
    width = old_C.itemsize * 8
    shift, mask = FIELDS[old_C.itemsize]
    counts, seen, shifts, changed, larger, excess = np.zeros((6, mask + 1), np.int64)
    kernels.sample(old_C, new_C, shift, mask, max(1, old_C.size // _SAMPLED), counts, seen)
    kernels.weigh(counts, seen, shifts)
    weights = np.tile(np.uint32(1) << shifts.astype(np.uint32), 2)
    gaps, buckets, steps, runs = _scratch(most)
    count = kernels.scan(old_C, new_C, np.uint8(shift), mask, width, weights, gaps, buckets, steps)
    if count <= 0:
        return count, b""
    gaps, buckets, steps, runs = gaps[:count], buckets[:count], steps[:count], runs[:count]
    kernels.count_steps(buckets, steps, changed, larger, excess)
    columns = np.zeros((4, mask + 1), np.int64)
    groups = kernels.choose(shifts, changed, larger, excess, *columns)
    columns[0] -= 1
    plan = Plan(*columns[:, :groups].astype(np.uint8))
    weights, shifts, classes, gap_bits, size_bits = plan.tables(mask + 1)
    bits = kernels.link(gaps, buckets, steps, shifts, classes, gap_bits, size_bits, runs)
    words = np.zeros(bits // 64 + 3, np.uint64)
    written = kernels.write(gaps, buckets, steps, runs, shifts, classes, gap_bits, size_bits, words)
    assert written == bits, (written, bits)
    out = bytearray()
    put_number(out, count)
    put_number(out, plan.lengths.size)
    packed = plan.shifts.astype("<u2") | plan.gap_bits.astype("<u2") << 5 | plan.size_bits.astype("<u2") << 10
    out += plan.lengths.tobytes() + packed.tobytes()
    put_number(out, int(bits))
    out += words.data.cast("B")[: (int(bits) + 7) // 8]
    return count, bytes(out)


_thread = threading.local()


def _scratch(size: int) -> tuple[np.ndarray, ...]:
    """Gaps, buckets, steps and runs of as many changes, kept by each thread: fresh memory is slow to fill."""
    if not hasattr(_thread, "arrays") or _thread.arrays[0].size < size:
        _thread.arrays = tuple(np.empty(size, kind) for kind in (np.int64, np.uint8, np.int32, np.uint32))
    return tuple(array[:size] for array in _thread.arrays)


def decode(old_C: np.ndarray, payload: memoryview) -> tuple[np.ndarray, np.ndarray]:
    """Positions (uint32, ascending) and the new values there. Raises CodecError for anything `encode` can't write."""
    reader = Reader(payload)
    count = reader.number()
    if not 0 < count <= old_C.size:
        raise CodecError(f"delta is damaged: {count} changes in a chunk of {old_C.size} elements")
    plan = _read_plan(reader, FIELDS[old_C.itemsize][1] + 1)
    bits = reader.number()
    stream = reader.bytes((bits + 7) // 8)
    reader.finish()
    words = np.zeros(bits // 64 + 5, np.uint64)
    words.data.cast("B")[: len(stream)] = stream
    shift, mask = FIELDS[old_C.itemsize]
    positions, values = np.empty(count, np.uint32), np.empty(count, old_C.dtype)
    width, tables = old_C.itemsize * 8, plan.tables(mask + 1)
    if kernels.read(old_C, words, bits, np.uint8(shift), mask, width, *tables, positions, values) != count:
        raise CodecError(f"delta is damaged, or made for other old values: its {count} changes do not fit them")
    return positions, values


def _read_plan(reader: Reader, buckets: int) -> Plan:
    groups = reader.number()
    if not 0 < groups <= buckets:
        raise CodecError(f"delta is damaged: {groups} classes of {buckets} exponents")
    lengths = np.frombuffer(reader.bytes(groups), np.uint8)
    packed = np.frombuffer(reader.bytes(2 * groups), "<u2")
    columns = (packed & 31, packed >> 5 & 31, packed >> 10)
    shifts, gap_bits, size_bits = (column.astype(np.uint8) for column in columns)
    known = (shifts <= K) | (shifts == NEVER)
    if not known.all() or (size_bits > 31).any() or int(lengths.sum(dtype=np.int64)) + groups > buckets:
        raise CodecError("delta is damaged: its classes of exponents make no sense")
    return Plan(lengths, shifts, gap_bits, size_bits)
