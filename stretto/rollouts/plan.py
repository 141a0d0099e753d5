"""What to lease to a worker that asks: evaluations first, then members that open groups still lack, then new groups.

Members of one group go out together as far as the worker's slots allow, all to one engine, the least loaded one that is
fit. The version a lease is pinned to is the one its engine has acknowledged. Pure: nothing changes until `flow.py` has
written the plan to the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from stretto.records import EngineStatus
from stretto.rollouts.engines import Engines
from stretto.rollouts.groups import Grant, Group
from stretto.rollouts.leases import Leases

Fit = Callable[[EngineStatus], bool]


class Plan:
    """Leases for one request, gathered one by one; `slots` is what the worker still has free. Engines in `held` (URLs)
    get nothing."""

    def __init__(
        self, worker: str, slots: int, engines: Engines, leases: Leases, held: Collection[str], now: float
    ) -> None:
        self.worker = worker
        self.slots = slots
        self.grants: list[Grant] = []
        self.opened: list[Group] = []
        self._engines = engines
        self._held = held
        self._load = Counter({url: leases.load(url) for url in engines.by_url})
        self._alone = all(name == worker for name in leases.heard)
        self._deadline = now + leases.seconds

    def fill(self, group: Group, fit: Fit) -> None:
        """Lease members of an open group that wait."""
        if not group.waits or self.slots <= 0:
            return
        members = [member for member in group.waiting if not self._avoids(group, member)][: self.slots]
        engine = self._choose(fit, prefer=group.engine) if members else None
        if engine is not None:
            self._grant(group, members, engine)

    def open(self, new: Callable[[], Group], fit: Fit) -> bool:
        """Start a new group on the least loaded fit engine; False when there is no slot or no such engine."""
        engine = self._choose(fit) if self.slots > 0 else None
        if engine is None:
            return False
        group = new()
        self.opened.append(group)
        self._grant(group, group.waiting[: self.slots], engine)
        return True

    def _choose(self, fit: Fit, prefer: str = "") -> EngineStatus | None:
        return self._engines.choose(lambda e: e.url not in self._held and fit(e), self._load.__getitem__, prefer)

    def _grant(self, group: Group, members: list[int], engine: EngineStatus) -> None:
        for member in members:
            rollout, attempt = group.next_rollout(member)
            where = (self.worker, engine.url, engine.version)
            self.grants.append(Grant(rollout, group.id, member, attempt, *where, self._deadline))
        self._load[engine.url] += len(members)
        self.slots -= len(members)

    def _avoids(self, group: Group, member: int) -> bool:
        """A lease that failed with this worker goes to another one, if there is any."""
        slot = group.slots[member]
        return slot.unanswered + slot.failed > 0 and slot.worker == self.worker and not self._alone
