"""A small world in virtual time around a real `Flow` and a real ledger: workers, engines and a trainer that are slow,
overtake each other and die. Everything follows from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stretto.config import Config, parse
from stretto.records import Batch, EngineStatus, Lease, Outcome, Receipt, Task, Trained, decode
from stretto.rollouts.flow import Flow
from stretto.rollouts.groups import TRAIN
from stretto.rollouts.ledger import Ledger
from stretto.rollouts.staleness import age
from stretto.watch.metrics import Metrics

GRADING = {
    "solution/a.py": "def f(x):\n    return x\n",
    "tests/oracle.json": '{"module": "a", "function": "f", "arguments": [{"kind": "int", "low": 0, "high": 9}]}',
}


def tasks(count: int, split: str = TRAIN) -> list[Task]:
    return [
        Task(id=f"{split}/{number}", split=split, instruction="repair it", files={"a.py": ""}, grading=GRADING)
        for number in range(count)
    ]


def configuration(**rollouts: Any) -> Config:
    shape = {"group_size": 4, "min_group": 2, "groups_per_step": 3}
    return parse({"rollouts": {**shape, **rollouts}, "trainer": {"steps": 1000}})


def answer(lease: Lease, worker: str = "w0", **changes: Any) -> Receipt:
    """A receipt for a lease; reward is 1 for even members and 0 for odd ones unless said otherwise."""
    member = int(lease.rollout.rpartition("-")[2].partition("r")[0])
    receipt = Receipt(
        rollout=lease.rollout,
        group=lease.group,
        purpose=lease.purpose,
        worker=worker,
        outcome=Outcome.SCORED,
        reward=float(member % 2 == 0),
        solved=member % 2 == 0,
        key=f"rollouts/{lease.rollout}.msgpack",
        oldest_version=lease.version,
        newest_version=lease.version,
        tokens=10,
        sampled=5,
        turns=1,
        seconds=1.0,
        engine=lease.engine,
        behaviour={"read": 1.0},
    )
    return msgspec.structs.replace(receipt, **changes)


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Desk:
    """A flow on a folder, with a clock of its own; `reopen` is a restart of the orchestrator."""

    def __init__(self, folder: Path, config: Config, task_count: int = 50) -> None:
        self.folder, self.config, self.task_count = folder, config, task_count
        self.clock = Clock()
        self.metrics = Metrics(folder / "metrics.jsonl", "orchestrator")
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.folder / "ledger.sqlite", self.clock)
        self.flow = Flow(self.config, self.ledger, self.metrics, self.clock)
        self.flow.give_tasks(TRAIN, tasks(self.task_count))
        self.flow.give_tasks("heldout", tasks(8, "heldout"))

    def reopen(self) -> None:
        self.ledger.close()
        self.open()

    def close(self) -> None:
        self.ledger.close()
        self.metrics.close()

    def engine(self, version: int, url: str = "http://e0", cluster: str = "c0") -> None:
        self.flow.engine(EngineStatus(url=url, cluster=cluster, version=version, fingerprint=f"f{version}"))

    def begin(self, version: int = 0) -> None:
        self.flow.set_version(version, "chain-0")
        self.engine(version)
        self.flow.switch(True)

    def batch(self, version: int) -> Batch | None:
        record = self.flow.batch(version)
        return None if record is None else decode(record, Batch)

    def commit(self, version: int) -> None:
        self.flow.trained(Trained(batch=version, version=version + 1))

    def fates(self) -> dict[int, tuple[str, int | None, str]]:
        """ordinal -> (fate, batch, reason) of training groups that ended."""
        rows = self.ledger.db.execute(
            "SELECT ordinal, fate, batch, fates.reason FROM fates JOIN groups ON grp = id WHERE purpose = 'train'"
        )
        return {ordinal: (fate, batch, reason) for ordinal, fate, batch, reason in rows}


class World:
    """Runs until the trainer has made `steps` versions. `slow` is the chance of a rollout that takes very long."""

    def __init__(
        self, desk: Desk, seed: int, engines: int = 2, workers: int = 2, slow: float = 0.05, dies: float = 0.0
    ):
        self.desk, self.random = desk, random.Random(seed)
        self.slow, self.dies = slow, dies
        self.slots = {f"w{number}": 10 for number in range(workers)}
        self.serving = {f"http://e{number}": 0 for number in range(engines)}  # what engines really serve
        self.batches: list[Batch] = []
        self.version = 0  # of the trainer
        self.most_in_flight = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.flat = 0.1  # chance that all members of a group get the same reward

    def run(self, steps: int, seconds: float = 20000.0, restart_at: float | None = None) -> None:
        flow, end = self.desk.flow, self.desk.clock.now + seconds
        flow.set_version(self.version, "chain-0")
        for url in self.serving:
            self.desk.engine(self.serving[url], url, url)
        flow.switch(True)
        for worker in self.slots:
            self._later(0.0, lambda worker=worker: self._work(worker))
        self._later(0.0, self._train)
        self._later(1.0, self._tick)
        if restart_at is not None:
            self._later(restart_at, self._restart)
        while self.version < steps:
            at, _, event = heapq.heappop(self._events)
            assert at < end, f"no progress: {self.version} of {steps} versions after {seconds} s"
            self.desk.clock.now = max(at, self.desk.clock.now)
            event()

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.desk.clock.now + seconds, next(self._count), event))

    def _tick(self) -> None:
        self.desk.flow.tick()
        for url, version in self.serving.items():  # followers renew what they announced
            if self.desk.flow.engines.by_url.get(url, None) is not None:
                self.desk.engine(self.desk.flow.engines.by_url[url].version, url, url)
            elif self.random.random() < 0.5:
                self.desk.engine(version, url, url)
        self._later(1.0, self._tick)

    def _restart(self) -> None:
        self.desk.reopen()

    def _work(self, worker: str) -> None:
        leases = self.desk.flow.lease(worker, self.slots[worker]) if self.slots[worker] else []
        self.desk.flow.heartbeat(worker)
        self.slots[worker] -= len(leases)
        self.most_in_flight = max(self.most_in_flight, len(self.desk.flow.training))
        for lease in leases:
            long = self.random.random() < self.slow
            seconds = self.random.uniform(30, 60) if long else self.random.uniform(0.1, 3.0)
            # The engine may have swapped since it acknowledged the version, and swaps again while it samples.
            oldest = self.serving.get(lease.engine, lease.version)
            lost = self.random.random() < self.dies
            self._later(seconds, partial(self._hand_in, worker, lease, oldest, lost))
        self._later(self.random.uniform(0.05, 0.5), lambda: self._work(worker))

    def _hand_in(self, worker: str, lease: Lease, oldest: int, lost: bool) -> None:
        self.slots[worker] += 1
        if lost:
            return
        draw = random.Random(lease.group)  # equal rewards are a property of the task
        flat = draw.random() < self.flat
        infra = self.random.random() < 0.02
        receipt = answer(
            lease,
            worker,
            reward=1.0 if flat else float(self.random.random() < 0.5),
            outcome=Outcome.INFRA if infra else Outcome.SCORED,
            oldest_version=oldest,
            newest_version=max(oldest, self.serving.get(lease.engine, oldest)),
        )
        self.desk.flow.receive(receipt)
        if self.random.random() < 0.1:
            assert not self.desk.flow.receive(receipt)

    def _train(self) -> None:
        batch = self.desk.batch(self.version)
        if batch is None:
            self._later(0.3, self._train)
            return
        again = self.desk.batch(self.version)
        assert batch == again
        bound = self.desk.config.rollouts.max_staleness
        assert all(0 <= age(batch.version, item.oldest_version) <= bound for item in batch.items), batch.staleness
        self.batches.append(batch)
        self._later(self.random.uniform(0.5, 5.0), self._publish)

    def _publish(self) -> None:
        version = self.version + 1
        for url in self.serving:
            self._later(self.random.uniform(0.0, 8.0), lambda url=url: self._swap(url, version))
        self._later(self.random.uniform(0.0, 3.0), lambda: self._commit(version))

    def _swap(self, url: str, version: int) -> None:
        if version > self.serving[url]:
            self.serving[url] = version
            self._later(self.random.uniform(0.0, 1.0), lambda: self._acknowledge(url, version))

    def _acknowledge(self, url: str, version: int) -> None:
        if self.serving[url] == version:
            self.desk.engine(version, url, url)

    def _commit(self, version: int) -> None:
        self.desk.commit(version - 1)
        self.version = version
        self._train()
