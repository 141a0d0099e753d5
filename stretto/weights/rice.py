"""Where a tensor changed and by how much, near the fewest bits that a reader of the old values needs.

How likely an element changes follows from its exponent: the larger the value, the wider its cell, the rarer a step
leaves it. So each *class* of exponents gets a weight 2^t next to its probability, and a gap between changes is not the
number of elements but the sum of their weights. Measured like that, gaps are distributed alike everywhere, and one
Golomb-Rice parameter K serves: an element of weight 2^t costs K - t bits and about one and a half of quotient.

    weights     1 1 4 1 64 4 1 1 16 ...            a change of the element with weight 16: any of 16 gaps names it.
    gap to it   ------------------>|..............|    Which one carries t bits for free: the low bits of the next gap.

Steps are a sign, and for the few that are larger than one ulp a magnitude, both sides of it Rice-coded per class.

    payload: lanes, classes, exponents in each - 1, (t | way << 5 | size << 10 as two bytes) of each,
             centre (zig-zag) of each that has one, (changes, bits) of each lane, stream
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from stretto.weights import rice_tables, rice_write
from stretto.weights.numberline import FIELDS
from stretto.weights.rice_read import LANES, read, scatter
from stretto.weights.rice_tables import GROUP, OUTWARD, SIZE, WAY, K
from stretto.weights.rice_tiles import TILE
from stretto.weights.streams import CodecError, Reader, put_number

__all__ = ["decode", "encode", "scatter"]

_SAMPLED = 1 << 16
"""Elements from which how common each exponent is gets estimated."""

_MANY = 2_000
"""Changes from which several lanes are worth the bytes that each costs."""

_KEPT = 1 << 19
"""Changes for which a thread keeps its memory."""


@dataclass(frozen=True)
class Plan:
    """Classes of exponents: how many exponents each has (from 0 on), its code (t, way and size: see `rice_tables.py`),
    and a centre for sizes. One element per class."""

    lengths: np.ndarray  # uint8, less one, so that 256 fits
    codes: np.ndarray  # uint32
    centres: np.ndarray  # int64, zero where the way has none

    def by_exponent(self) -> np.ndarray:
        """The code of each exponent and above it the number of its class, uint32"""
        return np.repeat(self.codes | np.arange(self.codes.size, dtype=np.uint32) << GROUP, self.lengths + np.int64(1))

    def pack(self, out: bytearray) -> None:
        put_number(out, self.lengths.size)
        out += self.lengths.tobytes() + self.codes.astype("<u2").tobytes()
        for centre in self.centres[_centred(self.codes)].tolist():
            put_number(out, centre << 1 if centre >= 0 else (-centre << 1) - 1)


@dataclass(frozen=True)
class _Changes:
    """What `scan` finds: for each change its gap, and the bits before and after; how many each lane has."""

    gaps: np.ndarray
    olds: np.ndarray
    news: np.ndarray
    counts: list[int]

    def lane(self, lane: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        span = slice(sum(self.counts[:lane]), sum(self.counts[: lane + 1]))
        return self.gaps[span], self.olds[span], self.news[span]


def encode(old_C: np.ndarray, new_C: np.ndarray, most: int) -> tuple[int, bytes]:
    """How many of at most 2^26 elements changed, and the payload. (-1, b"") if more than `most` did."""
    exponents = FIELDS[old_C.itemsize][1] + 1
    seen, seen_changed, shifts = np.zeros((3, exponents), np.int64)
    rice_tables.sample(old_C, new_C, max(1, old_C.size // _SAMPLED), seen, seen_changed)
    rice_tables.weigh(seen, seen_changed, shifts)
    table = shifts.astype(np.uint8)
    expected = int(seen_changed.sum()) * old_C.size // max(1, int(seen.sum()))
    lanes = LANES if expected >= _MANY else 1
    counted = np.zeros((3, exponents), np.int64)
    changes = _scan(old_C, new_C, table, lanes, min(most, 2 * expected + 4096), counted)
    if changes is None:
        counted[:] = 0
        changes = _scan(old_C, new_C, table, lanes, most, counted)
    if changes is None:
        return -1, b""
    count = sum(changes.counts)
    if count == 0:
        return 0, b""
    columns = np.zeros((4, exponents), np.int64)
    groups = rice_tables.choose(shifts, *counted, *columns)
    lengths, t, ways, sizes = columns[:, :groups]
    centres, classes = np.zeros(groups, np.int64), np.repeat(np.arange(groups), lengths)
    rice_tables.centre_all(changes.olds, changes.news, classes, ways, sizes, centres)
    plan = Plan((lengths - 1).astype(np.uint8), (t | ways << WAY | sizes << SIZE).astype(np.uint32), centres)
    room, written = count // 4 + 64, None
    while written is None:
        written = _write(changes, plan, room)
        room *= 4
    bits, stream = written
    out = bytearray((lanes,))
    plan.pack(out)
    for lane in range(lanes):
        put_number(out, changes.counts[lane])
        put_number(out, bits[lane])
    out += stream
    return count, bytes(out)


def decode(old_C: np.ndarray, payload: memoryview) -> tuple[np.ndarray, np.ndarray]:
    """Positions (uint32, ascending) and the new values there. Raises CodecError for anything `encode` can't write."""
    exponents = FIELDS[old_C.itemsize][1] + 1
    reader = Reader(payload)
    lanes = reader.byte()
    if not 0 < lanes <= LANES:
        raise CodecError(f"delta is damaged: {lanes} lanes in a chunk, {LANES} is the most")
    plan = _read_plan(reader, exponents)
    sizes = [(reader.number(), reader.number()) for _ in range(lanes)]
    count, bits = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    if not 0 < count <= old_C.size:
        raise CodecError(f"delta is damaged: {count} changes in a chunk of {old_C.size} elements")
    stream = reader.bytes((bits + 7) // 8)
    reader.finish()
    words = np.empty(len(stream) // 8 + 7, np.uint64)
    words[len(stream) // 8 :] = 0
    words.data.cast("B")[: len(stream)] = stream
    counts, lengths = np.array(sizes, np.int64).T.copy()
    ends = np.cumsum(lengths) + (8 * len(stream) - bits)
    codes = plan.by_exponent()
    table = (codes & 31).astype(np.uint8)
    positions, values = np.empty(count, np.uint32), np.empty(count, old_C.dtype)
    lane = _part(old_C.size, lanes), table, *rice_tables.line(table)
    if not read(old_C, words, ends - lengths, ends, counts, *lane, codes, plan.codes, plan.centres, positions, values):
        raise CodecError(f"delta is damaged, or made for other old values: its {count} changes do not fit them")
    return positions, values


def _part(size: int, lanes: int) -> int:
    """Elements of a lane: whole tiles."""
    return -(-size // (lanes * TILE)) * TILE


def _centred(codes: np.ndarray) -> np.ndarray:
    return codes >> WAY & 31 >= OUTWARD


_thread = threading.local()


def _scratch(size: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gaps, old and new bits of so many changes. Kept by each thread: fresh memory is slow to fill."""
    if size > _KEPT:
        return np.empty(size, np.int64), np.empty(size, dtype), np.empty(size, dtype)
    if not hasattr(_thread, "arrays") or _thread.arrays[0].size < size:
        _thread.arrays = np.empty(size, np.int64), np.empty(size, np.uint32), np.empty(size, np.uint32)
    gaps, olds, news = _thread.arrays
    return gaps[:size], olds.view(dtype)[:size], news.view(dtype)[:size]


def _scan(
    old_C: np.ndarray, new_C: np.ndarray, table: np.ndarray, lanes: int, most: int, counted: np.ndarray
) -> _Changes | None:
    """None if there are more than `most`."""
    gaps, olds, news = _scratch(most, old_C.dtype)
    line, part = rice_tables.line(table), _part(old_C.size, lanes)
    counts, done = [], 0
    for lane in range(lanes):
        span, room = slice(lane * part, (lane + 1) * part), (gaps[done:], olds[done:], news[done:])
        found = rice_write.scan(old_C[span], new_C[span], table, *line, *room, *counted)
        if found < 0:
            return None
        counts.append(found)
        done += found
    return _Changes(gaps[:done], olds[:done], news[:done], counts)


def _write(changes: _Changes, plan: Plan, room: int) -> tuple[list[int], memoryview] | None:
    """Bits of each lane and the stream, or None if `room` words do not hold it."""
    words = np.empty(room + 1, np.uint64)
    words[room] = 0
    starts, codes = [64 * room], (plan.by_exponent(), plan.codes, plan.centres)
    for lane in reversed(range(len(changes.counts))):
        start = rice_write.write(*changes.lane(lane), *codes, words, starts[0])
        if start < 0:
            return None
        starts.insert(0, start)
    return np.diff(starts).tolist(), words.data.cast("B")[starts[0] // 8 : 8 * room]


def _read_plan(reader: Reader, exponents: int) -> Plan:
    groups = reader.number()
    if not 0 < groups <= exponents:
        raise CodecError(f"delta is damaged: {groups} classes of {exponents} exponents")
    lengths = np.frombuffer(reader.bytes(groups), np.uint8)
    codes = np.frombuffer(reader.bytes(2 * groups), "<u2").astype(np.uint32)
    if (codes & 31).max() > K or codes.max() >> GROUP - 1 or int(lengths.sum(dtype=np.int64)) + groups != exponents:
        raise CodecError("delta is damaged: its classes of exponents make no sense")
    centres = np.zeros(groups, np.int64)
    for group in np.flatnonzero(_centred(codes)):
        number = reader.number()
        centres[group] = (number >> 1) ^ -(number & 1)
    return Plan(lengths, codes, centres)
