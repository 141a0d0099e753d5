"""A brake on failing infrastructure: an engine whose rollouts end as `infra` one after the other gets no leases for a
while, then for longer.

Without it a dead engine would draw everything (it is always the least loaded one), and each group that fails uses up a
prompt. When the fault lies elsewhere, in a sandbox say, all engines are held and the run waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.records import Outcome, Receipt

LONGEST_SECONDS = 30.0


@dataclass
class _Row:
    length: int = 0
    holds: int = 0
    until: float = 0.0  # unix seconds


class Brake:
    """`patience` infra outcomes in a row hold an engine, and after that each one that comes when a hold is over; any
    other outcome lets it go."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._rows: dict[str, _Row] = {}  # by engine

    def note(self, receipt: Receipt, now: float) -> str | None:
        """Count an outcome; a sentence when its engine is held (again)."""
        if receipt.outcome is not Outcome.INFRA:
            self._rows.pop(receipt.engine, None)
            return None
        row = self._rows.setdefault(receipt.engine, _Row())
        row.length += 1
        if row.length < self.patience or now < row.until:
            return None
        seconds = min(LONGEST_SECONDS, 2.0**row.holds)
        row.holds += 1
        row.until = now + seconds
        return (
            f"{row.length} rollouts in a row on engine {receipt.engine} ended as infra; it gets no leases for "
            f"{seconds:.0f} s. The last was {receipt.rollout} of worker {receipt.worker}: "
            f"{receipt.reason or 'no reason given'}"
        )

    def held(self, now: float) -> set[str]:
        """Engines that get no leases now."""
        return {engine for engine, row in self._rows.items() if now < row.until}
