"""The prompt stream: ordinal -> task. Ordinal n is the n-th group of the run, for ever.

Each epoch visits every task once, in an order that depends on nothing but the seed, the epoch and the tasks' ids, so
the stream resumes from an ordinal alone and needs no state of its own. Tasks of a mixture (tasks/mixture.py) come in
its proportions instead, by the same rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.records import Task
from stretto.rollouts.seeds import derive
from stretto.tasks.mixture import Mixture, Order

Tasks = Callable[[str], Sequence[Task]]
"""The tasks of a split, in any order."""


def from_folder(run_dir: Path) -> Tasks:
    """Tasks of `run_dir/tasks/<split>`; raises ValueError for a split that is missing or empty."""
    from stretto.tasks.folder import read_all

    def load(split: str) -> Sequence[Task]:
        folder = run_dir / "tasks" / split
        if not folder.is_dir():
            there = sorted(path.name for path in (run_dir / "tasks").glob("*") if path.is_dir())
            raise ValueError(f"no tasks for split {split!r}: {folder} does not exist (there are: {', '.join(there)})")
        return read_all(folder)

    return load


class Prompts:
    """Ordinals to tasks; also finds a task of the split by its id."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.by_id = {task.id: task for task in tasks}
        if not tasks:
            raise ValueError("the split holds no tasks: nothing to roll out")
        if len(self.by_id) != len(tasks):
            raise ValueError("two tasks of one split have the same id: ids must be unique within a source")
        self.seed = seed
        self.mixture = Mixture.of(tasks)
        self._turns = Order(seed, self.mixture) if self.mixture else None
        self._epoch = -1
        self._order: list[str] = []

    def task(self, ordinal: int) -> Task:
        if self._turns:
            return self.by_id[self._turns.task(ordinal)]
        epoch, place = divmod(ordinal, len(self.by_id))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.order(epoch)
        return self.by_id[self._order[place]]

    def order(self, epoch: int) -> list[str]:
        """Ids in the order of one epoch."""
        return sorted(self.by_id, key=lambda id: (derive(self.seed, "order", epoch, id), id))

    def first(self, count: int | None) -> list[str]:
        """A fixed sample of `count` ids (all when None): the same at every version, and a prefix of larger samples."""
        return self.order(0)[:count]

    def fingerprint(self) -> str:
        """Changes when the set of tasks does, and with it the meaning of ordinals."""
        asked = f"\n{self.mixture}" if self.mixture else ""
        return hashlib.blake2b(("\n".join(sorted(self.by_id)) + asked).encode(), digest_size=16).hexdigest()
