"""A process that stays in its box, and the pipes to it.

process = await box.open(["python3", "-u", "server.py"])
await process.write(b"question\n")
answer = await process.line(seconds=5)
await process.close()          # ends it with everything it started
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.sandbox.box import Box

BUFFER = 1 << 20
"""Bytes of a stream held for a reader who doesn't come; then the process has to wait."""


class Stream:
    """The reading end of a pipe: what has arrived, and a way to wait for more."""

    def __init__(self, end: int, hear: Callable[[bytes], None] | None = None):
        """`hear` is given every piece as it comes; without it pieces are held for `read` and `line`."""
        os.set_blocking(end, False)
        self.end = end
        self.hear = hear
        self.held = bytearray()
        self.ended = False
        self.news = 0
        """Goes up with every piece, and at the end."""
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self.resume()

    def resume(self) -> None:
        if not self._reading and not self.ended:
            self._reading = True
            self._loop.add_reader(self.end, self.take)

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.end)

    def take(self) -> bool:
        """Read once, if there is something; False when there was not."""
        try:
            data = os.read(self.end, 65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        if self.hear:
            self.hear(data)
        else:
            self.held += data
            if len(self.held) >= BUFFER:
                self.pause()
        self.news += 1
        self._more.set()
        return True

    async def wait(self, since: int | None = None) -> None:
        """Until there is more than there was at news number `since` (default: now), or the stream has ended."""
        since = self.news if since is None else since
        while self.news == since and not self.ended:
            self._more.clear()
            await self._more.wait()

    def give(self, count: int) -> bytes:
        data = bytes(self.held[:count])
        del self.held[:count]
        self.resume()
        return data

    def close(self) -> None:
        if not self.ended:
            self.pause()
            self.ended = True
            os.close(self.end)
            self.news += 1
            self._more.set()


class Process:
    """Made by `Box.open`. Its `pid` is that inside the box."""

    def __init__(self, box: Box, pid: int, ends: list[int], hear: Callable[[bytes], None] | None = None):
        self.box, self.pid = box, pid
        os.set_blocking(ends[0], False)
        self._stdin: int | None = ends[0]
        self.stdout, self.stderr, self.status = (Stream(end) for end in ends[1:])
        if hear:
            self.stdout.hear = hear
        self._closed = False

    @property
    def exit_code(self) -> int | None:
        """As of a command (128 + signal); None while it runs, -1 when that can't be known: the box is gone."""
        if not self.status.ended:
            return None
        if not self.status.held:
            return -1
        wait = int(self.status.held)
        return 128 + (wait & 0x7F) if wait & 0x7F else wait >> 8

    async def write(self, data: bytes, seconds: float = 20.0) -> None:
        """All of `data` to its stdin. BrokenPipeError when it reads no more, TimeoutError when it doesn't in time."""
        rest = memoryview(data)
        async with asyncio.timeout(seconds):
            while rest:
                if self._stdin is None:
                    raise BrokenPipeError("its stdin was closed")
                try:
                    rest = rest[os.write(self._stdin, rest[:65536]) :]
                except BlockingIOError:
                    await writable(self._stdin)

    def close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    async def read(self, most: int = 65536, seconds: float = 20.0) -> bytes:
        """What has arrived on stdout, at least one byte; empty at its end. TimeoutError."""
        async with asyncio.timeout(seconds):
            while not self.stdout.held and not self.stdout.ended:
                await self.stdout.wait()
        return self.stdout.give(most)

    async def line(self, seconds: float = 20.0, most: int = 1 << 16) -> bytes:
        """The next line of stdout with its end; without one when that is all there is, or after `most` bytes."""
        async with asyncio.timeout(seconds):
            while (at := self.stdout.held.find(b"\n")) < 0 and not self.stdout.ended and len(self.stdout.held) < most:
                await self.stdout.wait()
        return self.stdout.give(min(most, at + 1 if at >= 0 else most))

    async def stderr_text(self, seconds: float = 20.0) -> bytes:
        """What it wrote to stderr, once that is closed. TimeoutError."""
        async with asyncio.timeout(seconds):
            while not self.stderr.ended:
                await self.stderr.wait()
        return self.stderr.give(BUFFER)

    async def wait(self, seconds: float | None = None) -> int:
        """Its exit code, once it has ended. TimeoutError."""
        async with asyncio.timeout(seconds):
            while self.exit_code is None:
                await self.status.wait()
        code = self.exit_code
        assert code is not None
        return code

    async def close(self) -> None:
        """End it with everything it started. May be called again."""
        if self._closed:
            return
        self._closed = True
        from stretto.sandbox.box import BoxError, BoxLost

        with contextlib.suppress(BoxError, BoxLost):  # then it is gone already
            await self.box._simple(b"end", b"%d" % self.pid)
            for stream in (self.stdout, self.stderr, self.status):
                while not stream.ended and stream.take():
                    pass
        self.let_go()

    def let_go(self) -> None:
        """Close our ends; its box is gone, or it is."""
        self._closed = True
        self.close_stdin()
        for stream in (self.stdout, self.stderr, self.status):
            stream.close()
        self.box._residents.discard(self)


async def writable(end: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(end, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(end)
