"""Whether and when a process that died is started again. Pure: deaths and times come in.

A process that dies once is started at once; one that dies again and again waits longer each time, and after `limit`
deaths within `window` seconds one more is final: then something is wrong that starting again does not heal.
"""

from __future__ import annotations

from collections import defaultdict

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 10.0


class Restarts:
    def __init__(self, limit: int, window: float) -> None:
        self.limit, self.window = limit, window
        self.counts: dict[str, int] = defaultdict(int)  # deaths of each process in all
        self._deaths: dict[str, list[float]] = defaultdict(list)  # of these, the recent ones

    def died(self, name: str, now: float) -> float | None:
        """Seconds to wait before `name` is started again; None: it died too often."""
        recent = [at for at in self._deaths[name] if now - at < self.window]
        self._deaths[name] = [*recent, now]
        self.counts[name] += 1
        if len(recent) >= self.limit:
            return None
        return min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** len(recent))
