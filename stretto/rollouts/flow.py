"""The flow of rollouts: every decision of the orchestrator, without HTTP. One thread, no waiting, the clock is given.

    lease ──▶ receipt ──▶ (group finished) ──▶ batch ──▶ trained
      ▲  └─lapse─┘                               │          │
      └───────────── admission: next step ◀──────┴─ version ┘

Each method first writes its transition to the ledger and then applies it to the live state; `Flow(...)` on the same
ledger finds the same state again. Leases stay out over a restart: workers that lived on answer them, and the heartbeats
of the others say that they hold nothing, or do not come.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stretto.config import Config
from stretto.records import EngineStatus, Lease, Outcome, Receipt, Task, Trained, encode
from stretto.rollouts import batches, recall
from stretto.rollouts.admission import Admission
from stretto.rollouts.brake import Brake
from stretto.rollouts.engines import Engines
from stretto.rollouts.evaluate import Evaluations
from stretto.rollouts.groups import INFRA, MAX_UNANSWERED, TRAIN, Grant, Group, training_group
from stretto.rollouts.leases import Leases, given_up, lease
from stretto.rollouts.ledger import Ledger
from stretto.rollouts.plan import Plan
from stretto.rollouts.refusals import Conflict, Unknown, checked
from stretto.rollouts.source import Prompts
from stretto.rollouts.staleness import fits
from stretto.watch.metrics import Metrics


class Flow:
    def __init__(
        self, config: Config, ledger: Ledger, metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self.config, self.ledger, self.metrics, self.clock = config, ledger, metrics, clock
        rollouts = config.rollouts
        lead = None if rollouts.lead == "bound" else rollouts.lead
        self.admission = Admission(rollouts.max_staleness, rollouts.groups_per_step, lead)
        self.engines = Engines()
        self.leases = Leases(rollouts.deadline_seconds)
        self.brake = Brake(rollouts.group_size)
        self._held: set[str] = set()  # engines held at the last tick
        self.prompts: dict[str, Prompts] = {}  # by split; groups wait until the tasks of their split are here
        self.ended: deque[float] = deque(maxlen=4096)  # when rollouts ended
        self.progress = clock()  # when something last moved
        self.trainer_heard: float | None = None  # when the trainer last asked or said something
        self.news = 0  # counts the changes after which a request that had to wait may have an answer
        self._recall()

    def _recall(self) -> None:
        ledger = self.ledger
        self.version, self.chain = recall.current_version(ledger)
        self.next_step = max(recall.batches_cut(ledger), self.version or 0)
        self.next_ordinal = recall.next_ordinal(ledger)
        self.flowing = recall.flowing(ledger)
        self.steps = deque(recall.last_steps(ledger, 4), maxlen=4)
        self.recent = deque(recall.recent_keys(ledger, 16), maxlen=16)
        self.fates = Counter(recall.fates(ledger))
        groups = recall.live_groups(ledger)
        self.training = {group.id: group for group in groups if group.evaluation is None}
        self._waiting = set(self.training)  # all training groups with members that wait, and some others
        self._ready: dict[str, Group] = {}  # training groups that are finished
        self.evaluations = Evaluations(ledger, self.metrics, groups)
        self.leases.add(recall.leases_out(ledger, groups))
        for worker in self.leases.by_worker:
            self.leases.hear(worker, self.clock())  # the benefit of the doubt
        for group in groups:
            self._settle(group)

    # Tasks

    @property
    def splits_needed(self) -> set[str]:
        """Splits whose tasks the live state refers to and that were not given yet."""
        needed = {tally.asked.split for tally in self.evaluations.tallies.values()}
        if self.flowing or self.training:
            needed.add(TRAIN)
        return needed - set(self.prompts)

    def give_tasks(self, split: str, tasks: Sequence[Task]) -> None:
        """Raises LedgerError when the training tasks are not those the ledger's ordinals refer to."""
        prompts = Prompts(tasks, self.config.run.seed)
        if split == TRAIN:
            sentence = (
                "the training tasks or run.seed differ from those this run began with, so that its prompt order would "
                "change: restore them, or start a new run"
            )
            self.ledger.pin("train tasks", f"{self.config.run.seed} {prompts.fingerprint()}", sentence)
        self.prompts[split] = prompts

    # Leases

    def lease(self, worker: str, slots: int) -> list[Lease]:
        """At most `slots` leases for a worker; empty when there is nothing for it now."""
        now = self.clock()
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

    def heartbeat(self, worker: str, holds: Sequence[str] | None = None) -> list[str]:
        """`holds`, when a worker says it, are all rollouts it is at: others leased to it lapse. Returns those of them
        that nobody waits for any more."""
        now = self.clock()
        self.leases.hear(worker, now)
        if holds is None:
            return []
        self._lapse(self.leases.unknown_to(worker, set(holds), now), "not held")
        return [rollout for rollout in holds if rollout not in self.leases.out and not self._may_count(rollout)]

    def _may_count(self, rollout: str) -> bool:
        """Would an answer to a lease that is not out be the first of its slot?"""
        grant = recall.grant_of(self.ledger, rollout)
        group = None if grant is None else self.training.get(grant.group) or self.evaluations.groups.get(grant.group)
        return grant is not None and group is not None and not group.short and not group.slots[grant.member].receipt

    def worker_left(self, worker: str) -> None:
        """Somebody knows that this worker is dead: its leases go to others at once."""
        self.leases.heard.pop(worker, None)
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

    def _lapse(self, grants: Iterable[Grant], reason: str) -> None:
        grants = list(grants)
        if not grants:
            return
        self.ledger.lapse([grant.rollout for grant in grants], reason)
        self.news += 1
        hopeless = []
        for grant in grants:
            self.leases.remove(grant.rollout)
            group = self._group(grant.group)
            group.lapsed(grant.member, reason)
            self._waiting.add(group.id)
            if group.hopeless(grant.member):
                hopeless.append(grant)
        if reason != INFRA:
            who = sorted({f"{grant.worker} (engine {grant.engine})" for grant in grants})
            names = ", ".join(grant.rollout for grant in grants[:3]) + (", …" if len(grants) > 3 else "")
            self.event(f"{len(grants)} leases of {', '.join(who)} lapsed ({reason}) and are given again: {names}")
        for grant in hopeless:
            self._give_up(grant)

    def _give_up(self, grant: Grant) -> None:
        group = self._group(grant.group)
        unanswered = group.slots[grant.member].unanswered >= MAX_UNANSWERED
        how = f"{MAX_UNANSWERED} leases went unanswered" if unanswered else "every attempt ended as infra"
        reason = f"{how}, the last one by {grant.worker}"
        receipt = given_up(grant, group.purpose, reason)
        if self.ledger.receive(receipt, grant.member):
            self._note(group, receipt)
            self._close(group, grant.member, receipt)

    # Receipts

    def receive_all(self, receipts: Sequence[Receipt]) -> list[str]:
        """Several receipts in one transaction; those of them (ids) that no lease was ever given for. Raises ValueError
        for the first malformed one, after the others are received."""
        unknown, malformed = [], None
        with self.ledger.transaction():
            for receipt in receipts:
                try:
                    self.receive(receipt)
                except Unknown:
                    unknown.append(receipt.rollout)
                except ValueError as error:
                    malformed = malformed or error
        if malformed is not None:
            raise malformed
        return unknown

    def receive(self, receipt: Receipt) -> bool:
        """False for a repeat, or an answer to a slot that another worker has answered. Raises Unknown, ValueError."""
        now = self.clock()
        grant = self.leases.out.get(receipt.rollout) or recall.grant_of(self.ledger, receipt.rollout)
        if grant is None:
            raise Unknown(f"no rollout {receipt.rollout!r} was ever leased by this run")
        receipt = checked(receipt, grant)
        self.leases.hear(receipt.worker, now)
        group = self.training.get(grant.group) or self.evaluations.groups.get(grant.group)
        if group is None or group.short or group.slots[grant.member].receipt is not None:
            return False
        if receipt.outcome is Outcome.INFRA:  # says nothing about the policy: try again
            if group.slots[grant.member].lease != receipt.rollout:
                return False
            if not group.last_try(grant.member):
                self._note(group, receipt)
                self._lapse([grant], INFRA)
                return True
        if not self.ledger.receive(receipt, grant.member):
            return False
        self._note(group, receipt)
        self._close(group, grant.member, receipt)
        self.ended.append(now)
        self.recent.append(receipt.key)
        self.progress = now
        return True

    def _close(self, group: Group, member: int, receipt: Receipt) -> None:
        out = group.slots[member].lease
        if out is not None:
            self.leases.remove(out)
        group.closed(member, receipt)
        if group.evaluation is not None:
            self.evaluations.add(group, receipt)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """What follows from a group being finished."""
        if not group.finished:
            return
        self.news += 1
        if group.evaluation is not None:
            self.evaluations.end_finished()
            return
        self._ready[group.id] = group
        if len(group.survivors) < self.config.rollouts.min_group:
            self._drop([group], "deadline" if group.short else INFRA)

    def _drop(self, groups: Sequence[Group], reason: str) -> None:
        if not groups:
            return
        self.ledger.drop(groups, reason)
        self.news += 1
        for group in groups:
            del self.training[group.id]
            self._ready.pop(group.id, None)
        self.fates[f"dropped:{reason}"] += len(groups)
        lengths = [receipt.tokens for group in groups for receipt in group.receipts]
        tokens = f"; what they had is {min(lengths)} to {max(lengths)} tokens long" if lengths else ""
        self.event(f"dropped as {reason}: groups {', '.join(group.id for group in groups)}{tokens}")

    def _note(self, group: Group, receipt: Receipt) -> None:
        self.metrics.log("rollout", task=group.task, **msgspec.structs.asdict(receipt))
        warning = self.brake.note(receipt, self.clock())
        if warning:
            self.event(warning)

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
        if self.engines.put(status, self.clock()):
            self._moved()

    def engine_left(self, url: str, why: str = "taken off") -> None:
        status = self.engines.remove(url)
        if status is not None:  # its rollouts ask for another engine when they miss it
            self.event(f"engine {url} of {status.cluster} left: {why}")
            self.news += 1

    # Evaluations

    def evaluate(self, name: str, split: str, tasks: int | None, attempts: int, temperature: float) -> str:
        """Ask for an evaluation of the first `tasks` tasks (None: all) of a split whose tasks were given; its id."""
        ids = self.prompts[split].first(tasks)
        id = self.evaluations.ask(name, split, ids, attempts, temperature, self.version or 0)
        self._moved()
        return id

    # Time

    def tick(self) -> None:
        """Let leases lapse whose deadline is over or whose worker or engine is silent. Call a few times a second."""
        now = self.clock()
        self._lapse(self.leases.overdue(now), "deadline")
        for worker in self.leases.silent(now):
            self._lapse(self.leases.of_worker(worker), "silent")
        for url in self.engines.silent(now):
            self.engine_left(url, "its follower is silent")
        self._cut_short(now)
        held = self.brake.held(now)
        if held != self._held:
            self._held = held
            self.news += 1

    def _cut_short(self, now: float) -> None:
        """A group whose time is over goes on with the members it has: one stuck rollout holds no step."""
        for group in list(self.training.values()):
            if now - group.opened < self.config.rollouts.group_seconds:
                break  # they lie in the order they were opened in
            if group.finished:
                continue
            out = [self.leases.out[slot.lease] for slot in group.slots if slot.lease is not None]
            with self.ledger.transaction():
                self.ledger.lapse([grant.rollout for grant in out], "group deadline")
                self.ledger.cut_short(group.id)
            for grant in out:
                self.leases.remove(grant.rollout)
                group.lapsed(grant.member, "group deadline")
            group.cut_short()
            who = ", ".join(f"{grant.rollout} by {grant.worker} (engine {grant.engine})" for grant in out)
            self.event(
                f"group {group.id} is cut at its deadline ({self.config.rollouts.group_seconds:g} s) with "
                f"{len(group.survivors)} of {len(group.slots)} members; not answered: {who or 'nobody had a lease'}"
            )
            self._settle(group)

    def _moved(self) -> None:
        self.progress = self.clock()
        self.news += 1

    def event(self, text: str) -> None:
        self.metrics.log("event", text=text)

    def _group(self, id: str) -> Group:
        return self.training.get(id) or self.evaluations.groups[id]
