"""Read-only trees under the workspaces of many boxes: base folders and snapshots, as layers of overlayfs.

A layer is a folder of the pool, owned by the uid of the boxes that stand on it: an overlay can't be written over files
of a uid it does not know. So a base folder is copied once per pool and identity, and then shared by any number of
boxes; a snapshot is a copy of what one box changed, on top of the layers that box stands on.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.sandbox.tree import FOLDER, Caps, copy

BASES = 64
"""Base folders kept when no box stands on them."""
STACK = 8
"""Snapshots of snapshots in a stack; one more, and they are merged into one layer."""
MAX_ENTRIES = 200_000
MAX_BYTES = 4 << 30


@dataclass(eq=False)
class Layer:
    path: str
    identity: int
    changed: bool  # a snapshot's, and not a base folder
    users: int = 0
    source: tuple[str, int, int] | None = None  # of a base: (path, inode, time of change) when it was copied


@dataclass(eq=False)
class Snapshot:
    """A workspace as it was, for any number of boxes to begin with; bottom layer first. Close it when no more will."""

    layers: tuple[Layer, ...]
    _release: Callable[[Sequence[Layer]], Awaitable[None]]
    closed: bool = False

    async def close(self) -> None:
        """Boxes that stand on it are not disturbed. May be called again."""
        if not self.closed:
            self.closed = True
            await self._release(self.layers)


Base = Snapshot | Path | str


class Layers:
    """The layers of one pool, below `folder`. `owner(identity)` is (uid, gid)."""

    def __init__(self, folder: Path, owner: Callable[[int], tuple[int, int]]):
        self.folder = folder
        self.owner = owner
        self._count = itertools.count(1)
        self._staged: dict[tuple[str, int], asyncio.Task[Layer]] = {}

    async def hold(self, base: Base | None, identity: int) -> tuple[Layer, ...]:
        """The layers of `base` for boxes of `identity`; give them back by `release`. Raises ValueError, TreeError."""
        if base is None:
            return ()
        if isinstance(base, Snapshot):
            if base.closed:
                raise ValueError("the snapshot is closed")
            found = [
                layer if layer.identity == identity else await self._stage(layer.path, identity, layer.changed)
                for layer in base.layers
            ]
        else:
            found = [await self._stage(os.path.realpath(base), identity, changed=False)]
        for layer in found:
            layer.users += 1
        return tuple(found)

    async def release(self, layers: Sequence[Layer]) -> None:
        for layer in layers:
            layer.users -= 1
            if layer.users == 0 and layer.changed:
                await asyncio.to_thread(shutil.rmtree, layer.path, ignore_errors=True)

    def room_for(self, identity: int) -> str:
        """A new, empty folder of that identity's."""
        path = self.folder / str(next(self._count))
        path.mkdir(mode=0o700)
        os.chown(path, *self.owner(identity))
        return str(path)

    def stacked(self, below: Sequence[Layer], path: str, identity: int, merged: int) -> Snapshot:
        """The snapshot whose newest layer is at `path`, made of a box's changes and the `merged` layers on top of
        those `below` it."""
        layers = (*below[: len(below) - merged], Layer(path, identity, changed=True))
        for layer in layers:
            layer.users += 1
        return Snapshot(layers, self.release)

    @staticmethod
    def to_merge(below: Sequence[Layer]) -> int:
        """How many layers on top of a stack go into the next snapshot of it."""
        changed = sum(layer.changed for layer in below)
        return changed if changed >= STACK else 0

    async def _stage(self, path: str, identity: int, changed: bool) -> Layer:
        about = os.stat(path)
        key, source = (path, identity), (path, about.st_ino, about.st_mtime_ns)
        task = self._staged.pop(key, None)
        if (
            task is not None
            and task.done()
            and (task.cancelled() or task.exception() or task.result().source != source)
        ):
            task = None
        if task is None:
            task = asyncio.create_task(self._copy(source, identity))
        self._staged[key] = task  # last: the newest
        layer = await asyncio.shield(task)
        await self._forget()
        return layer

    async def _copy(self, source: tuple[str, int, int], identity: int) -> Layer:
        target = self.room_for(identity)
        try:
            await asyncio.to_thread(copy_folder, source[0], target, self.owner(identity))
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
            raise
        return Layer(target, identity, changed=False, source=source)

    async def _forget(self) -> None:
        """Remove the bases that were not used for longest."""
        unused = [
            key
            for key, task in self._staged.items()
            if task.done() and not task.cancelled() and not task.exception() and task.result().users == 0
        ]
        for key in unused[: max(0, len(unused) - BASES)]:
            layer = self._staged.pop(key).result()
            await asyncio.to_thread(shutil.rmtree, layer.path, ignore_errors=True)


def copy_folder(source: str, target: str, owner: tuple[int, int]) -> None:
    """Copy a host folder's content; links stay links. Raises OSError, TreeError."""
    inner = os.open(source, FOLDER)
    outer = os.open(target, FOLDER)
    try:
        copy(inner, outer, Caps(MAX_ENTRIES, MAX_BYTES), owner if owner[0] != os.geteuid() else None, fresh=True)
        os.fchmod(outer, 0o755)
    finally:
        os.close(inner)
        os.close(outer)
