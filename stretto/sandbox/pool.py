"""Boxes kept started ahead of need, each used once.

A box takes about 10 ms to start, more than most commands in it; `warm` of them wait ready. More are started on
demand, at most `STARTS` at once so that a burst of rollouts doesn't make every start slow. Boxes on a base, with
libraries or of another identity are started when they are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from stretto.config import SandboxConfig
from stretto.sandbox.backends import carrier_of
from stretto.sandbox.box import Box, BoxLost
from stretto.sandbox.capabilities import Capabilities
from stretto.sandbox.carrier import Kind
from stretto.sandbox.cgroup import Limits
from stretto.sandbox.layers import Base

STARTS = 2 * (os.cpu_count() or 1)
MAX_IDENTITY = 63
PLAIN = Kind()


class BoxPool:
    """Starts and stops boxes; belongs to the event loop that called `start`.

    pool = BoxPool(config)
    await pool.start()          # SandboxUnavailable: says what to install
    box = await pool.box({"solution.py": "..."}, base="/tasks/parser/environment", libraries=["pytest"])
    ...
    await box.stop()
    await pool.close()          # nothing is left: no process, no control group, no mount, no file
    """

    def __init__(self, config: SandboxConfig):
        self.config = config
        self.limits = Limits(
            memory=config.memory_mib << 20,
            processes=config.processes,
            cpus=config.cpus,
            disk=config.workspace_mib << 20,
            inodes=config.inodes,
        )
        self.carrier = carrier_of(config, self.limits)
        self._warm: deque[Box] = deque()
        self._refills: set[asyncio.Task[None]] = set()
        self._starts = asyncio.Semaphore(STARTS)
        self._closing = False

    @property
    def _spawner(self):
        return self.carrier.spawner(0)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def capabilities(self) -> Capabilities:
        return self.carrier.capabilities

    async def start(self, trusted: bool = False) -> None:
        """Check the machine, start what starts boxes, and the first warm ones. SandboxUnavailable when it doesn't hold.

        `trusted`: nothing that a policy wrote will be run, so it is enough that boxes start.
        """
        await self.carrier.open(trusted)
        try:
            self._warm.extend(await asyncio.gather(*(self._start(PLAIN) for _ in range(self.config.warm))))
        except BaseException:
            await self.close()
            raise

    async def box(
        self,
        files: dict[str, str] | None = None,
        sealed: bool = False,
        *,
        base: Base | None = None,
        libraries: Sequence[str] = (),
        identity: int | None = None,
        limits: Limits | None = None,
    ) -> Box:
        """A box nobody has used, with `files` in its workspace; a sealed one has no writable path at all.

        `base`: a folder of this machine, or a snapshot, that the workspace begins as. It is shared by all boxes that
        stand on it, each of which sees only its own changes. A folder is read once per pool, and again when its own
        time of change is another; what its subfolders become in the meantime is not noticed.
        `libraries`: Python distributions of our own environment, with what they require, at `libraries.LIBRARIES`.
        `identity`: 0 (default) to 63; as root, boxes of another identity have another uid on the host.
        `limits`: other than the pool's (`dataclasses.replace(pool.limits, memory=1 << 30)`).

        Raises BoxLost when none can be started, BoxError when a file can't be written, ValueError for a base or
        library that isn't there.
        """
        if not 0 <= (identity or 0) <= MAX_IDENTITY:
            raise ValueError(f"identity is {identity}; there are 0 to {MAX_IDENTITY}")
        kind = Kind(sealed, base, tuple(sorted(set(libraries))), identity or 0, limits)
        box = (await self._take_warm() if kind == PLAIN else None) or await self._start(kind)
        if files:
            try:
                await box.write_all({path: text.encode() for path, text in files.items()})
            except BaseException:
                await asyncio.shield(box.stop())
                raise
        return box

    async def close(self) -> None:
        """Stop every box and the spawners, and remove what is on disk."""
        self._closing = True
        for refill in self._refills:
            refill.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        await asyncio.gather(*(box.stop() for box in list(self.carrier.alive)))
        self._warm.clear()
        await self.carrier.close()

    async def _start(self, kind: Kind) -> Box:
        async with self._starts:
            box = await self.carrier.box(kind)
        box.again = lambda snapshot: self._start(replace(kind, base=snapshot))
        return box

    async def _take_warm(self) -> Box | None:
        while self._warm:
            box = self._warm.popleft()
            self._refill()
            if not box.reader.at_eof():
                return box
            await box.stop()  # it died while it waited
        return None

    def _refill(self) -> None:
        task = asyncio.get_running_loop().create_task(self._add_warm())
        self._refills.add(task)
        task.add_done_callback(self._refills.discard)

    async def _add_warm(self) -> None:
        with contextlib.suppress(BoxLost):  # whoever needs a box next meets the error
            box = await self._start(PLAIN)
            if self._closing:
                await box.stop()
            else:
                self._warm.append(box)
