"""A delta as frames: tensors coded together, decoded beside, checked, and only then written.

    publisher:  layout ──group──▶ frames ──encode, several at once──▶ bytes
    reader:     bytes ──decode──▶ patches ──`hashes` of what they would make──▶ equal? ──▶ `write`, in place

What a delta would make is hashed piece by piece, so that no second copy of the weights is needed to know that it is
right, and a base is never written to before that. `Since` is the way back to an earlier version, for skip deltas.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import xxhash

from stretto.weights import codec
from stretto.weights.chain import TensorInfo
from stretto.weights.codec import Patch
from stretto.weights.patchfile import DENSE, Change

FRAME_ELEMENTS = 1 << 22
"""Small tensors are coded together up to this size: an expert by itself is too little to learn statistics from."""

CORES = 2
"""Threads that encode and decode. Training or generation goes on meanwhile, so not all there are."""

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)

_T = TypeVar("_T")
_R = TypeVar("_R")


def group(layout: Sequence[TensorInfo]) -> list[tuple[int, int]]:
    """Ranges of neighbours of equal width that are coded as one, up to FRAME_ELEMENTS (a larger tensor is alone)."""
    ranges: list[tuple[int, int]] = []
    elements = 0
    for index, info in enumerate(layout):
        size = int(np.prod(info.shape, dtype=np.int64))
        if ranges and layout[index - 1].bits == info.bits and elements + size <= FRAME_ELEMENTS:
            ranges[-1] = (ranges[-1][0], index + 1)
            elements += size
        else:
            ranges.append((index, index + 1))
            elements = size
    return ranges


def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One flat array: of a single tensor a view, of several a copy."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    return np.concatenate([array.reshape(-1) for array in arrays])


def in_order(work: Callable[[_T], _R], items: Iterable[_T], threads: int = CORES) -> Iterator[_R]:
    """`work` on each item by several threads, results in order; at most `threads` + 1 of them are held."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_R]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def threads_inside(elements: int) -> int:
    """Frames go side by side; only one that is larger than the others is cut up between cores."""
    return CORES if elements > FRAME_ELEMENTS else 1


class Since:
    """The way back to `version`, frame by frame: a delta from each version since to the one before, as small as those
    that were published. Enough to make a skip delta, without a copy of that version."""

    def __init__(self, version: int, root: str) -> None:
        self.version, self.root = version, root
        self._steps: list[dict[int, bytes]] = []
        self._noted: dict[int, bytes] = {}

    @property
    def nbytes(self) -> int:
        return sum(len(data) for step in self._steps for data in step.values())

    def note(self, frame: int, old_N: np.ndarray, new_N: np.ndarray) -> None:
        """A frame is about to change; so it has once `keep` is called, and not if `drop` is."""
        self._noted[frame] = codec.encode(new_N, old_N, threads=threads_inside(old_N.size))

    def keep(self) -> None:
        self._steps.append(self._noted)
        self._noted = {}

    def drop(self) -> None:
        self._noted = {}

    def forget(self) -> None:
        self._steps.clear()

    def before(self, frame: int, now_N: np.ndarray) -> np.ndarray:
        """A frame as it was."""
        then_N = now_N.copy()
        for step in reversed(self._steps):
            if frame in step:
                threads = threads_inside(then_N.size)
                codec.apply(codec.decode(then_N, step[frame], then_N.shape, then_N.dtype, threads), then_N, threads)
        return then_N


def hashes(patches: Sequence[Patch], arrays: Sequence[np.ndarray]) -> list[bytes]:
    """The tensor hashes of what `write` would make of `arrays`; they are not changed."""
    if len(arrays) > 1:
        flat = join(arrays)
        codec.apply(patches, flat)
        ends = np.cumsum([array.size for array in arrays])
        return [xxhash.xxh3_128_digest(part.view(np.uint8).data) for part in np.split(flat, ends[:-1])]
    flat, done, hasher = arrays[0].reshape(-1), 0, xxhash.xxh3_128()
    for patch in patches:
        hasher.update(flat[done : patch.start].view(np.uint8).data)
        piece = flat[patch.start : patch.stop].copy()
        codec.apply([Patch(0, piece.size, patch.positions, patch.values)], piece)
        hasher.update(piece.view(np.uint8).data)
        done = patch.stop
    hasher.update(flat[done:].view(np.uint8).data)
    return [hasher.digest()]


def write(patches: Sequence[Patch], arrays: Sequence[np.ndarray]) -> None:
    """Write into tensors that were decoded as one. In place, and as fast as memory."""
    if len(arrays) == 1:
        codec.apply(patches, arrays[0], threads_inside(arrays[0].size))
        return
    ends = np.cumsum([array.size for array in arrays])
    for patch in patches:
        first = int(np.searchsorted(ends, patch.start, side="right"))
        for index in range(first, len(arrays)):
            begin = int(ends[index]) - arrays[index].size
            if begin >= patch.stop:
                break
            part = _cut(patch, begin, int(ends[index]))
            if part is not None:
                codec.apply([part], arrays[index])


def changes(patches: Sequence[Patch], arrays: Sequence[np.ndarray], names: Sequence[str]) -> list[Change]:
    """What `write` wrote into the tensors of these names; of tensors that are mostly new, the tensors themselves."""
    found, end = [], 0
    for name, array in zip(names, arrays, strict=True):
        begin, end = end, end + array.size
        parts = [part for patch in patches if (part := _cut(patch, begin, end)) is not None]
        count = sum(part.values.size for part in parts)
        if count * DENSE > array.size or (count and array.size > 1 << 32):
            found.append(Change(name, None, array))
        elif count:
            where = [np.arange(p.start, p.stop) if p.positions is None else p.positions + p.start for p in parts]
            positions = np.concatenate(where).astype(np.uint32)
            found.append(Change(name, positions, np.concatenate([part.values for part in parts])))
    return found


def give_back() -> None:
    """Return to the system what was freed. glibc keeps the pages of arrays of a few MB that threads made and dropped;
    after some versions that is another copy of the weights."""
    if _TRIM is not None:
        _TRIM(0)


def _cut(patch: Patch, begin: int, end: int) -> Patch | None:
    """The part of a patch for elements `begin` to `end`, counted from `begin`; None if there is none."""
    start, stop = max(begin, patch.start), min(end, patch.stop)
    if start >= stop:
        return None
    if patch.positions is None:
        values = patch.values[start - patch.start : stop - patch.start]
        return Patch(start - begin, stop - begin, None, values) if values.size else None
    low, high = (int(np.searchsorted(patch.positions, np.uint32(at - patch.start))) for at in (start, stop))
    if low == high:
        return None
    positions = patch.positions[low:high] - np.uint32(start - patch.start)
    return Patch(start - begin, stop - begin, positions, patch.values[low:high])
