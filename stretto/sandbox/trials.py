"""Rows of the probe that need the host's view: each function returns when the thing holds, and raises Broken if not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.config import SandboxConfig
from stretto.sandbox.attempts import PRELUDE
from stretto.sandbox.box import Box, BoxError, Result
from stretto.sandbox.bubblewrap import Bubblewrap
from stretto.sandbox.pool import BoxPool

CONFIG = SandboxConfig(warm=0, seconds=8.0, memory_mib=64, workspace_mib=4, inodes=500, processes=24, cpus=0.5)
NO_GROUPS = "no writable control group here: run as root or in a delegated group"

Act = Callable[[BoxPool], Awaitable[None]]


class Broken(Exception):
    """What an attempt got away with."""


def in_a_box(source: str) -> Act:
    async def act(pool: BoxPool) -> None:
        async with a_box(pool) as box:
            quiet(await box.python(PRELUDE + source))
            quiet(await box.python("print(end='')"))  # and it lives on

    return act


def quiet(result: Result) -> None:
    if result.exit_code or result.stdout:
        said = result.stdout or result.stderr[-300:] or f"exit code {result.exit_code}".encode()
        raise Broken("; ".join(dict.fromkeys(said.decode(errors="replace").split("\n")[:4])).strip("; "))


@contextlib.asynccontextmanager
async def a_box(pool: BoxPool, **options: Any) -> AsyncIterator[Box]:
    box = await pool.box(**options)
    try:
        yield box
    finally:
        await box.stop()


def carrier(pool: BoxPool) -> Bubblewrap:
    assert isinstance(pool.carrier, Bubblewrap)
    return pool.carrier


def host_pids(pool: BoxPool) -> set[int]:
    """The spawners and all their descendants."""
    found, waiting = set(), carrier(pool).spawner_pids()
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += [int(child) for child in task.read_text().split()]
    return found


async def who_it_is(pool: BoxPool) -> None:
    async with a_box(pool):
        for pid in host_pids(pool):
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            if "0" in fields["Uid"].split() or "0" in fields["Gid"].split():
                raise Broken(f"process {pid} is root")
            if os.geteuid() == 0 and fields["Groups"].split():
                raise Broken(f"process {pid} has the groups {fields['Groups'].strip()}")


async def sealed(pool: BoxPool) -> None:
    source = """
for folder, below, names in os.walk('/'):
    if folder == '/':
        below[:] = [name for name in below if name not in ('proc', 'usr')]
    attempt('wrote in ' + folder, lambda: open(folder + '/x', 'w'))
    attempt('made a folder in ' + folder, lambda: os.mkdir(folder + '/x'))
"""
    async with a_box(pool, sealed=True) as box:
        quiet(await box.python(PRELUDE + source))


async def links(pool: BoxPool) -> None:
    plant = """
import os, socket
os.symlink('/etc/shadow', 'a'); os.symlink('/', 'b'); os.mkfifo('c'); os.mkdir('d'); os.symlink('../../..', 'd/e')
socket.socket(socket.AF_UNIX).bind('f')
open('g', 'w').truncate(1 << 40)
"""
    async with a_box(pool) as box:
        quiet(await box.python(plant))
        for path in ("a", "b/etc/passwd", "c", "d/e/etc/passwd", "f", "g"):
            with contextlib.suppress(BoxError):
                raise Broken(f"{path} gave {len(await box.read(path))} bytes")
        with contextlib.suppress(BoxError):
            await box.write("d/e/tmp/x", b"")
            raise Broken("a file was written through a link")
        snapshot = await box.snapshot()
        try:
            top = Path(snapshot.layers[-1].path)
            kinds = {path.name: path.is_symlink() or path.is_dir() or path.is_file() for path in top.rglob("*")}
            if set(kinds) != {"a", "b", "d", "e", "g"} or not all(kinds.values()):
                raise Broken(f"the copy holds {sorted(kinds)}")
            if not (top / "a").is_symlink() or (top / "g").stat().st_blocks > 64:
                raise Broken("a link or a hole was filled")
        finally:
            await snapshot.close()


async def survivors(pool: BoxPool) -> None:
    source = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
time.sleep(0.05)
"""
    async with a_box(pool) as box:
        before = len(host_pids(pool))
        quiet(await box.python(source))
        if (now := len(host_pids(pool))) != before:
            raise Broken(f"{now - before} processes live on")


async def teardown(pool: BoxPool) -> None:
    async with a_box(pool, base=None):
        pass
    before = host_pids(pool)
    box = await pool.box()
    await box.exec(["sh", "-c", "sleep 600 & setsid sleep 600 & echo"])
    await box.stop()
    if left := host_pids(pool) - before:
        raise Broken(f"{len(left)} processes are left")
    mounts = Path(f"/proc/{carrier(pool).spawner_pids()[0]}/mountinfo").read_text()
    if str(carrier(pool).folder / "rooms") + "/" in mounts:
        raise Broken("a mount is left")


async def bases(pool: BoxPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kept").write_text("1")
        async with a_box(pool, base=folder) as one, a_box(pool, base=folder) as two:
            quiet(await one.exec(["sh", "-c", "echo 2 > kept; echo 3 > new; ls -l kept > /dev/null"]))
            if await two.files() != {"kept": b"1"} or os.listdir(folder) != ["kept"]:
                raise Broken("a neighbour or the base has changed")
            (fork,) = await one.fork(1)
            try:
                quiet(await fork.exec(["rm", "kept"]))
                if await one.files() != {"kept": b"2\n", "new": b"3\n"} or await fork.files() != {"new": b"3\n"}:
                    raise Broken("a fork and its origin are not apart")
            finally:
                await fork.stop()


async def disk(pool: BoxPool) -> None:
    source = f"""
for folder in ('/workspace', '/tmp', '/dev/shm', '/home/user'):
    size = 0
    try:
        with open(folder + '/fill', 'wb', buffering=0) as file:
            while size < {8 * CONFIG.workspace_mib << 20}:
                size += file.write(bytes(1 << 16))
    except OSError:
        pass
    os.remove(folder + '/fill')
    if size > {CONFIG.workspace_mib << 20}:
        print(size, 'bytes in', folder)
"""
    async with a_box(pool) as box:
        quiet(await box.python(PRELUDE + source))


async def inodes(pool: BoxPool) -> None:
    source = f"""
for folder in ('/workspace', '/tmp'):
    made = 0
    try:
        while made < {4 * CONFIG.inodes}:
            os.symlink('x', f'{{folder}}/{{made}}')
            made += 1
    except OSError:
        pass
    if made > {CONFIG.inodes}:
        print(made, 'files in', folder)
"""
    async with a_box(pool) as box:
        quiet(await box.python(PRELUDE + source))


async def processes(pool: BoxPool) -> None:
    bomb = f"""
import time
made = 0
try:
    while made < 500:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError:
    pass
if made > {CONFIG.processes}:
    print(made, 'processes')
"""
    async with a_box(pool) as box, a_box(pool) as neighbour:
        bombing = asyncio.create_task(box.exec(["sh", "-c", "f() { f | f & }; f; sleep 5"], seconds=0.5))
        await asyncio.sleep(0.1)
        quiet(await neighbour.python(PRELUDE + bomb))
        await bombing
        quiet(await box.python(PRELUDE + bomb))


async def memory(pool: BoxPool) -> None:
    source = f"""
held = []
try:
    while len(held) < {8 * CONFIG.memory_mib}:
        held.append(bytearray(1 << 20))
    print(len(held), 'MiB')
except MemoryError:
    pass
"""
    async with a_box(pool) as box:
        result = await box.python(source)
        if result.stdout:
            quiet(result)
        quiet(await box.python("print(end='')"))


async def tree_memory(pool: BoxPool) -> None:
    if not pool.capabilities.memory_limit:
        raise Broken(NO_GROUPS)
    source = f"""
import time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray({CONFIG.memory_mib // 2} << 20)
        for at in range(0, len(held), 4096):
            held[at] = 1
        time.sleep(60)
os.wait()
"""
    async with a_box(pool, limits=replace(pool.limits, cpus=2.0)) as box:
        result = await box.python(PRELUDE + source, seconds=30)
        if not result.oom:
            raise Broken(f"8 processes of {CONFIG.memory_mib // 2} MiB live in a box of {CONFIG.memory_mib} MiB")
        quiet(await box.python("print(end='')"))
        wide = replace(pool.limits, disk=4 * pool.limits.memory)
    async with a_box(pool, limits=wide) as box:
        await box.exec(["sh", "-c", "cat /dev/zero > fill"], seconds=4)
        peak = (await box.stats()).memory_peak
        if peak is not None and peak > CONFIG.memory_mib << 20:
            raise Broken(f"files took {peak >> 20} MiB of memory")


async def cpu(pool: BoxPool) -> None:
    if not pool.capabilities.cpu_limit:
        raise Broken(NO_GROUPS.replace("control group", "cpu control group"))
    burn = (
        "import os, time\nfor _ in range(3): os.fork()\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    )
    async with a_box(pool) as box:
        begun = time.monotonic()
        result = await box.python(burn)
        share = (result.cpu_seconds or 0) / (time.monotonic() - begun)
        if share > 1.3 * CONFIG.cpus:
            raise Broken(f"they got {share:.2f} cores, more than {CONFIG.cpus}")


async def output(pool: BoxPool) -> None:
    async with a_box(pool) as box:
        result = await box.python("while True: print('x' * 9999)", keep=4096)
        if result.timed_out or not result.truncated or len(result.stdout) > 4096:
            raise Broken(f"it wrote on for {result.seconds:.0f} s")


async def in_time(pool: BoxPool) -> None:
    stubborn = """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(99)
"""
    async with a_box(pool) as box:
        result = await box.python(stubborn, seconds=0.2)
        if not result.timed_out or result.seconds > 10:
            raise Broken(f"it took {result.seconds:.1f} s")


async def identities(pool: BoxPool) -> None:
    if not pool.capabilities.identities:
        raise Broken("an ordinary user has no other uid to give; as root there are 64")
    async with a_box(pool, identity=1), a_box(pool):
        uids = {os.stat(f"/proc/{pid}").st_uid for pid in host_pids(pool)} - {0}
        owners = {Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[0] for pid in host_pids(pool)}
        if len(owners) < 2:
            raise Broken(f"all boxes are of uid {owners or uids}")
