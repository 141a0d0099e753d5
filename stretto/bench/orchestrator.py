"""`stretto bench orchestrator`: 100,000 rollouts in flight at one orchestrator, over HTTP, on this machine.

    this process                                             the orchestrator, as in any run
    WORKERS workers ── /lease, /receipts, /heartbeat ──▶ ┌──────────────────────────────┐
    a trainer ──────── /batch, /trained, /version ─────▶ │ one process, one ledger file │
    one engine ─────── /engine ────────────────────────▶ └──────────────────────────────┘

1. fill: the workers lease until all rollouts are out; what its memory grew by is the memory per rollout.
2. paced: rollouts end and are leased again at `PACE` per second, each worker sending what it has as soon as its last
   request is answered; here a lease that can be given is timed, from the request to the answer.
3. flat out: rollouts end as fast as receipts are taken; the rate, and CPU seconds per rollout.
4. it is killed with -9 and started again: the time until it answers and knows everything that was out.

The rollouts are made up: nobody samples, no payload files are written (the orchestrator never opens one). Tasks are
real ones, and each lease carries its task, as in a run. The limit it shows is that of one Python process for decisions
and HTTP; the workers share the machine with it and take nearly as much.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from stretto.config import Config, dump, parse
from stretto.launch.local import free_port
from stretto.records import EngineStatus, Outcome, Receipt, Trained, encode
from stretto.rollouts.census import census
from stretto.rollouts.worker import HEARTBEAT_SECONDS
from stretto.tasks import folder
from stretto.tasks.repair import generate

IN_FLIGHT = 100_000
WORKERS = 500
PACE = 1000
PACED_SECONDS = 20.0
FLAT_OUT_SECONDS = 20.0
TASKS = 200
GROUP, STALENESS = 16, 7
START_SECONDS = 120.0
LIMITS = {"rollouts_per_s": 1000.0, "kib_per_rollout": 5.0, "lease_p99_ms": 1000.0, "restart_s": 10.0}
"""A second for a lease is what a worker waits for an empty answer anyway (`LEASE_SECONDS`), and little beside a rollout
of a minute: while it lasts, the worker's other slots play on."""
ENGINE = "http://engine"
LIFE = 1
"""When its workers started: they never start anew."""


class Given(msgspec.Struct, frozen=True):
    """What a made-up worker needs of a lease; the decoder skips the rest."""

    rollout: str
    group: str
    version: int


@dataclass
class Counts:
    """What the workers saw since the phase began."""

    started: float = field(default_factory=time.monotonic)
    leased: int = 0
    received: int = 0
    requests: int = 0
    lease_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    in_flight: int
    workers: int
    fill_s: float
    rss_empty_mib: float
    rss_full_mib: float
    kib_per_rollout: float
    ledger_bytes_per_rollout: float
    paced_rollouts_per_s: float
    lease_p50_ms: float
    lease_p99_ms: float
    paced_cores: float  # that the orchestrator got
    paced_queued: float  # cores it would have used besides, had nobody else been on them
    rollouts_per_s: float
    cpu_ms_per_rollout: float
    cores: float  # that the orchestrator got while flat out
    receipts_per_request: float
    restart_s: float
    known: int  # rollouts out just before it was killed
    recalled: int  # and after it was started again
    lapsed: int  # leases, in all phases
    load_average: float
    batches: int


def orchestrator(json_file: Path | None, console: Console, in_flight: int = IN_FLIGHT, workers: int = WORKERS) -> bool:
    """Measure, print the table, write the JSON; whether the limits hold."""
    place = Path(tempfile.mkdtemp(prefix="stretto-orchestrator-"))
    try:
        result = asyncio.run(_measure(place / "run", console, in_flight, workers))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    tree = summary(result)
    console.print(_table(result, tree["checks"]))
    if json_file is not None:
        json_file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return all(check["ok"] for check in tree["checks"].values())


def summary(result: Result) -> dict[str, Any]:
    """The JSON. `lapsed` are leases that were taken for lost although every worker goes on."""
    found = {
        "rollouts_per_s": (result.rollouts_per_s, result.rollouts_per_s >= LIMITS["rollouts_per_s"]),
        "kib_per_rollout": (result.kib_per_rollout, result.kib_per_rollout <= LIMITS["kib_per_rollout"]),
        "lease_p99_ms": (result.lease_p99_ms, result.lease_p99_ms <= LIMITS["lease_p99_ms"]),
        "restart_s": (result.restart_s, result.restart_s < LIMITS["restart_s"]),
        "recalled": (result.recalled, result.recalled == result.known),
        "lapsed": (result.lapsed, result.lapsed == 0),
    }
    checks = {name: {"value": value, "limit": LIMITS.get(name), "ok": bool(ok)} for name, (value, ok) in found.items()}
    return {"benchmark": "orchestrator", **asdict(result), "checks": checks}


def configuration(run: Path, in_flight: int) -> Config:
    """Three times as many groups may be live as would hold all that is out: most are partly answered at any time."""
    groups_per_step = max(1, round(3 * in_flight / GROUP / (STALENESS + 1)))
    return parse(
        {
            "run": {"name": run.name, "root": str(run.parent)},
            "tasks": {"train": TASKS},
            "trainer": {"steps": 1_000_000},  # nothing is sampled for steps after the last
            "rollouts": {
                "group_size": GROUP,
                "groups_per_step": groups_per_step,
                "max_staleness": STALENESS,
                "deadline_seconds": 3600.0,
                "group_seconds": 7200.0,
            },
        }
    )


class Service:
    """The orchestrator process of a run folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> float:
        """Seconds until it answers. Raises RuntimeError when it does not."""
        from stretto.launch.client import Unanswered, ask

        host = "127.0.0.1"
        port = free_port(host)
        self.url = f"http://{host}:{port}"
        words = ["orchestrator", "--run", str(self.run), "--host", host, "--port", str(port)]
        began = time.monotonic()
        with (self.run / "orchestrator.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stretto.launch.service", *words], stdout=log, stderr=log
            )
        while True:
            try:
                ask(f"{self.url}/health", timeout=5.0)
                return time.monotonic() - began
            except Unanswered as error:
                if self.process.poll() is not None or time.monotonic() - began > START_SECONDS:
                    said = (self.run / "orchestrator.log").read_text()[-500:]
                    raise RuntimeError(f"the orchestrator does not start ({error}): {said}") from error
                time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def rss(self) -> int:
        assert self.process is not None
        return psutil.Process(self.process.pid).memory_info().rss

    @property
    def cpu_seconds(self) -> float:
        assert self.process is not None
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    @property
    def queued_seconds(self) -> float:
        """For how long it could have run, but had no core; 0 where the system does not tell."""
        assert self.process is not None
        file = Path(f"/proc/{self.process.pid}/schedstat")
        return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


class Fleet:
    """All workers, and the trainer. How many rollouts each worker ends is said by `due`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, in_flight: int, workers: int) -> None:
        self.url, self.session = url, session
        self.counts = Counts()
        self.pace: float | None = 0.0  # rollouts that end per second, of all workers; None: as fast as they can
        self.out = 0
        self.workers = [_Worker(self, f"w{n:04d}", in_flight // workers) for n in range(workers)]
        self.version = 0
        self._leases = msgspec.msgpack.Decoder(list[Given])

    async def post(self, path: str, body: bytes) -> bytes:
        async with self.session.post(self.url + path, data=body) as answer:
            data = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{path} was answered with {answer.status}: {data.decode(errors='replace')[:300]}")
            return data

    async def lease(self, worker: str, slots: int, number: int) -> list[Given]:
        began = time.monotonic()
        body = {"worker": worker, "slots": slots, "life": LIFE, "number": number}
        data = await self.post("/lease", msgspec.json.encode(body))
        leases = self._leases.decode(data)
        if leases:
            self.counts.lease_seconds.append(time.monotonic() - began)
        self.counts.leased += len(leases)
        self.out += len(leases)
        return leases

    async def receipts(self, receipts: list[Receipt]) -> None:
        await self.post("/receipts", msgspec.msgpack.encode(receipts))
        self.counts.received += len(receipts)
        self.counts.requests += 1
        self.out -= len(receipts)

    async def train(self) -> None:
        """The trainer: takes every batch when it is ready, and commits it at once; its engine serves it at once."""
        while True:
            async with self.session.get(f"{self.url}/batch?version={self.version}&wait=1") as answer:
                await answer.read()
                if answer.status != 200:
                    continue
            await self.post("/trained", encode(Trained(batch=self.version, version=self.version + 1)))
            self.version += 1
            await self.announce()

    async def in_flight(self) -> int:
        """As the orchestrator says; fewer than `out` where it got no core for so long that leases lapsed."""
        async with self.session.get(f"{self.url}/status") as answer:
            return (await answer.json())["in_flight"]

    async def announce(self) -> None:
        status = EngineStatus(url=ENGINE, cluster="cluster", version=self.version, fingerprint="")
        await self.post("/engine", encode(status))


class _Worker:
    """Like `rollouts.worker`: one lease request and one of receipts at a time, and a heartbeat."""

    def __init__(self, fleet: Fleet, name: str, slots: int) -> None:
        self.fleet, self.name, self.slots = fleet, name, slots
        self.held: deque[Given] = deque()
        self.ended: list[Given] = []  # being handed in
        self.answered = 0  # lease requests
        self.random = random.Random(name)
        self._freed = asyncio.Event()
        self._freed.set()

    async def lease(self) -> None:
        while True:
            free = self.slots - len(self.held)
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                continue
            leases = await self.fleet.lease(self.name, free, self.answered + 1)
            self.answered += 1
            self.held.extend(leases)

    async def end(self) -> None:
        """Rollouts end at random moments; those that ended while a request was under way go with the next."""
        due = time.monotonic()
        while True:
            pace = self.fleet.pace
            if pace is None:
                count = max(1, len(self.held) // 10)
            elif pace == 0:
                await asyncio.sleep(0.2)
                due = time.monotonic()
                continue
            else:
                mean = len(self.fleet.workers) / pace
                count = 0
                while due <= time.monotonic():
                    count += 1
                    due += self.random.expovariate(1 / mean)
                if count == 0:
                    await asyncio.sleep(due - time.monotonic())
                    continue
            self.ended = [self.held.popleft() for _ in range(min(count, len(self.held)))]
            if not self.ended:
                await asyncio.sleep(0.05)
                continue
            self._freed.set()
            await self.fleet.receipts([self._receipt(given) for given in self.ended])
            self.ended = []

    async def beat(self) -> None:
        await asyncio.sleep(self.random.uniform(0, HEARTBEAT_SECONDS))
        while True:
            rollouts = [given.rollout for given in (*self.held, *self.ended)]
            body = {"worker": self.name, "rollouts": rollouts, "life": LIFE, "number": self.answered}
            await self.fleet.post("/heartbeat", msgspec.json.encode(body))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _receipt(self, given: Given) -> Receipt:
        solved = self.random.random() < 0.5
        return Receipt(
            rollout=given.rollout,
            group=given.group,
            purpose="train",
            worker=self.name,
            outcome=Outcome.SCORED,
            reward=float(solved),
            solved=solved,
            key=f"rollouts/{given.rollout}.msgpack",
            oldest_version=given.version,
            newest_version=given.version,
            tokens=600,
            sampled=300,
            turns=6,
            seconds=60.0,
            engine=ENGINE,
            behaviour={"read": 1.0, "tested": 1.0, "retried": 0.0},
        )


async def _measure(run: Path, console: Console, in_flight: int, workers: int) -> Result:
    run.mkdir(parents=True)
    (run / "config.toml").write_text(dump(configuration(run, in_flight)))
    for repair in islice(generate("train", 0), TASKS):
        folder.write(repair.task, run / "tasks" / "train")
    service = Service(run)
    try:
        await asyncio.to_thread(service.start)
        async with _fleet(service.url, in_flight, workers) as fleet:
            await fleet.post("/version", msgspec.json.encode({"version": 0, "chain": "bench"}))
            await fleet.announce()
            await fleet.post("/start", b"{}")
            await asyncio.sleep(1.0)
            empty = service.rss
            size = fleet.workers[0].slots * len(fleet.workers)
            async with asyncio.TaskGroup() as group:
                began = time.monotonic()
                tasks = [
                    group.create_task(part) for worker in fleet.workers for part in (worker.lease(), worker.beat())
                ]
                while fleet.out < size:
                    await asyncio.sleep(0.05)
                fill = time.monotonic() - began
                await asyncio.sleep(2.0)
                full = service.rss
                ledger = sum(path.stat().st_size for path in run.glob("ledger.sqlite*"))
                console.print(f"  {size} rollouts are out after {fill:.0f} s")
                tasks += [group.create_task(worker.end()) for worker in fleet.workers]
                tasks.append(group.create_task(fleet.train()))
                fleet.pace = float(PACE)
                await asyncio.sleep(2.0)
                fleet.counts = paced = Counts()
                cpu, queued = service.cpu_seconds, service.queued_seconds
                await asyncio.sleep(PACED_SECONDS)
                paced_cpu, queued = service.cpu_seconds - cpu, service.queued_seconds - queued
                paced_rate = paced.received / (time.monotonic() - paced.started)
                console.print(f"  paced: {paced_rate:.0f} rollouts/s")
                fleet.pace = None
                await asyncio.sleep(2.0)
                cpu = service.cpu_seconds
                fleet.counts = flat = Counts()
                await asyncio.sleep(FLAT_OUT_SECONDS)
                seconds, cpu = time.monotonic() - flat.started, service.cpu_seconds - cpu
                console.print(f"  flat out: {flat.received / seconds:.0f} rollouts/s")
                fleet.pace = 0.0
                while fleet.out < size or any(worker.ended for worker in fleet.workers):  # full again, and quiet
                    await asyncio.sleep(0.05)
                for task in tasks:
                    task.cancel()
            known = await fleet.in_flight()
            service.kill()
            restart = await asyncio.to_thread(service.start)
            fleet.url = service.url
            recalled = await fleet.in_flight()
        counts = census(run / "ledger.sqlite")
        lapsed = counts["leases"]["lapsed"] if counts is not None else -1
    finally:
        service.kill()
    latencies = sorted(paced.lease_seconds)
    return Result(
        in_flight=size,
        workers=workers,
        fill_s=round(fill, 2),
        rss_empty_mib=round(empty / 2**20, 1),
        rss_full_mib=round(full / 2**20, 1),
        kib_per_rollout=round((full - empty) / 1024 / size, 3),
        ledger_bytes_per_rollout=round(ledger / size, 1),
        paced_rollouts_per_s=round(paced_rate, 1),
        lease_p50_ms=round(1e3 * statistics.median(latencies), 2),
        lease_p99_ms=round(1e3 * latencies[int(0.99 * (len(latencies) - 1))], 2),
        paced_cores=round(paced_cpu / PACED_SECONDS, 3),
        paced_queued=round(queued / PACED_SECONDS, 3),
        rollouts_per_s=round(min(flat.received, flat.leased) / seconds, 1),
        cpu_ms_per_rollout=round(1e3 * cpu / max(1, flat.received), 4),
        cores=round(cpu / seconds, 3),
        receipts_per_request=round(flat.received / max(1, flat.requests), 1),
        restart_s=round(restart, 2),
        known=known,
        recalled=recalled,
        lapsed=lapsed,
        load_average=round(os.getloadavg()[0], 1),
        batches=fleet.version,
    )


@asynccontextmanager
async def _fleet(url: str, in_flight: int, workers: int) -> AsyncIterator[Fleet]:
    timeout, connector = aiohttp.ClientTimeout(total=120.0), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield Fleet(url, session, in_flight, workers)


def _table(result: Result, checks: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"One orchestrator, {result.in_flight:,} rollouts in flight, {result.workers} workers")
    for name in ("", "measured", "limit"):
        table.add_column(name, justify="left" if not name else "right")

    def row(what: str, value: str, check: str = "") -> None:
        limit = checks.get(check, {}).get("limit")
        holds = "" if limit is None else "holds" if checks[check]["ok"] else "[red]MISSED[/red]"
        table.add_row(what, value, f"{limit:g} {holds}" if limit is not None else "")

    row("lease and receipt, flat out", f"{result.rollouts_per_s:,.0f} rollouts/s", "rollouts_per_s")
    row("  CPU", f"{result.cpu_ms_per_rollout:.3f} ms per rollout, {result.cores:.2f} cores")
    row("  receipts per request", f"{result.receipts_per_request:.1f}")
    row("memory", f"{result.kib_per_rollout:.2f} KiB per rollout", "kib_per_rollout")
    row("ledger on disk, leased", f"{result.ledger_bytes_per_rollout:,.0f} bytes per rollout")
    row(f"lease at {result.paced_rollouts_per_s:,.0f} rollouts/s, median", f"{result.lease_p50_ms:.1f} ms")
    row("  99 of 100", f"{result.lease_p99_ms:.1f} ms", "lease_p99_ms")
    row("  cores it had, and waited for", f"{result.paced_cores:.2f}, {result.paced_queued:.2f}")
    row("restart after kill -9", f"{result.restart_s:.1f} s", "restart_s")
    row("  rollouts it knows again", f"{result.recalled:,} of {result.known:,}", "recalled")
    row("leases taken for lost", f"{result.lapsed:,}", "lapsed")
    row("load of the machine", f"{result.load_average:g} on {os.cpu_count()} cores")
    return table
