"""The flow of rollouts: what the orchestrator answers to workers, followers, trainer and launcher, without HTTP.

    lease ──▶ receipt ──▶ (group finished) ──▶ batch ──▶ trained
      ▲  └─lapse─┘                               │          │
      └───────────── admission: next step ◀──────┴─ version ┘

One thread, no waiting, the clock is given. What a lease or a group goes through is `lifecycle.py`; what is leased to
whom is planned by `plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.records import EngineStatus, Lease, Trained, encode
from stretto.rollouts import batches, recall
from stretto.rollouts.groups import TRAIN, Grant, Group, training_group
from stretto.rollouts.handover import Call
from stretto.rollouts.leases import RECALL_SECONDS, lease
from stretto.rollouts.lifecycle import Lifecycle
from stretto.rollouts.plan import Plan
from stretto.rollouts.refusals import Conflict, Unknown
from stretto.rollouts.staleness import fits


class Flow(Lifecycle):
    """All requests. Raises Conflict, Unknown and ValueError with a sentence for those that are refused."""

    # Leases

    def lease(self, worker: str, slots: int, call: Call | None = None) -> list[Lease]:
        """At most `slots` leases for a worker; empty when there is nothing for it now. A request that was answered
        before (`call` tells) gets the same again. Raises Conflict when it is of a worker that was replaced."""
        now = self.clock()
        if call is not None:
            self._meet(worker, call)
            given = self.handover.answer(worker, call)
            if given is not None:
                return [self._lease(self.leases.out[rollout]) for rollout in given if rollout in self.leases.out]
        self.leases.hear(worker, now)
        plan = Plan(worker, slots, self.engines, self.leases, self.brake.held(now) | self.engines.doubted(now), now)
        for group in self.evaluations.groups.values():
            asked = self.evaluations.of(group)
            if asked.split in self.prompts:
                plan.fill(group, lambda engine, asked=asked: engine.version >= asked.version)
        if self.flowing and TRAIN in self.prompts:
            for group in self._short_of_leases():
                plan.fill(group, lambda engine, group=group: self._may_continue(group, engine))
            self._open_groups(plan)
        if not plan.grants:
            return []
        with self.ledger.transaction():
            self.ledger.open(plan.opened)
            self.ledger.lease(plan.grants)
        self.next_ordinal += len(plan.opened)
        self.training.update((group.id, group) for group in plan.opened)
        self._waiting.update(group.id for group in plan.opened)
        for grant in plan.grants:
            self._group(grant.group).leased(grant)
        self.leases.add(plan.grants)
        if call is not None:
            self.handover.gave(worker, [grant.rollout for grant in plan.grants])
        self.progress = now
        return [self._lease(grant) for grant in plan.grants]

    def _short_of_leases(self) -> list[Group]:
        """Training groups with members that wait, in the order they were opened in."""
        groups = [self.training[id] for id in self._waiting if id in self.training and self.training[id].waits]
        self._waiting = {group.id for group in groups}
        return sorted(groups, key=lambda group: group.ordinal)

    def capacity(self, version: int) -> int:
        """Training groups that may start on an engine that serves `version`."""
        live = self.training.values()
        flat = bool(live) and all(group.finished and not group.signal for group in live)
        return self.admission.capacity(version, self.next_step, len(live), flat, self.version)

    def _open_groups(self, plan: Plan) -> None:
        room = {version: self.capacity(version) for version in {e.version for e in self.engines.by_url.values()}}
        bound = self.admission.max_staleness

        def fit(engine: EngineStatus) -> bool:
            return fits(self.next_step, engine.version, bound) and room[engine.version] > len(plan.opened)

        def new() -> Group:
            ordinal = self.next_ordinal + len(plan.opened)
            task = self.prompts[TRAIN].task(ordinal)
            return training_group(ordinal, task.id, self.config.rollouts.group_size, self.clock())

        while plan.open(new, fit):
            pass

    def _may_continue(self, group: Group, engine: EngineStatus) -> bool:
        """An open group's other members may run on a newer version, never on one that makes the group older."""
        oldest = group.oldest_version
        least = self.next_step - self.admission.max_staleness
        return engine.version >= (least if oldest is None else max(least, oldest))

    def _lease(self, grant: Grant) -> Lease:
        group = self._group(grant.group)
        asked = None if group.evaluation is None else self.evaluations.of(group)
        split = TRAIN if asked is None else asked.split
        return lease(grant, group, asked, self.prompts[split].by_id[group.task], self.config)

    def _meet(self, worker: str, call: Call) -> None:
        if self.handover.meets(worker, call):
            self._lapse(self.leases.of_worker(worker), "worker started anew")

    def heartbeat(self, worker: str, holds: Sequence[str] = (), call: Call | None = None) -> list[str]:
        """`holds` are all rollouts a worker is at: others leased to it lapse, unless it may not know of them yet.
        Returns those of them that nobody waits for any more. Without a `call` it only says that the worker lives."""
        now = self.clock()
        if call is not None:
            self._meet(worker, call)
        self.leases.hear(worker, now)
        unheard = None if call is None else self.handover.on_their_way(worker, call)
        if unheard is not None and now - self.opened > RECALL_SECONDS:
            self._lapse(self.leases.missing(worker, {*holds, *unheard}), "not held")
        return [rollout for rollout in holds if rollout not in self.leases.out and not self._may_count(rollout)]

    def _may_count(self, rollout: str) -> bool:
        """Would an answer to a lease that is not out be the first of its slot?"""
        grant = recall.grant_of(self.ledger, rollout)
        group = None if grant is None else self.training.get(grant.group) or self.evaluations.groups.get(grant.group)
        return grant is not None and group is not None and not group.short and not group.slots[grant.member].receipt

    def worker_left(self, worker: str) -> None:
        """Somebody knows that this worker is dead: its leases go to others at once."""
        self.leases.heard.pop(worker, None)
        self.handover.forget(worker)
        self._lapse(self.leases.of_worker(worker), "worker died")

    def move(self, rollout: str, engine: str) -> str | None:
        """The URL of an engine at which a rollout may go on whose `engine` failed; None while there is none: ask again.
        Raises Unknown when nobody waits for the rollout any more."""
        grant = self.leases.out.get(rollout)
        if grant is None:
            raise Unknown(f"nobody waits for rollout {rollout!r}")
        now = self.clock()
        if grant.engine != engine and grant.engine in self.engines.by_url:  # asked before, and the answer was lost
            return grant.engine
        group = self._group(grant.group)

        def fit(status: EngineStatus) -> bool:
            if status.url in shunned:
                return False
            if group.evaluation is not None:
                return status.version >= self.evaluations.of(group).version
            return self._may_continue(group, status)

        shunned = self.brake.held(now) | self.engines.doubted(now)
        found = self.engines.choose(fit, self.leases.load)
        if found is None:
            return None
        if found.url != grant.engine:
            self.ledger.move(rollout, found.url)
            self.leases.move(grant, found.url)
        return found.url

    def hear_trainer(self) -> None:
        self.trainer_heard = self.clock()

    def engine_failed(self, url: str, worker: str, rollout: str) -> None:
        """A worker says so: the engine gets nothing more until its follower has looked at it."""
        now = self.clock()
        if url in self.engines.by_url and url not in self.engines.doubted(now):
            self.event(
                f"engine {url} failed {rollout} of {worker}; what it was at goes on elsewhere, or when it is back"
            )
        self.engines.doubt(url, now)

    # Steps

    def batch(self, version: int) -> bytes | None:
        """The encoded batch for the step that updates `version`; None when it is not ready. Raises Conflict."""
        if version < self.next_step:
            record = recall.batch_record(self.ledger, version)
            if record is None:
                raise Conflict(f"batch {version} was never cut in this run; the next one is {self.next_step}")
            return record
        if version > self.next_step:
            raise Conflict(f"batch {version} cannot be cut before batch {self.next_step}")
        self._drop(batches.stale(list(self._ready.values()), version, self.admission.max_staleness), "stale")
        if len(self._ready) < self.admission.groups_per_step:
            return None
        chosen = batches.choose(list(self.training.values()), version, self.admission)
        if chosen is None:
            return None
        run, control, estimator = self.config.run, self.config.grading.control, self.config.trainer.advantage
        batch = batches.build(run.name, version, chosen, run.seed, control, estimator)
        self.ledger.cut(batch, chosen)
        for group in chosen:
            del self.training[group.id], self._ready[group.id]
        self.next_step = version + 1
        self.fates["batched"] += len(chosen)
        self.steps.append((batch.solve_rate, batch.staleness))
        self._moved()
        if not batch.items:
            self.event(f"batch {version} is empty: all of its {batch.groups} groups have equal rewards")
        return encode(batch)

    def trained(self, trained: Trained) -> None:
        """Commit a batch. A repeat is a no-op. Raises ValueError, Conflict."""
        if trained.version != trained.batch + 1:
            raise ValueError(f"batch {trained.batch} makes version {trained.batch + 1}, not {trained.version}")
        if trained.version == self.version:
            return
        if trained.batch != self.version or trained.batch >= self.next_step:
            raise Conflict(
                f"batch {trained.batch} cannot be committed: the current version is {self.version} and "
                f"{self.next_step} batches are cut"
            )
        self._set_version(trained.version, "trained", self.chain)

    def set_version(self, version: int, chain: str) -> None:
        """Where training starts or goes on. Batches that were cut from here on are served again, unchanged."""
        if version < 0:
            raise ValueError(f"version is {version}: the first one is 0")
        if (version, chain) != (self.version, self.chain):
            self._set_version(version, "set", chain)
            self.next_step = max(recall.batches_cut(self.ledger), version)

    def _set_version(self, version: int, cause: str, chain: str) -> None:
        self.ledger.version(version, cause, chain)
        self.version, self.chain = version, chain
        self._moved()

    def switch(self, flowing: bool) -> None:
        """Start or pause training leases."""
        if flowing != self.flowing:
            self.ledger.switch(flowing)
            self.flowing = flowing
            self._moved()

    # Engines

    def engine(self, status: EngineStatus) -> None:
        if status.version < 0 or "://" not in status.url:
            raise ValueError(
                f"engine {status.url!r} of {status.cluster!r} with version {status.version}: give the URL it is "
                f"reached at, and a version of 0 or more"
            )
        if self.engines.put(status, self.clock()):
            self._moved()

    # Evaluations

    def evaluate(self, name: str, split: str, tasks: int | None, attempts: int, temperature: float) -> str:
        """Ask for an evaluation of the first `tasks` tasks (None: all) of a split whose tasks were given; its id."""
        ids = self.prompts[split].first(tasks)
        id = self.evaluations.ask(name, split, ids, attempts, temperature, self.version or 0)
        self._moved()
        return id
