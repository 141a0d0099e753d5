"""Which leases a worker can know of, so that what is on its way to it is not taken for lost.

    worker                              orchestrator
      ── lease, number 7 ──────────────▶  grants A, B
      ── heartbeat, number 6, holds …──▶  A, B may still be on their way: nothing follows
      ── lease, number 7 (repeated) ───▶  A, B once more: the first answer was lost
      ── heartbeat, number 7, holds A ─▶  B is not held: it goes to another worker
      ── lease, number 8 ──────────────▶  number 7 has arrived

A worker has one lease request under way at a time and counts them. Its heartbeats say which one was answered last, so
an answer that takes long, because the orchestrator got no core for a while, costs nothing. `life`, when the worker
started, tells a worker from an earlier one of its name. Nothing of this is kept over a restart. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.rollouts.refusals import Conflict


class Call(NamedTuple):
    """What a message of a worker says about itself. In a lease request, `number` is its own; in a heartbeat, that of
    the last one whose answer has arrived, 0 before the first."""

    life: int  # unix nanoseconds at which the worker started
    number: int


@dataclass
class _Line:
    life: int
    asked: int  # number of the newest lease request
    given: list[str] = field(default_factory=list)  # rollouts of its answer


class Handover:
    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def meets(self, worker: str, call: Call) -> bool:
        """True when a worker of this name was there before and this is another one, started later. Raises Conflict
        when it is the earlier one."""
        line = self._lines.get(worker)
        if line is not None and call.life < line.life:
            raise Conflict(f"another worker named {worker!r} has started since; give each worker a name of its own")
        if line is None or call.life > line.life:
            self._lines[worker] = _Line(call.life, call.number)
        return line is not None and call.life > line.life

    def answer(self, worker: str, call: Call) -> list[str] | None:
        """The rollouts with which this lease request was answered before; [] when nobody reads the answer any more;
        None when it is still to be answered."""
        line = self._lines[worker]
        if call.number > line.asked:
            line.asked, line.given = call.number, []
        if call.number < line.asked:
            return []
        return line.given or None

    def gave(self, worker: str, rollouts: Sequence[str]) -> None:
        """The newest lease request is answered with these."""
        self._lines[worker].given = list(rollouts)

    def on_their_way(self, worker: str, call: Call) -> list[str] | None:
        """Rollouts that the sender of this heartbeat may not have heard of. None: it is older than what has arrived
        since, and says nothing about what is held now."""
        line = self._lines[worker]
        if call.number < line.asked - 1:
            return None
        return line.given if call.number < line.asked else []

    def forget(self, worker: str) -> None:
        self._lines.pop(worker, None)

    def __len__(self) -> int:
        return len(self._lines)
