"""Evaluations: fixed lists of tasks, each attempted a few times, beside training and never trained.

Their leases go first, on engines that serve the version asked for or a later one. Attempts that ended as `infra` say
nothing about the policy: they are tried again, and if that fails left out of `valid` and of every mean.
Numbers over the counts are in `watch/statistics.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from stretto.records import Outcome, Receipt
from stretto.rollouts import recall
from stretto.rollouts.groups import Evaluation, Group, evaluation_group
from stretto.rollouts.ledger import Ledger
from stretto.rollouts.refusals import Conflict, Unknown
from stretto.watch.metrics import Metrics


class Tally:
    """Counts of one evaluation."""

    def __init__(self, asked: Evaluation, groups: Sequence[Group] = ()) -> None:
        self.asked = asked
        self.total = len(asked.tasks) * asked.attempts
        self.finished = 0
        self.solved = [0] * len(asked.tasks)
        self.valid = [0] * len(asked.tasks)
        self.outcomes: Counter[str] = Counter()
        self.newest_version = asked.version
        self._behaviour: dict[str, list[float]] = {}  # name -> [sum, count]
        for group in groups:
            for receipt in group.receipts:
                self.add(group, receipt)

    def add(self, group: Group, receipt: Receipt) -> None:
        self.finished += 1
        self.outcomes[receipt.outcome.value] += 1
        if receipt.outcome is Outcome.INFRA:
            return
        self.valid[group.ordinal] += 1
        self.solved[group.ordinal] += receipt.solved
        self.newest_version = max(self.newest_version, receipt.newest_version)
        for name, value in receipt.behaviour.items():
            sums = self._behaviour.setdefault(name, [0.0, 0])
            sums[0] += value
            sums[1] += 1

    @property
    def done(self) -> bool:
        return self.finished == self.total

    def result(self) -> dict[str, Any]:
        """Values of the `eval` metric."""
        asked = self.asked
        return {
            "name": asked.name,
            "split": asked.split,
            "version": asked.version,
            "newest_version": self.newest_version,  # later when weights were swapped meanwhile
            "temperature": asked.temperature,
            "tasks": len(asked.tasks),
            "ids": asked.tasks,
            "attempts": asked.attempts,
            "solved": self.solved,
            "valid": self.valid,
            "behaviour": {name: total / count for name, (total, count) in sorted(self._behaviour.items())},
            "outcomes": dict(self.outcomes),
        }


class Evaluations:
    """Those that are not done, with their groups; the others are read from the ledger when somebody asks."""

    def __init__(self, ledger: Ledger, metrics: Metrics, live: Sequence[Group]) -> None:
        self._ledger, self._metrics = ledger, metrics
        self.groups = {group.id: group for group in live if group.evaluation is not None}
        self.tallies = {
            asked.id: Tally(asked, [group for group in live if group.evaluation == asked.id])
            for asked in recall.evaluations(ledger, finished=False)
        }

    def ask(self, name: str, split: str, tasks: Sequence[str], attempts: int, temperature: float, version: int) -> str:
        """The id. The same request again, at the same version or before the first is done, is the same evaluation.
        Raises ValueError, and Conflict when the name is taken by another request."""
        if not tasks or attempts < 1 or temperature < 0:
            raise ValueError("an evaluation needs a task and an attempt at least, and a temperature of 0 or more")
        what = (split, list(tasks), attempts, temperature)
        ledger = self._ledger
        for known in recall.evaluations(ledger, finished=False) + recall.evaluations(ledger, finished=True):
            if known.name != name or (known.version != version and known.id not in self.tallies):
                continue
            if (known.split, known.tasks, known.attempts, known.temperature) != what:
                raise Conflict(f"evaluation {name!r} exists with other tasks, attempts or temperature; rename this one")
            return known.id
        asked = Evaluation(f"{name}.v{version}", name, split, version, attempts, temperature, list(tasks))
        groups = [evaluation_group(asked, place) for place in range(len(tasks))]
        with ledger.transaction():
            ledger.evaluate(asked)
            ledger.open(groups)
        self.tallies[asked.id] = Tally(asked)
        self.groups.update((group.id, group) for group in groups)
        return asked.id

    def of(self, group: Group) -> Evaluation:
        assert group.evaluation is not None
        return self.tallies[group.evaluation].asked

    def add(self, group: Group, receipt: Receipt) -> None:
        assert group.evaluation is not None
        self.tallies[group.evaluation].add(group, receipt)

    def end_finished(self) -> None:
        """Log and close those that are done. A crash in between repeats the metric rather than losing it."""
        for id, tally in list(self.tallies.items()):
            if tally.done:
                self._metrics.log("eval", **tally.result())
                self._ledger.evaluated(id)
                del self.tallies[id]
                self.groups = {key: group for key, group in self.groups.items() if group.evaluation != id}

    def progress(self, id: str) -> dict[str, Any]:
        """What `GET /evaluate/ID` answers. Raises Unknown."""
        tally = self.tallies.get(id)
        if tally is None:
            asked = recall.evaluation(self._ledger, id)
            if asked is None:
                raise Unknown(f"no evaluation {id!r} was asked for in this run")
            tally = Tally(asked, recall.evaluation_groups(self._ledger, id))
        return {"id": id, "done": tally.done, "finished": tally.finished, "total": tally.total, **tally.result()}
