"""The worker's end of a spawner: requests by number, and what became of each."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stretto.sandbox.box import BoxError, BoxLost

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 5.0
RUN = (
    "import sys; sys.path.insert(0, sys.argv[1]); from stretto.sandbox.spawner import main; "
    "main(*map(int, sys.argv[2:5]), sys.argv[5])"
)


class Spawner:
    """Starts boxes of one identity. Ends when it is closed or its process dies; `ended` says so."""

    def __init__(self, uid: int, gid: int, folder: Path):
        """`folder` is where the rooms of its boxes are mounted."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-I", "-S", "-c", RUN, str(ROOT), str(theirs.fileno()), str(uid), str(gid), str(folder)]
        with theirs:
            self._process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), env={}, cwd="/")
        ours.setblocking(False)
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), self._hear)
        self._asked: dict[int, asyncio.Future[dict]] = {}
        self._exits: dict[int, asyncio.Future[None]] = {}
        self._count = 0
        self.ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def spawn(self, box: socket.socket, errors: int, **what: object) -> int:
        """Start bubblewrap; returns its pid. BoxLost when it can't be started."""
        return (await self._ask({"do": "spawn", **what}, [box.fileno(), errors]))["pid"]

    async def copy(self, sources: Sequence[str], target: str, entries: int, size: int) -> None:
        """Lay the trees `sources` over each other into `target`. BoxError beyond the caps."""
        request = {"do": "copy", "sources": list(sources), "target": target, "entries": entries, "bytes": size}
        answer = await self._ask(request, [])
        if answer["error"] is not None:
            raise BoxError(f"the workspace can't be copied: {answer['error'] or 'the copying process was killed'}")

    async def ended_box(self, pid: int) -> None:
        """Wait until the bubblewrap `pid`, told to end, has been reaped and its room is gone; kill it when it won't."""
        future = self._exits.get(pid)
        if future is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(future), STOP_SECONDS)
        except TimeoutError:
            self._send({"do": "kill", "pid": pid}, [])
            await future

    async def _ask(self, message: dict, descriptors: list[int]) -> dict:
        self._count += 1
        future = self._asked[self._count] = self._loop.create_future()
        self._send({**message, "id": self._count}, descriptors)
        answer = await future
        if "pid" not in answer and answer["did"] == "spawn":
            raise BoxLost(f"a box could not be started: {answer['error']}")
        return answer

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
        if message["did"] == "exit":
            if (future := self._exits.pop(message["pid"], None)) and not future.done():
                future.set_result(None)
        elif message["did"] in ("spawn", "copy"):
            if "pid" in message:
                self._exits[message["pid"]] = self._loop.create_future()
            asked = self._asked.pop(message["id"])
            if not asked.done():  # else cancelled meanwhile: a box ends with its socket
                asked.set_result(message)

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(BoxLost(reason))
        for future in self._exits.values():
            if not future.done():
                future.set_result(None)
        self._asked.clear()
        self._exits.clear()

    async def close(self) -> None:
        self._end("the pool was closed")
        await asyncio.to_thread(self._process.wait)
