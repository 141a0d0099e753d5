"""`stretto bench sandbox`: what boxes cost, and whether anything is left of a thousand of them.

A start is the whole of it: spawn, all hardening, control groups, PID 1 ready for its first command, then the end
awaited until its processes, mounts and files are gone. Starts come in chunks of a hundred, a few at a time; medians
over chunks. A fork is from a box whose 50 MB workspace has been changed, to sixteen boxes that answer; medians of
five. Twice: on a base that all share, and where the whole tree was written in the box, so that it has to be copied.

Seconds of starts and forks, which keep all cores busy, are those of the clock less the CPU time that other programs of
this machine took in the meantime, spread over the cores: on a quiet machine that is the clock, and idle time always
counts. The clock's own figures are beside them. Commands are by the clock; medians of two hundred.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from stretto.config import SandboxConfig
from stretto.sandbox.box import Box
from stretto.sandbox.bubblewrap import Bubblewrap
from stretto.sandbox.pool import BoxPool

STARTS, CHUNK = 1000, 100
KERNEL = 2
"""The parent of the kernel's own threads, some of which work for boxes."""
CORES = os.cpu_count() or 1
CONCURRENT = 2 * CORES
ROUNDS, COMMANDS = 5, 40
PROGRAM = "a program (`sh -c`)"
FORKS = 16
SHARED, USED = "on a shared base", "on a shared base, each reads, edits and lists"
WRITTEN = "whole tree written in the box"
TREE_FILES, TREE_BYTES = 1500, 50_000_000
ROOMY = SandboxConfig(warm=0, workspace_mib=80, memory_mib=512, seconds=20)

LIMITS: dict[str, tuple[str, float]] = {
    "starts_per_s": (">=", 60.0),
    "exec_ms": ("<=", 6.0),
    "fork16_s": ("<", 0.5),
    "leftovers": ("<=", 0),
}


@dataclass
class Starts:
    """Medians over chunks."""

    per_s: float
    per_s_clock: float
    cpu_ms: float  # of one start: worker, spawner, and all that the box was
    leftovers: list[str]


def sandbox(json_file: Path | None, console: Console, starts: int = STARTS) -> bool:
    """Measure, print, write; whether all checks hold."""
    data = asyncio.run(measure(starts, console))
    values = {name: data[name] if name != "leftovers" else len(data["leftovers"]) for name in LIMITS}
    checks = {name: judge(name, value) for name, value in values.items()}
    console.print(table(data, checks))
    for left in data["leftovers"]:
        console.print(f"left behind: {left}", markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps({"benchmark": "sandbox", **data, "checks": checks}, indent=2) + "\n", "utf-8")
    return all(check["ok"] for check in checks.values())


def judge(name: str, value: float) -> dict[str, Any]:
    comparison, limit = LIMITS[name]
    ok = {">=": value >= limit, "<=": value <= limit, "<": value < limit}[comparison]
    return {"value": value, "limit": limit, "comparison": comparison, "ok": ok}


async def measure(starts: int, console: Console) -> dict[str, Any]:
    started = await measure_starts(starts)
    console.print(f"{starts} boxes started and stopped")
    commands = await measure_commands()
    forks, forks_clock = await measure_forks()
    return {
        "machine": {"cores": CORES, "load_before": os.getloadavg()[0], "root": os.geteuid() == 0},
        "starts": starts,
        "starts_per_s": started.per_s,
        "starts_per_s_clock": started.per_s_clock,
        "start_cpu_ms": started.cpu_ms,
        "exec_ms": commands[PROGRAM],
        "commands_ms": commands,
        "fork16_s": forks[SHARED],
        "forks_s": forks,
        "forks_clock_s": forks_clock,
        "leftovers": started.leftovers,
    }


async def measure_starts(starts: int) -> Starts:
    """Leftovers are counted against what there was before the pool."""
    before = traces()
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    free = asyncio.Semaphore(CONCURRENT)

    async def one() -> None:
        async with free:
            await (await pool.box()).stop()

    watch = Watch(pool)
    counts, cpu = [], []
    try:
        for _ in range(max(1, starts // CHUNK)):
            count, spent = min(CHUNK, starts), cpu_seconds(pool)
            with watch.timed("chunk"):
                await asyncio.gather(*(one() for _ in range(count)))
            counts.append(count)
            cpu.append(1000 * (cpu_seconds(pool) - spent) / count)
        rates = [count / seconds for count, seconds in zip(counts, watch.own["chunk"], strict=True)]
        clock = [count / seconds for count, seconds in zip(counts, watch.clock["chunk"], strict=True)]
        inside = [f"a process of the spawner: {child.pid}" for child in children_of(pool)]
        inside += [f"a layer: {path}" for path in (carrier(pool).folder / "layers").iterdir()]
    finally:
        await pool.close()
    if carrier(pool).folder.exists():
        inside.append(f"folder {carrier(pool).folder}")
    return Starts(median(rates), median(clock), median(cpu), inside + sorted(traces() - before))


def cpu_seconds(pool: BoxPool) -> float:
    """Of this process, and of the spawners with all children that they have reaped."""
    own = os.times()
    total = own.user + own.system
    for pid in carrier(pool).spawner_pids():
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Watch:
    """Stop-watch: `own` seconds are the clock's less what other programs took, spread over the cores."""

    def __init__(self, pool: BoxPool):
        self.pool = pool
        self.own: dict[str, list[float]] = {}
        self.clock: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        before, first = self._look()
        begun = time.monotonic()
        yield
        took = time.monotonic() - begun
        after, last = self._look()
        others = max(0.0, after - before) / CORES * took / (last - first)  # looking takes its time too
        self.clock.setdefault(name, []).append(took)
        self.own.setdefault(name, []).append(took - min(others, 0.9 * took))

    def _look(self) -> tuple[float, float]:
        """(what others have used, when that was)."""
        begun = time.monotonic()
        seconds = foreign_seconds(self.pool)
        return seconds, (begun + time.monotonic()) / 2


def foreign_seconds(pool: BoxPool) -> float:
    """CPU time of all programs that are not of this pool, the ended children of those that live included."""
    own = {os.getpid(), *carrier(pool).spawner_pids(), *(child.pid for child in children_of(pool))}
    total = 0.0
    for process in psutil.process_iter():
        if process.pid not in own:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                if process.ppid() != KERNEL and process.pid != KERNEL:
                    total += times.user + times.system + times.children_user + times.children_system
    return total


def children_of(pool: BoxPool) -> list[psutil.Process]:
    return [child for pid in carrier(pool).spawner_pids() for child in psutil.Process(pid).children(recursive=True)]


def carrier(pool: BoxPool) -> Bubblewrap:
    assert isinstance(pool.carrier, Bubblewrap)
    return pool.carrier


def traces() -> set[str]:
    """Everything of boxes that could be left on this machine: processes, control groups, mounts, descriptors."""
    found = {f"process {child.pid} ({child.name()})" for child in psutil.Process().children(recursive=True)}
    found |= {f"control group {path}" for path in Path("/sys/fs/cgroup").glob(f"**/stretto-{os.getpid()}-*")}
    found |= {f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return found | {f"descriptor {number}" for number in os.listdir("/proc/self/fd") if is_pipe(number)}


def is_pipe(number: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}").startswith(("pipe:", "/memfd:", "socket:"))
    return False


async def measure_commands() -> dict[str, float]:
    """Milliseconds of each kind of command in a live box, one after the other."""
    pool = BoxPool(ROOMY)
    await pool.start()
    took: dict[str, list[float]] = {}
    try:
        box, with_shell = await pool.box(), await pool.box()
        shell = await with_shell.shell()
        kinds: dict[str, Callable[[], Awaitable[object]]] = {
            PROGRAM: lambda: box.exec(["sh", "-c", "echo hello"]),
            "Python (`box.python`)": lambda: box.python("print('hello')"),
            "in a resident shell": lambda: shell.run("echo hello"),
            "a program from the shell": lambda: shell.run("ls /usr"),
        }
        for _ in range(ROUNDS):
            for name, run in kinds.items():
                for _ in range(COMMANDS):
                    begun = time.monotonic()
                    await run()
                    took.setdefault(name, []).append(1000 * (time.monotonic() - begun))
    finally:
        await pool.close()
    return {name: median(times) for name, times in took.items()}


async def measure_forks() -> tuple[dict[str, float], dict[str, float]]:
    """Seconds from `fork(16)` to sixteen boxes that answer: (without other programs' time, by the clock)."""
    pool = BoxPool(ROOMY)
    await pool.start()
    watch = Watch(pool)
    try:
        with tempfile.TemporaryDirectory(prefix="tree-") as folder:
            for name, data in tree():
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            box = await changed(await pool.box(base=folder))
            for _ in range(5):
                with watch.timed(USED):
                    with watch.timed(SHARED):
                        forks = await box.fork(FORKS)
                    await asyncio.gather(*(use(fork) for fork in forks))
                await asyncio.gather(*(fork.stop() for fork in forks))
            await box.stop()
        box = await pool.box()
        await box.write_all(dict(tree()))
        for _ in range(5):
            with watch.timed(WRITTEN):
                forks = await box.fork(FORKS)
            await asyncio.gather(*(fork.stop() for fork in forks))
    finally:
        await pool.close()
    return (
        {name: median(own) for name, own in watch.own.items()},
        {name: median(clock) for name, clock in watch.clock.items()},
    )


def tree() -> Iterator[tuple[str, bytes]]:
    draw = random.Random(0)
    for number in range(TREE_FILES):
        yield f"part{number % 40}/module{number}.py", draw.randbytes(TREE_BYTES // TREE_FILES)


async def changed(box: Box) -> Box:
    result = await box.exec(
        ["sh", "-c", "echo edit >> part0/module0.py; rm part1/module1.py; mv part2 moved; echo new > new"]
    )
    if result.exit_code:
        raise RuntimeError(f"the box could not be changed: {result.stderr.decode(errors='replace')}")
    return box


async def use(box: Box) -> None:
    result = await box.exec(
        [
            "sh",
            "-c",
            "cat part0/module0.py moved/module2.py >/dev/null; echo x >> new; test ! -e part1/module1.py && ls | wc -l",
        ]
    )
    if result.stdout.strip() != b"41":
        raise RuntimeError(f"a fork is not like its origin: {result.stdout!r} {result.stderr!r}")


def table(data: dict[str, Any], checks: dict[str, dict[str, Any]]) -> Table:
    shown = Table("what", "measured", "limit", "holds", title="boxes")
    rows = {
        "starts_per_s": ("starts per second, teardown awaited", f"{data['starts_per_s']:.0f}"),
        "exec_ms": ("a program in a live box", f"{data['exec_ms']:.1f} ms"),
        "fork16_s": (f"{FORKS} forks of a 50 MB tree", f"{data['fork16_s']:.2f} s"),
        "leftovers": (f"left behind by {data['starts']} starts", f"{len(data['leftovers'])}"),
    }
    for name, (what, measured) in rows.items():
        check = checks[name]
        shown.add_row(what, measured, f"{check['comparison']} {check['limit']:g}", "yes" if check["ok"] else "NO")
    shown.add_section()
    shown.add_row("starts per second of the clock", f"{data['starts_per_s_clock']:.0f}", "", "")
    shown.add_row("CPU time of a start", f"{data['start_cpu_ms']:.1f} ms", "", "")
    for name, value in data["commands_ms"].items():
        shown.add_row(f"command: {name}", f"{value:.1f} ms", "", "")
    for name, value in data["forks_s"].items():
        shown.add_row(
            f"{FORKS} forks: {name}", f"{value:.2f} s ({data['forks_clock_s'][name]:.2f} s by the clock)", "", ""
        )
    return shown
