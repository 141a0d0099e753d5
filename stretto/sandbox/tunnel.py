"""A port inside a box that leads to a server outside, and nowhere else: a box has no network.

    client ─▶ 127.0.0.1:port ─▶ tunnel_end.py ─▶ stdin, stdout of a process of the box ─▶ Tunnel ─▶ connect()
    └──────────────────────── in the box ───────────────────────┘

Connections share the process's pipes, in frames. What runs in the box may use the port as well as end it: whoever
serves must take what comes for the policy's.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from importlib import resources

from stretto.sandbox.box import Box, BoxError
from stretto.sandbox.process import Process

HEAD = struct.Struct(">II")  # connection, bytes that follow; none: the connection is over
MOST = 32768
MAX_CONNECTIONS = 32
"""At once; each takes two descriptors of this process."""
START_SECONDS = 20.0
END = resources.files("stretto.sandbox") / "tunnel_end.py"

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""A new connection to the server outside."""


class Tunnel:
    """tunnel = await Tunnel.open(box, connect)      # BoxError, BoxLost
    f"http://127.0.0.1:{tunnel.port}"                # in the box
    await tunnel.close()
    """

    def __init__(self, process: Process, connect: Connect):
        self._process, self._connect = process, connect
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self.port = 0
        self.failed = ""
        """Why the server outside could not be reached, for which nobody in the box is to blame."""

    @classmethod
    async def open(cls, box: Box, connect: Connect) -> Tunnel:
        process = await box.open(["python3", "-c", END.read_text()])
        tunnel = cls(process, connect)
        try:
            async with asyncio.timeout(START_SECONDS):
                _, port = await tunnel._frame()
            tunnel.port = int(port)
        except (EOFError, TimeoutError, ValueError) as error:
            said = bytes(process.stderr.held[-300:]).decode(errors="replace").strip()
            await process.close()
            raise BoxError(f"no port could be opened in the box: {said or error or type(error).__name__}") from None
        except BaseException:
            await process.close()
            raise
        tunnel._begin(tunnel._carry_out())
        return tunnel

    async def close(self) -> None:
        """End it; connections are broken off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        await self._process.close()

    async def _frame(self) -> tuple[int, bytes]:
        """The next from the box. EOFError at the end, ValueError for what is no frame."""
        number, size = HEAD.unpack(await self._exactly(HEAD.size))
        if size > MOST:
            raise ValueError(f"a frame of {size} bytes")
        return number, await self._exactly(size)

    async def _exactly(self, count: int) -> bytes:
        stdout = self._process.stdout
        while len(stdout.held) < count:
            if stdout.ended:
                raise EOFError("the tunnel has ended")
            await stdout.wait()
        return stdout.give(count)

    async def _carry_out(self) -> None:
        """From the box to the server, until the box's end is over."""
        newest = 0
        with contextlib.suppress(EOFError, ValueError, OSError):  # it is no tunnel any more
            while True:
                number, data = await self._frame()
                writer = self._writers.get(number)
                if not data:
                    if writer:
                        writer.close()
                    continue
                if writer is None:
                    if number <= newest:
                        continue  # the server has ended it
                    newest = number
                    if len(self._writers) >= MAX_CONNECTIONS:
                        await self._tell(number, b"")
                        continue
                    try:
                        reader, writer = await self._connect()
                    except OSError as error:
                        self.failed = str(error)
                        return
                    self._writers[number] = writer
                    self._begin(self._carry_in(number, reader))
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    await writer.drain()
        for writer in self._writers.values():
            writer.close()

    async def _carry_in(self, number: int, reader: asyncio.StreamReader) -> None:
        """From the server to the box, until one of them ends the connection."""
        with contextlib.suppress(OSError):
            while data := await reader.read(MOST):
                await self._tell(number, data)
        self._writers.pop(number).close()
        with contextlib.suppress(OSError):
            await self._tell(number, b"")

    async def _tell(self, number: int, data: bytes) -> None:
        async with self._turn:
            await self._process.write(HEAD.pack(number, len(data)) + data)

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
