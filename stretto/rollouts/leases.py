"""Leases that are out: who owes which rollout, on which engine, until when. Pure bookkeeping, no clock of its own.

A worker is silent when nothing was heard of it for `SILENCE_SECONDS` (it leases, answers or sends a heartbeat more
often than that); its leases then lapse before their deadline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from stretto.config import Config
from stretto.records import Lease, Outcome, Receipt, Sampling, Task
from stretto.rollouts.groups import Evaluation, Grant, Group
from stretto.rollouts.seeds import derive

SILENCE_SECONDS = 20.0
RECALL_SECONDS = 5.0
"""For so long after a restart nothing is taken for lost: what was answered just before may still be on its way."""


class Leases:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds  # from grant to deadline
        self.out: dict[str, Grant] = {}
        self.by_worker: dict[str, set[str]] = defaultdict(set)
        self.by_engine: dict[str, set[str]] = defaultdict(set)
        self.heard: dict[str, float] = {}  # worker -> unix seconds

    def hear(self, worker: str, now: float) -> None:
        self.heard[worker] = now

    def add(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            self.out[grant.rollout] = grant
            self.by_worker[grant.worker].add(grant.rollout)
            self.by_engine[grant.engine].add(grant.rollout)

    def remove(self, rollout: str) -> Grant | None:
        grant = self.out.pop(rollout, None)
        if grant is not None:
            self.by_worker[grant.worker].discard(rollout)
            self.by_engine[grant.engine].discard(rollout)
        return grant

    def move(self, grant: Grant, engine: str) -> None:
        """A rollout goes on at another engine."""
        self.by_engine[grant.engine].discard(grant.rollout)
        grant.engine = engine
        self.by_engine[engine].add(grant.rollout)

    def load(self, engine: str) -> int:
        """Rollouts in flight on an engine."""
        return len(self.by_engine[engine])

    def overdue(self, now: float) -> list[Grant]:
        """Leases past their deadline. Every lease gets the same time, so the oldest come first."""
        late = []
        for grant in self.out.values():
            if grant.deadline > now:
                break
            late.append(grant)
        return late

    def silent(self, now: float) -> list[str]:
        """Workers that were not heard of for too long; they are forgotten until they speak again."""
        names = [worker for worker, heard in self.heard.items() if now - heard > SILENCE_SECONDS]
        for worker in names:
            del self.heard[worker]
        return names

    def of_worker(self, worker: str) -> list[Grant]:
        return [self.out[rollout] for rollout in sorted(self.by_worker[worker])]

    def missing(self, worker: str, known: Collection[str]) -> list[Grant]:
        """Leases of a worker that are not among those it knows of."""
        return [self.out[rollout] for rollout in sorted(self.by_worker[worker].difference(known))]

    def forgive(self, seconds: float) -> None:
        """This process stood still for a while: do not count that as the workers' silence."""
        for worker in self.heard:
            self.heard[worker] += seconds


def lease(grant: Grant, group: Group, asked: Evaluation | None, task: Task, config: Config) -> Lease:
    """What goes out to the worker. The seed follows from the place in the run, not from the attempt: whoever plays it
    draws the same; an evaluation draws the same at every version."""
    rollouts, seed = config.rollouts, config.run.seed
    if asked is None:
        draw = derive(seed, "sampling", group.ordinal, grant.member)
        sampling = Sampling(temperature=rollouts.temperature, top_p=rollouts.top_p, top_k=rollouts.top_k, seed=draw)
    else:
        draw = derive(seed, "evaluation", group.task, grant.member)
        sampling = Sampling(temperature=asked.temperature, seed=draw)
    return Lease(
        rollout=grant.rollout,
        group=group.id,
        purpose=group.purpose,
        task=task,
        sampling=sampling,
        engine=grant.engine,
        version=grant.version,
        deadline=grant.deadline,
    )


def given_up(grant: Grant, purpose: str, reason: str) -> Receipt:
    """The receipt nobody wrote: ends a slot whose leases were not answered. There is no payload."""
    return Receipt(
        rollout=grant.rollout,
        group=grant.group,
        purpose=purpose,
        worker=grant.worker,
        outcome=Outcome.INFRA,
        reward=0.0,
        solved=False,
        key="",
        oldest_version=grant.version,
        newest_version=grant.version,
        tokens=0,
        sampled=0,
        turns=0,
        seconds=0.0,
        engine=grant.engine,
        reason=reason,
    )
