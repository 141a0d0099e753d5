"""Admission: how many groups may start now, so that none is too old when its turn comes (AReaL, arXiv 2505.24298).

Work is paced, not discarded. Number the groups in the order in which batches take them: group n is trained by the
step that updates version n // groups_per_step. A group that starts at `version` is therefore young enough when

    n < (max_staleness + version + 1) * groups_per_step

and what is left of the right-hand side is the capacity. `n` counts whole steps for batches already cut (trained or
not, whatever number of groups they hold) plus the groups that are live: in flight or finished and not yet cut. Dropped
groups hold no place. All of it comes from the ledger, so a restart changes nothing.

The formula assumes that batches take groups in order, but a slow group lets younger ones overtake it. `overdue` is the
other half: a batch is not cut while that would leave more groups behind than later steps could train in time.

How far ahead is sampled is a knob of its own. With `lead` below the bound, groups start only for the `lead` steps after
the newest version there is: most tokens are fresher than they must be, the rest of the bound is time for stragglers.

Nothing is sampled for steps after the run's last one (`steps`): nobody would train it.

Left out on purpose: limits on load. How many rollouts run at once is the workers' `concurrency`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 4
"""A batch without any signal (all groups have equal rewards) collects up to this many times its size."""


@dataclass(frozen=True)
class Admission:
    """Pure arithmetic over counts of groups. At `max_staleness` 0 it is the synchronous loop.

    `max_staleness` bounds the age of a trained token, `lead` the steps that are sampled ahead (None: all of the bound),
    `steps` is the number of steps of the run (None: no end).
    """

    max_staleness: int
    groups_per_step: int
    lead: int | None = None
    steps: int | None = None

    def capacity(self, version: int, next_step: int, live: int, flat: bool = False, newest: int | None = None) -> int:
        """Groups that may start on an engine that serves `version`; may be negative.

        `next_step` is the version of the next batch to cut (batches below it are cut), `live` the groups in flight or
        finished but not cut, `flat` says that all of these are finished and none has signal: then one more step's worth
        may start, up to `ROUNDS` in all, because the batch waits for signal. The lead is counted from `newest`, the
        newest version there is (None: `version`).
        """
        limit = self.max_staleness + version
        if self.lead is not None:
            limit = min(limit, self.lead + max(version, version if newest is None else newest))
        if self.steps is not None:
            limit = min(limit, self.steps - 1)
        room = (limit + 1 - next_step) * self.groups_per_step - live
        if room <= 0 and flat and version == next_step and next_step <= limit:
            return min(self.groups_per_step, ROUNDS * self.groups_per_step - live)
        return room

    def overdue(self, next_step: int, last_steps: Sequence[int]) -> int | None:
        """Is there a step by which more of the live groups must be trained than fit into the batches until then?

        `last_steps` holds, for each live group, the last version whose update may train it (`staleness.last_step`).
        Returns the latest such step, or None. With as many as fit, oldest first meets every limit.
        """
        latest = None
        for count, step in enumerate(sorted(last_steps), start=1):
            if count > (step + 1 - next_step) * self.groups_per_step:
                latest = step
        return latest
