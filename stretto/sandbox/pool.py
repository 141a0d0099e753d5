"""Boxes kept started ahead of need, each used once.

A box takes about 10 ms to start, more than most commands in it; `warm` of them wait ready. More are started on
demand, at most `STARTS` at once so that a burst of rollouts doesn't make every start slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

from stretto.config import SandboxConfig
from stretto.sandbox.box import Box, BoxLost
from stretto.sandbox.cgroup import Slots
from stretto.sandbox.check import explain, require, unprivileged
from stretto.sandbox.inside import BOOT, pack
from stretto.sandbox.recipe import Recipe
from stretto.sandbox.syscalls import seccomp_program

STARTS = 2 * (os.cpu_count() or 1)
PROCESSES = 32
"""Processes and threads of a box."""
START_SECONDS = 30.0
STOP_SECONDS = 5.0
FILTER = seccomp_program().hex()
HERE = Path(__file__).parent


class BoxPool:
    """Starts and stops boxes; belongs to the event loop that called `start`.

    pool = BoxPool(config)
    await pool.start()          # SandboxUnavailable: says what to install
    box = await pool.box({"solution.py": "..."})
    ...
    await box.stop()
    await pool.close()          # nothing is left: no process, no control group
    """

    def __init__(self, config: SandboxConfig):
        self.config = config
        self.limits = (config.memory_mib << 20, PROCESSES)
        self._warm: deque[Box] = deque()
        self._alive: set[Box] = set()
        self._refills: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Check the machine, start the spawner and the first warm boxes."""
        await asyncio.to_thread(require)
        self._recipe = await asyncio.to_thread(Recipe.prepare)
        self._code = await asyncio.to_thread(self._recipe.compile, HERE / "inside.py")
        self._slots = Slots.open(self.limits[0], PROCESSES + 1)
        self._spawner = Spawner(self._recipe)
        self._starts = asyncio.Semaphore(STARTS)
        try:
            self._warm.extend(await asyncio.gather(*(self._start_box() for _ in range(self.config.warm))))
        except BaseException:
            await self.close()
            raise

    async def box(self, files: dict[str, str] | None = None, sealed: bool = False) -> Box:
        """A box nobody has used, with `files` in its workspace; a sealed one has no writable path at all.

        Raises BoxLost when none can be started, BoxError when a file can't be written.
        """
        box = None
        while self._warm and not sealed and box is None:
            box = self._warm.popleft()
            self._refill()
            if box.reader.at_eof():  # it died while it waited
                await box.stop()
                box = None
        box = box or await self._start_box(sealed)
        if files:
            try:
                await box.write_all({path: text.encode() for path, text in files.items()})
            except BaseException:
                await asyncio.shield(box.stop())
                raise
        return box

    async def close(self) -> None:
        """Stop every box and the spawner."""
        self._closing = True
        for refill in self._refills:
            refill.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        await asyncio.gather(*(box.stop() for box in list(self._alive)))
        self._warm.clear()
        await self._spawner.close()
        if self._slots:
            self._slots.close()
        self._recipe.close()

    def _refill(self) -> None:
        task = asyncio.get_running_loop().create_task(self._add_warm())
        self._refills.add(task)
        task.add_done_callback(self._refills.discard)

    async def _add_warm(self) -> None:
        with contextlib.suppress(BoxLost):  # whoever needs a box next meets the error
            box = await self._start_box()
            if self._closing:
                await box.stop()
            else:
                self._warm.append(box)

    async def _start_box(self, sealed: bool = False) -> Box:
        async with self._starts:
            errors = os.memfd_create("errors")
            try:
                box, pid = await self._spawn(sealed, errors)
                try:
                    await self._boot(box, pid)
                except BaseException as error:
                    await asyncio.shield(box.stop())
                    if not isinstance(error, Exception):
                        raise
                    said = os.pread(errors, 4096, 0).decode(errors="replace").strip()
                    raise BoxLost(f"a box could not be started: {explain(said) if said else error}") from error
                return box
            finally:
                os.close(errors)

    async def _spawn(self, sealed: bool, errors: int) -> tuple[Box, int]:
        """A box whose PID 1 waits for its code, and the host pid of its bubblewrap."""
        if self._spawner.ended:
            self._spawner = Spawner(self._recipe)
        spawner = self._spawner
        arguments = self._recipe.arguments(self.config.workspace_mib << 20, sealed)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = await spawner.spawn(arguments, self._recipe.command(BOOT), theirs, errors)
                reader, writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()  # whatever was started ends at this end of file
                raise
        slot = self._slots.take() if self._slots else None

        async def end() -> None:
            await spawner.ended_box(pid)
            if box in self._alive:
                self._alive.discard(box)
                if slot and self._slots:
                    self._slots.release(slot)

        box = Box(reader, writer, slot, self.config.seconds, end, ours=lambda: spawner.ended)
        self._alive.add(box)
        return box, pid

    async def _boot(self, box: Box, pid: int) -> None:
        """Send PID 1 its code and limits, and put it under its control group."""
        async with asyncio.timeout(START_SECONDS):
            box.writer.write(len(self._code).to_bytes(4, "big") + self._code)
            await box.writer.drain()
            # PID 1 reads its limits only after its code, so the two messages can't be read as one.
            if await box.reader.readexactly(1) != b"+":
                raise BoxLost("PID 1 of the box did not greet")
            if box.slot:
                box.slot.admit(first_child(pid))
            box.writer.write(pack([b"%d" % limit for limit in self.limits]))
            await box.writer.drain()
            await box.reader.readexactly(len(pack([b"ok"])))


def first_child(pid: int) -> int:
    """Host pid of the box's PID 1: the only child of its bubblewrap."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


class Spawner:
    """Our end of `spawner.py`."""

    def __init__(self, recipe: Recipe):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._recipe = recipe
        uid, gid = unprivileged()
        argv = [sys.executable, "-I", "-S", HERE / "spawner.py", str(theirs.fileno()), str(uid), str(gid)]
        with theirs:
            self._process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), env={}, cwd="/")
        ours.setblocking(False)
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), self._hear)
        self._spawned: dict[int, asyncio.Future[int]] = {}
        self._exits: dict[int, asyncio.Future[None]] = {}
        self._count = 0
        self.ended = False

    async def spawn(self, arguments: list[str], command: list[str], box: socket.socket, errors: int) -> int:
        """Start bubblewrap; returns its pid."""
        self._count += 1
        future = self._spawned[self._count] = self._loop.create_future()
        self._send(
            {
                "do": "spawn",
                "id": self._count,
                "bwrap": self._recipe.bwrap,
                "filter": FILTER,
                "arguments": arguments,
                "command": command,
            },
            [box.fileno(), errors],
        )
        return await future

    async def ended_box(self, pid: int) -> None:
        """Wait until the bubblewrap `pid`, told to end, has been reaped; kill it when it won't."""
        future = self._exits.get(pid)
        if future is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(future), STOP_SECONDS)
        except TimeoutError:
            self._send({"do": "kill", "pid": pid}, [])
            await future

    def _send(self, message: dict, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            raise BoxLost(f"the process that starts boxes is gone ({error.strerror})") from error

    def _hear(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end("the process that starts boxes ended")
            return
        message = json.loads(data)
        pid = message["pid"]
        if message["did"] == "spawn":
            self._exits[pid] = self._loop.create_future()
            spawned = self._spawned.pop(message["id"])
            if not spawned.done():  # else cancelled meanwhile: the box ends with its socket
                spawned.set_result(pid)
        elif (future := self._exits.pop(pid, None)) and not future.done():
            future.set_result(None)

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for future in self._spawned.values():
            if not future.done():
                future.set_exception(BoxLost(reason))
        for future in self._exits.values():
            if not future.done():
                future.set_result(None)
        self._spawned.clear()
        self._exits.clear()

    async def close(self) -> None:
        self._end("the pool was closed")
        await asyncio.to_thread(self._process.wait)
