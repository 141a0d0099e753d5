"""Peers that speak the orchestrator's real protocol over HTTP to a real process: a worker that makes up rollouts but
writes real payloads, followers that announce engines, and a trainer that reads what it is given and checks it."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from stretto.config import Config, dump
from stretto.records import (
    NOT_SAMPLED,
    Batch,
    EngineStatus,
    Lease,
    Outcome,
    Receipt,
    Rollout,
    RouteChunk,
    Segment,
    Trained,
    decode,
    encode,
)
from stretto.rollouts.staleness import age
from stretto.tasks.folder import write
from stretto.weights.store import Store

from .world import answer, tasks


class Service:
    """An orchestrator process on a run folder."""

    def __init__(self, config: Config, run: Path, train: int = 20, heldout: int = 4) -> None:
        place = config.run.model_copy(update={"name": run.name, "root": run.parent})
        self.config, self.run = config.model_copy(update={"run": place}), run
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.toml").write_text(dump(self.config))
        for split, count in (("train", train), ("heldout", heldout)):
            for task in tasks(count, split):
                write(task, run / "tasks" / split)
        self.store = Store(self.config.store_url)
        self.process: subprocess.Popen | None = None
        self.url = ""

    async def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = launch(self.run, port)
        end = time.monotonic() + 20
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(self.url + "/health") as response:
                        assert (await response.json())["ready"]
                        return
                except aiohttp.ClientError:
                    assert self.process.poll() is None, "the orchestrator ended at start"
                    assert time.monotonic() < end, "the orchestrator did not get ready"
                    await asyncio.sleep(0.05)

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(10)


def launch(run: Path, port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "stretto.launch.service", "orchestrator", "--run", str(run)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Client:
    """Requests to the service, wherever it is now; tried again while it restarts."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        self.life = time.time_ns()
        self.asked: Counter[str] = Counter()  # lease requests of each worker

    async def ask(self, method: str, path: str, record: Any = None, json: Any = None) -> tuple[int, bytes]:
        data = encode(record) if record is not None else msgspec.json.encode(json) if json is not None else None
        end = time.monotonic() + 15
        while True:
            try:
                async with self.session.request(method, self.service.url + path, data=data) as response:
                    return response.status, await response.read()
            except (aiohttp.ClientError, ConnectionError):
                assert time.monotonic() < end, f"{path} is not answered"
                await asyncio.sleep(0.05)

    async def json(self, method: str, path: str, record: Any = None, json: Any = None) -> dict:
        status, body = await self.ask(method, path, record, json)
        assert status == 200, (path, status, body)
        return msgspec.json.decode(body)

    async def lease(self, worker: str, slots: int) -> list[Lease]:
        self.asked[worker] += 1
        words = {"worker": worker, "slots": slots, "life": self.life, "number": self.asked[worker]}
        status, body = await self.ask("POST", "/lease", json=words)
        assert status == 200, body
        return msgspec.msgpack.decode(body, type=list[Lease])

    async def heartbeat(self, worker: str, holds: Sequence[str]) -> list[str]:
        """What nobody waits for any more."""
        words = {"worker": worker, "rollouts": list(holds), "life": self.life, "number": self.asked[worker]}
        return (await self.json("POST", "/heartbeat", json=words))["drop"]

    async def receipt(self, receipt: Receipt) -> int:
        """The status of the answer; 404 when the rollout is not known."""
        status, body = await self.ask("POST", "/receipts", [receipt])
        return 404 if status == 200 and msgspec.json.decode(body)["unknown"] else status

    async def engine(self, version: int, url: str = "http://e0", cluster: str = "c0") -> None:
        await self.json("POST", "/engine", EngineStatus(url=url, cluster=cluster, version=version, fingerprint="f"))

    async def batch(self, version: int, wait: int = 1) -> bytes | None:
        status, body = await self.ask("GET", f"/batch?version={version}&wait={wait}")
        assert status in (200, 204), body
        return body if status == 200 else None


class Worker:
    """Leases, waits a little, writes a payload, hands in the receipt. `verdict` decides what a lease is worth."""

    def __init__(self, client: Client, name: str, seed: int, seconds: float, slots: int = 16) -> None:
        self.client, self.name, self.seconds, self.slots = client, name, seconds, slots
        self.random = random.Random(seed)
        self.verdict: Callable[[Lease], dict[str, Any]] = lambda lease: {}
        self.serving: Callable[[str], int | None] = lambda url: None  # what an engine really serves
        self.done: list[Receipt] = []
        self.leases: list[Lease] = []

    async def run(self) -> None:
        free = asyncio.Semaphore(self.slots)
        async with asyncio.TaskGroup() as group:
            while True:
                await free.acquire()
                count = 1
                while count < self.slots and not free.locked():
                    await free.acquire()
                    count += 1
                leases = await self.client.lease(self.name, count)
                self.leases += leases
                for _ in range(count - len(leases)):
                    free.release()
                for lease in leases:
                    group.create_task(self._play(lease, free))

    async def _play(self, lease: Lease, free: asyncio.Semaphore) -> None:
        oldest = self.serving(lease.engine)
        oldest = lease.version if oldest is None else oldest
        long = self.random.random() < 0.05
        await asyncio.sleep(self.seconds * (10 if long else self.random.random()))
        receipt = answer(lease, self.name, oldest_version=oldest, newest_version=oldest, **self.verdict(lease))
        self.client.service.store.put(receipt.key, encode(rollout(lease, receipt)))
        await self.client.receipt(receipt)
        self.done.append(receipt)
        free.release()


def rollout(lease: Lease, receipt: Receipt) -> Rollout:
    """A payload with one real segment: a prompt of five tokens and five sampled ones."""
    versions = np.array([NOT_SAMPLED] * 5 + [receipt.oldest_version] * 5, "<i4")
    segment = Segment(
        ids=np.arange(10, dtype="<i4").tobytes(),
        logprobs=np.where(versions == NOT_SAMPLED, np.nan, -0.5).astype("<f4").tobytes(),
        versions=versions.tobytes(),
        support=None,
        routes=[RouteChunk.seal(0, np.arange(9, dtype="<i4"), np.zeros((9, 2, 2), "u1"))],
        route_shape=(2, 2),
        route_bits=8,
    )
    return Rollout(
        id=lease.rollout,
        group=lease.group,
        task=lease.task.id,
        purpose=lease.purpose,
        outcome=receipt.outcome,
        reward=receipt.reward,
        rewards={"correct": receipt.reward},
        solved=receipt.solved,
        segments=[segment],
        calls=[],
        messages=[],
        turns=1,
        engine=lease.engine,
        worker=receipt.worker,
        started=0.0,
        ended=1.0,
    )


class Trainer:
    """Takes batches, looks at every payload, waits, publishes to engines (some late) and commits."""

    def __init__(self, client: Client, seed: int, seconds: float, engines: int = 2) -> None:
        self.client, self.seconds = client, seconds
        self.random = random.Random(seed)
        self.serving = {f"http://e{number}": 0 for number in range(engines)}
        self.batches: list[Batch] = []
        self.tasks: list[list[str]] = []
        self._swaps: set[asyncio.Task] = set()

    async def start(self, version: int = 0, chain: str = "chain-0") -> None:
        await self.client.json("POST", "/version", json={"version": version, "chain": chain})
        for url in self.serving:
            self.serving[url] = version
            await self.client.engine(version, url, url)
        await self.client.json("POST", "/start", json={})

    async def steps(self, first: int, last: int) -> None:
        """Updates versions `first` to `last - 1`."""
        for version in range(first, last):
            end = time.monotonic() + 15
            while (data := await self.client.batch(version)) is None:
                assert time.monotonic() < end, await self.client.json("GET", "/status")
            assert data == await self.client.batch(version), "a batch changed"
            assert data == self.client.service.store.get(f"batches/{version:06d}.msgpack")
            self._look(version, decode(data, Batch))
            await asyncio.sleep(self.seconds * self.random.random())
            for url in self.serving:
                task = asyncio.create_task(self._swap(url, version + 1))
                self._swaps.add(task)
                task.add_done_callback(self._swaps.discard)
            await asyncio.sleep(0.3 * self.seconds * self.random.random())
            await self.client.json("POST", "/trained", Trained(batch=version, version=version + 1))

    def _look(self, version: int, batch: Batch) -> None:
        bound, seen = self.client.service.config.rollouts.max_staleness, {}
        for item in batch.items:
            payload = decode(self.client.service.store.get(item.key), Rollout)
            assert payload.outcome is not Outcome.INFRA
            for segment in payload.segments:
                segment.validate()
                versions = segment.versions_T[segment.sampled_T]
                assert all(0 <= age(version, v) <= bound for v in versions), (version, versions)
            seen[item.group] = payload.task
        self.batches.append(batch)
        self.tasks.append(list(seen.values()))

    async def _swap(self, url: str, version: int) -> None:
        await asyncio.sleep(self.seconds * self.random.random())
        if version > self.serving[url]:
            self.serving[url] = version
            await asyncio.sleep(0.2 * self.seconds)
            await self.client.engine(self.serving[url], url, url)
