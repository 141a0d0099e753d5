"""What becomes of leases and groups: the live state of a run, and each transition of it. One thread, no waiting.

    lease ──▶ receipt ──▶ (group finished) ──▶ batched | dropped | evaluated
      ▲  └─lapse─┘              ▲
      └── given again           └── cut short at its deadline

Each method first writes its transition to the ledger and then applies it to the live state, so that the same ledger
gives the same state again. Leases stay out over a restart: workers that lived on answer them, and the heartbeats of the
others say that they hold nothing, or do not come. Who asks for what is `flow.py`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stretto.config import Config
from stretto.records import Outcome, Receipt, Task
from stretto.rollouts import recall
from stretto.rollouts.admission import Admission
from stretto.rollouts.brake import Brake
from stretto.rollouts.engines import Engines
from stretto.rollouts.evaluate import Evaluations
from stretto.rollouts.groups import INFRA, MAX_UNANSWERED, TRAIN, Grant, Group
from stretto.rollouts.handover import Handover
from stretto.rollouts.leases import Leases, given_up
from stretto.rollouts.ledger import Ledger
from stretto.rollouts.refusals import Unknown, checked
from stretto.rollouts.source import Prompts
from stretto.watch.metrics import Metrics


class Lifecycle:
    def __init__(
        self, config: Config, ledger: Ledger, metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self.config, self.ledger, self.metrics, self.clock = config, ledger, metrics, clock
        rollouts = config.rollouts
        lead = None if rollouts.lead == "bound" else rollouts.lead
        self.admission = Admission(rollouts.max_staleness, rollouts.groups_per_step, lead, config.trainer.steps)
        self.engines = Engines()
        self.leases = Leases(rollouts.deadline_seconds)
        self.handover = Handover()
        self.opened = clock()
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
        receipt = checked(receipt, grant, max(self.next_step, grant.version))
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

    # Engines

    def engine_left(self, url: str, why: str = "taken off") -> None:
        status = self.engines.remove(url)
        if status is not None:  # its rollouts ask for another engine when they miss it
            self.event(f"engine {url} of {status.cluster} left: {why}")
            self.news += 1

    # Time

    def tick(self) -> None:
        """Let leases lapse whose deadline is over or whose worker or engine is silent. Call a few times a second."""
        now = self.clock()
        self._lapse(self.leases.overdue(now), "deadline")
        for worker in self.leases.silent(now):
            self.handover.forget(worker)
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
