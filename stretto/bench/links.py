"""Slow links for `bench wan`: network namespaces with shaped interfaces, or a throttle in this process without them.

    store, in this process ◀── veth, tbf at so many Mbit/s ──▶ namespace: a follower and its engine     (root on Linux)
                           ◀── a TCP proxy that counts and waits ──▶ a follower and its engine          (elsewhere)

Both directions are limited. Left out: delay and loss; a link is a rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PIECE = 16 << 10
"""Bytes that the throttle passes on at once."""


class Link(Protocol):
    """One way to the store."""

    mbit: float
    url: str  # of the store, for whoever is behind this link
    prefix: list[str]  # of a command that is to run behind it

    def delivered(self) -> int:
        """Bytes that came through from the store so far."""
        ...


@dataclass
class Shaped:
    mbit: float
    url: str
    prefix: list[str]
    interface: str

    def delivered(self) -> int:
        return int(Path(f"/sys/class/net/{self.interface}/statistics/tx_bytes").read_text())


@dataclass
class Throttled:
    mbit: float
    url: str
    prefix: list[str]
    count: int = 0

    def delivered(self) -> int:
        return self.count


def why_not_namespaces() -> str:
    """Empty if they can be made here."""
    name = f"stretto-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", f"sw{os.getpid()}", "type", "veth", "peer", "name", f"sx{os.getpid()}", "netns", name)
            _run("tc", "qdisc", "add", "dev", f"sw{os.getpid()}", *_shape(100))
        finally:
            with contextlib.suppress(RuntimeError):
                _ip("link", "del", f"sw{os.getpid()}")
            _ip("netns", "del", name)
    except (RuntimeError, OSError) as error:
        return str(error)
    return ""


@asynccontextmanager
async def links(port: int, rates: list[float], namespaces: bool) -> AsyncIterator[list[Link]]:
    """One link per rate (Mbit/s) to the store that listens at `port` on all addresses."""
    async with AsyncExitStack() as stack:
        made: list[Link] = []
        for number, rate in enumerate(rates):
            if namespaces:
                made.append(stack.enter_context(_shaped(number, port, rate)))
            else:
                made.append(await stack.enter_async_context(_throttled(port, rate)))
        yield made


@contextmanager
def _shaped(number: int, port: int, mbit: float) -> Iterator[Shaped]:
    name, here, there = f"stretto-{os.getpid()}-{number}", f"sw{os.getpid()}-{number}", f"sx{os.getpid()}-{number}"
    address = f"10.{100 + os.getpid() % 150}.{number}"  # another one for each bench at work
    _ip("netns", "add", name)
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _ip("addr", "add", f"{address}.1/24", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "addr", "add", f"{address}.2/24", "dev", there)
        _ip("-n", name, "link", "set", there, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _run("tc", "qdisc", "add", "dev", here, *_shape(mbit))
        _run("tc", "-n", name, "qdisc", "add", "dev", there, *_shape(mbit))
        yield Shaped(mbit, f"http://{address}.1:{port}", ["ip", "netns", "exec", name], here)
    finally:
        with contextlib.suppress(RuntimeError):
            _ip("link", "del", here)
        _ip("netns", "del", name)


def _shape(mbit: float) -> list[str]:
    return ["root", "tbf", "rate", f"{mbit:g}mbit", "burst", f"{max(32, int(mbit * 4))}kb", "latency", "400ms"]


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])}: {done.stderr.strip() or done.returncode}")


@asynccontextmanager
async def _throttled(port: int, mbit: float) -> AsyncIterator[Throttled]:
    link = Throttled(mbit, "", [])
    free_at = [0.0, 0.0]  # when the next piece may go, per direction

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE):
                free_at[way] = max(free_at[way], loop.time()) + len(data) * 8 / (mbit * 1e6)
                await asyncio.sleep(free_at[way] - loop.time())
                link.count += len(data) if way == 0 else 0
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(far_reader, writer, 0), pump(reader, far_writer, 1))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    link.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield link
