"""The bytes last published, which every delta starts from: one copy of the weights, however they come.

    publish:  the caller's tensors ─────────────┐  `Given`: compared with the copy frame by frame, written into it
                                                │  when HEAD has moved
    submit:   tensors ──▶ what differs, copied ─┘  `Staged`: written into the copy at once; what was there is kept
                                                   until HEAD has moved, and comes back if it does not

So a publisher holds one copy, and of a version that is on its way only what changed. Where nearly everything changes
that is as much as a second copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from stretto.weights.chain import TensorInfo
from stretto.weights.frames import join
from stretto.weights.patchfile import DENSE, Change
from stretto.weights.state import bits
from stretto.weights.tensorfile import count_nonfinite, default_tag

_T = TypeVar("_T")


class NonFiniteError(ValueError):
    """The weights hold infinities or NaNs; such a version never appears."""


@dataclass
class Baseline:
    """One version's tensors, of the names and shapes in `layout`, in a copy that nobody else writes to."""

    version: int
    layout: list[TensorInfo]
    arrays: list[np.ndarray]


class Fresh(Protocol):
    """A version on its way, beside the baseline."""

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """The new tensors."""
        ...

    def frame(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Old and new elements of the tensors `first` to `last`, as one."""
        ...

    def accept(self) -> None:
        """The baseline is this version now."""
        ...

    def reject(self) -> None:
        """The baseline is what it was."""
        ...


class Given:
    """Tensors that the caller leaves as they are until it is over."""

    def __init__(self, baseline: Baseline, arrays: Sequence[np.ndarray]) -> None:
        self._baseline, self.arrays = baseline, arrays

    def frame(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        return join(self._baseline.arrays[first:last]), join(self.arrays[first:last])

    def accept(self) -> None:
        for ours, theirs in zip(self._baseline.arrays, self.arrays, strict=True):
            np.copyto(ours, theirs)

    def reject(self) -> None:
        pass


class Staged:
    """Changes (one or none for each tensor of the layout) that are written into the baseline already."""

    def __init__(self, baseline: Baseline, changes: Sequence[Change | None]) -> None:
        self._baseline = baseline
        self._undo: list[Change | None] = []
        for array, change in zip(baseline.arrays, changes, strict=True):
            self._undo.append(None if change is None else _before(array, change))
            if change is not None:
                change.write(array)

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        return self._baseline.arrays

    def frame(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        new_N = join(self.arrays[first:last])
        old_N, start = new_N.copy(), 0
        for array, undo in zip(self.arrays[first:last], self._undo[first:last], strict=True):
            if undo is not None:
                undo.write(old_N[start : start + array.size])
            start += array.size
        return old_N, new_N

    def accept(self) -> None:
        self._undo = []

    def reject(self) -> None:
        for array, undo in zip(self.arrays, self._undo, strict=True):
            if undo is not None:
                undo.write(array)


def _before(array: np.ndarray, change: Change) -> Change:
    """What `change` is about to write over."""
    if change.positions is None:
        return Change(change.name, None, array.copy())
    return Change(change.name, change.positions, array.reshape(-1)[change.positions])


def examine(
    version: int, tensors: Mapping[str, np.ndarray], tags: Mapping[str, str]
) -> tuple[list[TensorInfo], list[np.ndarray]]:
    """Layout and bits, in the layout's order; no copies of what is contiguous. Raises ValueError and NonFiniteError."""
    return _in_order([_one(version, name, tensors[name], tags) for name in _names(version, tensors)])


def compare(
    version: int, tensors: Mapping[str, np.ndarray], tags: Mapping[str, str], old: Baseline | None
) -> tuple[list[TensorInfo], list[Change | None]]:
    """Layout, and for each tensor what differs from `old` (all of it where there is none, or where most does): copies,
    so that the tensors are the caller's to change. Takes one tensor at a time out of `tensors`."""
    known = {} if old is None else dict(zip(old.layout, old.arrays, strict=True))
    found: list[tuple[TensorInfo, Change | None]] = []
    for name in _names(version, tensors):
        info, array = _one(version, name, tensors[name], tags)
        base = known.get(info)
        if base is None or array.size > 1 << 32:
            found.append((info, Change(name, None, array.copy())))
            continue
        where = np.flatnonzero(base.reshape(-1) != array.reshape(-1))
        if where.size * DENSE > array.size:
            found.append((info, Change(name, None, array.copy())))
        else:
            change = Change(name, where.astype(np.uint32), array.reshape(-1)[where]) if where.size else None
            found.append((info, change))
    return _in_order(found)


def check_successor(old: Baseline, version: int, layout: list[TensorInfo]) -> None:
    """Raise ValueError when the version does not grow, naming the tensor when the model has changed."""
    if version <= old.version:
        raise ValueError(f"version {version} cannot follow version {old.version}: versions grow")
    if layout == old.layout:
        return
    before, after = {info.name: info for info in old.layout}, {info.name: info for info in layout}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise ValueError(
                f"tensor {name} was {_describe(before.get(name))} in version {old.version} and is "
                f"{_describe(after.get(name))} in version {version}: start a new chain when the model changes"
            )


def _in_order(found: list[tuple[TensorInfo, _T]]) -> tuple[list[TensorInfo], list[_T]]:
    """Tensors of a width side by side, then by name: those are coded together, and scales are a stream of their own."""
    found.sort(key=lambda pair: (pair[0].bits, pair[0].name))
    return [info for info, _ in found], [item for _, item in found]


def _names(version: int, tensors: Mapping[str, np.ndarray]) -> list[str]:
    if not tensors:
        raise ValueError(f"version {version} has no tensors")
    return sorted(tensors)


def _one(version: int, name: str, array: np.ndarray, tags: Mapping[str, str]) -> tuple[TensorInfo, np.ndarray]:
    tag = tags.get(name) or default_tag(array)
    bad = count_nonfinite(array, tag)
    if bad:
        raise NonFiniteError(
            f"tensor {name} of version {version} has {bad} values that are infinite or NaN: not published"
        )
    return TensorInfo(name, tag, array.dtype.itemsize * 8, tuple(array.shape)), bits(array)


def _describe(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.tag} {list(info.shape)}"
