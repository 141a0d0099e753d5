"""Where the time goes, step by step: the share of each step in which trainer, engines and workers were busy, what was
queued meanwhile, and how old the tokens were. Pure: metrics lines in, one record per step out.

The trainer counts as busy when it does not wait for a batch; an engine when it computes; a worker by the share of its
slots that play a rollout.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

LATE_SECONDS = 1.5
"""Processes tell what they did up to so long afterwards."""

Line = dict[str, Any]


class Shares:
    """Feed it all lines of a run in order; what it returns goes into metrics.jsonl as kind `shares`."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, Line]] = deque()  # start, and the step that ended it
        self._busy: deque[Line] = deque()
        self._queue: Line = {}
        self._since: float | None = None
        self._last = -1

    def absorb(self, lines: Iterable[Line]) -> list[Line]:
        """Records of the steps that are long enough ago."""
        done = []
        for line in lines:
            kind = line["kind"]
            if kind == "stage":
                self._since = line["time"] if line["name"] == "training" else None
            elif kind == "busy":
                self._busy.append(line)
            elif kind == "queue":
                self._queue = line
            elif kind == "shares":
                self._last = max(self._last, int(line.get("version") or -1))
            elif kind == "step" and self._since is not None:
                if line["version"] > self._last:
                    self._steps.append((self._since, {**line, "queue": self._queue}))
                self._since = line["time"]
            while self._steps and line["time"] > self._steps[0][1]["time"] + LATE_SECONDS:
                done.append(self._record(*self._steps.popleft()))
        return done

    def _record(self, start: float, step: Line) -> Line:
        end = step["time"]
        shares = busy_shares(self._busy, [(start, end)])
        while self._busy and self._busy[0]["end"] < end:
            self._busy.popleft()
        queue = {name: step["queue"].get(name) for name in ("in_flight", "ready_groups", "capacity")}
        ages = Counter(str(age) for age in step.get("staleness") or [])
        return {
            "version": step["version"],
            "start": round(start, 3),
            "end": round(end, 3),
            "busy": shares,
            "queue": queue,
            "staleness": dict(sorted(ages.items())),
        }


def busy_shares(lines: Iterable[Line], spans: list[tuple[float, float]]) -> dict[str, float]:
    """By process: the share of the spans in which it was busy."""
    total = sum(end - start for start, end in spans)
    if total <= 0:
        return {}
    seconds: dict[str, float] = {}
    for line in lines:
        what, process = line.get("what"), str(line["process"])
        if what == "publish":  # beside the next step, on a thread of its own
            continue
        overlap = sum(max(0.0, min(line["end"], b) - max(line["start"], a)) for a, b in spans)
        busy = -overlap if what == "wait" else 0.0 if process == "trainer" else overlap * float(line.get("share", 1.0))
        seconds[process] = seconds.get(process, total if process == "trainer" else 0.0) + busy
    return {name: round(min(1.0, max(0.0, value / total)), 4) for name, value in sorted(seconds.items())}
