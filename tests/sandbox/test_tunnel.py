"""A port in a box that leads to a server outside: many connections, much data, every way to end. Real boxes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from stretto.config import SandboxConfig
from stretto.sandbox.box import Box
from stretto.sandbox.pool import BoxPool
from stretto.sandbox.tunnel import Tunnel

SIZE = 3_000_000


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    pool = BoxPool(SandboxConfig(warm=0, processes=8))
    await pool.start()
    box = await pool.box()
    yield box
    await box.stop()
    await pool.close()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends back the length and all that came up to a newline, then ends the connection."""
    try:
        line = await reader.readuntil(b"\n")
        writer.write(b"%d:" % len(line) + line)
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()


async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs, limit=2 * SIZE)
    task = asyncio.create_task(answer(reader, writer))
    TASKS.add(task)
    task.add_done_callback(TASKS.discard)
    return await asyncio.open_connection(sock=ours)


TASKS: set[asyncio.Task[None]] = set()


async def run(box: Box, tunnel: Tunnel, script: str) -> str:
    process = await box.open(["python3", "-c", f"import socket\nPORT = {tunnel.port}\n{script}"])
    code = await process.wait(20)
    told = bytes(process.stdout.held).decode() + bytes(process.stderr.held).decode()
    await process.close()
    assert code == 0, told
    return told.strip()


async def test_much_goes_both_ways_and_arrives_before_the_end(box):
    tunnel = await Tunnel.open(box, connect)
    script = f"""
s = socket.create_connection(("127.0.0.1", PORT))
s.sendall(b"x" * {SIZE} + b"\\n")
got = b""
while data := s.recv(1 << 16):
    got += data
print(len(got), got[:8])
"""
    assert await run(box, tunnel, script) == f"{SIZE + 9} b'{SIZE + 1!s}:'"
    await tunnel.close()


async def test_more_connections_than_a_box_may_have_processes(box):
    tunnel = await Tunnel.open(box, connect)
    script = """
all = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(30)]
for number, s in enumerate(all):
    s.sendall(b"%d\\n" % number)
print([s.makefile().read() for s in all] == [f"{len(str(n)) + 1}:{n}\\n" for n in range(30)])
"""
    assert await run(box, tunnel, script) == "True"
    await tunnel.close()


async def test_too_many_are_refused_and_others_go_on(box):
    tunnel = await Tunnel.open(box, connect)
    script = """
all = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(100)]
for s in all:
    s.sendall(b"x")
refused = 0
for s in all[32:]:
    refused += s.recv(9) == b""
for s in all[:32]:
    s.close()
s = socket.create_connection(("127.0.0.1", PORT))
import time; time.sleep(0.2)
s.sendall(b"again\\n")
print(refused, s.makefile().read().strip())
"""
    assert await run(box, tunnel, script) == "68 6:again"
    await tunnel.close()


async def test_whoever_ends_it_leaves_nothing_hanging(box):
    tunnel = await Tunnel.open(box, connect)
    await box.exec(["pkill", "-9", "python3"])
    assert await tunnel._process.wait(5) == 137
    async with asyncio.timeout(5):
        await tunnel.close()
