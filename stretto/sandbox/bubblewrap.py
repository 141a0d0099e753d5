"""Boxes by bubblewrap: how one is begun, kept and ended on this machine. The default, and what the others are held to.

BoxPool ── Bubblewrap ──▶ spawner (one per identity) ──▶ bwrap ──▶ PID 1 (inside/)
               ├─ Slots    control groups, one set per running box
               └─ Layers   what workspaces stand on
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import socket
from pathlib import Path

from stretto.config import SandboxConfig
from stretto.sandbox.box import Box, BoxError, BoxLost
from stretto.sandbox.capabilities import Capabilities
from stretto.sandbox.carrier import Kind
from stretto.sandbox.cgroup import Limits, Slot, Slots
from stretto.sandbox.check import explain, require, starts, unprivileged
from stretto.sandbox.inside.boot import BOOT
from stretto.sandbox.inside.wire import pack
from stretto.sandbox.layers import Base, Layer, Layers, Snapshot
from stretto.sandbox.libraries import stage
from stretto.sandbox.recipe import Recipe
from stretto.sandbox.spawning import Spawner
from stretto.sandbox.syscalls import seccomp_program
from stretto.sandbox.tree import TreeError

START_SECONDS = 30.0
FILTER = seccomp_program().hex()


class Bubblewrap:
    """A carrier (`carrier.py`)."""

    def __init__(self, config: SandboxConfig, limits: Limits):
        self.config, self.limits = config, limits
        self.alive: set[Box] = set()
        self.slots: Slots | None = None
        self._spawners: dict[int, Spawner] = {}
        self._staging: dict[tuple[str, ...], asyncio.Task[None]] = {}
        self._rooms = itertools.count(1)

    async def open(self, trusted: bool) -> None:
        await asyncio.to_thread(starts if trusted else require)
        self.recipe = await asyncio.to_thread(Recipe.prepare)
        self.layers = Layers(self.recipe.folder / "layers", host_owner)
        try:
            self._code = await asyncio.to_thread(self.recipe.compile)
            self.slots = Slots.open()
            self.capabilities = what_it_can(self.slots)
            self.spawner(0)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(*(spawner.close() for spawner in self._spawners.values()))
        if self.slots:
            await asyncio.to_thread(self.slots.close)
        await asyncio.to_thread(self.recipe.close)

    @property
    def folder(self) -> Path:
        """All that is on disk for these boxes."""
        return self.recipe.folder

    def spawner_pids(self) -> list[int]:
        return [spawner.pid for spawner in self._spawners.values() if not spawner.ended]

    def spawner(self, identity: int) -> Spawner:
        spawner = self._spawners.get(identity)
        if spawner is None or spawner.ended:
            spawner = self._spawners[identity] = Spawner(*host_owner(identity), self.recipe.folder / "rooms")
        return spawner

    async def box(self, kind: Kind) -> Box:
        layers = await self._hold(kind.base, kind.identity)
        try:
            libraries = await self._stage(kind.libraries)
            return await self._start(kind, layers, libraries)
        except BaseException:
            await self.layers.release(layers)
            raise

    async def _hold(self, base: Base | None, identity: int) -> tuple[Layer, ...]:
        try:
            return await self.layers.hold(base, identity)
        except (OSError, TreeError) as error:
            raise ValueError(f"{base} can't be the base of a box: {error}") from error

    async def _start(self, kind: Kind, layers: tuple[Layer, ...], libraries: str | None) -> Box:
        """A box gives back its layers when it ends; one that was not started leaves them to the caller."""
        errors = os.memfd_create("errors")
        try:
            box, keep = await self._spawn(kind, layers, libraries, errors)
            try:
                await self._boot(box, keep)
            except BaseException as error:
                keep.layers = ()
                await asyncio.shield(box.stop())
                if not isinstance(error, Exception):
                    raise
                said = os.pread(errors, 4096, 0).decode(errors="replace").strip()
                raise BoxLost(f"a box could not be started: {explain(said) if said else error}") from error
            return box
        finally:
            os.close(errors)

    async def _stage(self, names: tuple[str, ...]) -> str | None:
        """The folder with these libraries, copied when they are first asked for."""
        if not names:
            return None
        folder = self.recipe.folder / f"libraries-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:8]}"
        if names not in self._staging:
            self._staging[names] = asyncio.create_task(asyncio.to_thread(stage, names, folder))
        try:
            await asyncio.shield(self._staging[names])
        except Exception:
            self._staging.pop(names, None)
            raise
        return str(folder)

    async def _spawn(
        self, kind: Kind, layers: tuple[Layer, ...], libraries: str | None, errors: int
    ) -> tuple[Box, Keep]:
        """A box whose PID 1 waits for its code."""
        spawner = self.spawner(kind.identity)
        folder = None if kind.sealed else f"{self.recipe.folder}/rooms/{next(self._rooms)}"
        limits = kind.limits or self.limits
        size = (limits.disk, limits.inodes)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = await spawner.spawn(
                    theirs,
                    errors,
                    bwrap=self.recipe.bwrap,
                    filter=FILTER,
                    arguments=self.recipe.arguments(folder, [layer.path for layer in layers], libraries),
                    command=self.recipe.command(BOOT),
                    room={"folder": folder, "workspace": size, "scratch": size} if folder else None,
                )
                reader, writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()  # whatever was started ends at this end of file
                raise
        try:
            slot = self.slots.take(limits) if self.slots else None
        except OSError as error:
            writer.close()
            raise BoxLost(f"no control group for a box: {error}") from error
        keep = Keep(self, spawner, kind, layers, folder, pid, slot)
        box = keep.box = Box(reader, writer, slot, self.config.seconds, keep)
        self.alive.add(box)
        return box, keep

    async def _boot(self, box: Box, keep: Keep) -> None:
        """Send PID 1 its code and limits, and put it under its control group."""
        async with asyncio.timeout(START_SECONDS):
            box.writer.write(len(self._code).to_bytes(4, "big") + self._code)
            await box.writer.drain()
            # PID 1 reads its limits only after its code, so the two messages can't be read as one.
            if await box.reader.readexactly(1) != b"+":
                raise BoxLost("PID 1 of the box did not greet")
            if box.slot:
                box.slot.admit(first_child(keep.pid))
            limits = keep.kind.limits or self.limits
            box.writer.write(pack([b"%d" % limits.memory, b"%d" % limits.processes]))
            await box.writer.drain()
            await box.reader.readexactly(len(pack([b"ok"])))


class Keep:
    """What a box asks of what carries it (`box.Keeper`)."""

    box: Box

    def __init__(
        self,
        carrier: Bubblewrap,
        spawner: Spawner,
        kind: Kind,
        layers: tuple[Layer, ...],
        room: str | None,
        pid: int,
        slot: Slot | None,
    ):
        self.carrier, self.spawner, self.kind, self.layers = carrier, spawner, kind, layers
        self.room, self.pid, self.slot = room, pid, slot
        self.capabilities = carrier.capabilities
        self.owner = host_owner(kind.identity)

    async def end(self) -> None:
        await self.spawner.ended_box(self.pid)
        if self.box in self.carrier.alive:
            self.carrier.alive.discard(self.box)
            if self.slot and self.carrier.slots:
                self.carrier.slots.release(self.slot)
            layers, self.layers = self.layers, ()
            await self.carrier.layers.release(layers)

    def ours(self) -> bool:
        return self.spawner.ended

    async def snapshot(self) -> Snapshot:
        if self.room is None:
            raise BoxError("a sealed box has nothing to take a snapshot of")
        layers, store = self.layers, self.carrier.layers
        merged = store.to_merge(layers)
        target = store.room_for(self.kind.identity)
        sources = [layer.path for layer in layers[len(layers) - merged :]] + [f"{self.room}/room/upper"]
        snapshot = store.stacked(layers, target, self.kind.identity, merged)
        try:
            limits = self.kind.limits or self.carrier.limits
            await self.spawner.copy(sources, target, (1 + merged) * limits.inodes, (1 + merged) * limits.disk)
        except BaseException:
            await snapshot.close()
            raise
        return snapshot


def what_it_can(slots: Slots | None) -> Capabilities:
    limited = slots.folders if slots else {}
    return Capabilities(
        overlay=True,
        fork=True,
        freeze=True,
        shell=Path("/usr/bin/bash").exists() or Path("/bin/bash").exists(),
        network_off=True,
        disk_limit=True,
        inode_limit=True,
        memory_limit="memory" in limited,
        process_limit="pids" in limited,
        cpu_limit="cpu" in limited,
        identities=os.geteuid() == 0,
        libraries=True,
    )


def host_owner(identity: int) -> tuple[int, int]:
    """(uid, gid) on the host of boxes of `identity`. An ordinary user has only one to give."""
    uid, gid = unprivileged()
    return (uid + identity, gid + identity) if os.geteuid() == 0 else (uid, gid)


def first_child(pid: int) -> int:
    """Host pid of the box's PID 1: the only child of its bubblewrap."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
