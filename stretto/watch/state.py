"""Where a run stands, folded out of its metrics lines one by one. Pure: lines in, numbers out.

The display reads it ten times a second; it keeps what people look at now, not the whole history.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

WINDOW_SECONDS = 15.0


@dataclass
class Cluster:
    version: int = -1
    pause_s: float = 0.0
    rollouts: int = 0


@dataclass
class RunState:
    version: int = -1
    rollouts: int = 0
    answered: int = 0  # of these, not `infra`
    solve_rates: list[float] = field(default_factory=list)
    before: float | None = None  # sampled solve rate on held-out tasks
    outcomes: Counter[str] = field(default_factory=Counter)
    staleness: list[int] = field(default_factory=list)  # of the last few steps
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    bytes_full: int = 0
    bytes_last: int = 0
    form_last: str = ""
    deltas: list[int] = field(default_factory=list)
    clusters: dict[str, Cluster] = field(default_factory=dict)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    alarms: deque[str] = field(default_factory=lambda: deque(maxlen=3))  # those of the events that were one
    last_step: dict[str, Any] = field(default_factory=dict)
    last_rollouts: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=32))
    now: float = 0.0
    _ages: deque[list[int]] = field(default_factory=lambda: deque(maxlen=8))
    _ended: deque[float] = field(default_factory=deque)
    _busy: dict[str, deque[tuple[float, float, float]]] = field(default_factory=dict)
    _urls: dict[str, str] = field(default_factory=dict)

    def absorb(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            self.now = max(self.now, float(line["time"]))
            handle = getattr(self, f"_on_{line['kind']}", None)
            if handle:
                handle(line)

    @property
    def rollouts_per_second(self) -> float:
        while self._ended and self._ended[0] < self.now - WINDOW_SECONDS:
            self._ended.popleft()
        return len(self._ended) / WINDOW_SECONDS

    @property
    def seconds_per_step(self) -> float | None:
        """Mean of the last few steps; None before there are two."""
        if len(self.step_times) < 2:
            return None
        return (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)

    @property
    def idle_trainer(self) -> float | None:
        """Share of the last step that the trainer waited for a batch."""
        seconds = self.last_step.get("seconds") or {}
        total = sum(v or 0.0 for v in seconds.values())
        return (seconds.get("wait") or 0.0) / total if total else None

    def idle(self, process: str) -> float | None:
        """Share of the last seconds in which this process did nothing; None when it never said."""
        lines = self._busy.get(process)
        if not lines:
            return None
        since = self.now - WINDOW_SECONDS
        while len(lines) > 1 and lines[0][1] < since:
            lines.popleft()
        span = self.now - max(since, lines[0][0])
        busy = sum((end - max(start, since)) * share for start, end, share in lines if end > since)
        return min(1.0, max(0.0, 1.0 - busy / span)) if span > 0 else None

    @property
    def engines(self) -> list[str]:
        """Names of the processes that are engines and have said what they do."""
        return sorted(name for name in self._busy if name.endswith("engine"))

    def _on_step(self, line: dict[str, Any]) -> None:
        self.version = int(line["version"])
        self.last_step = line
        self.step_times.append(float(line["time"]))
        if line.get("solve_rate") is not None:
            self.solve_rates.append(float(line["solve_rate"]))
        self._ages.append([int(age) for age in line.get("staleness") or []])
        self.staleness = [age for ages in self._ages for age in ages]

    def _on_rollout(self, line: dict[str, Any]) -> None:
        self.rollouts += 1
        self.answered += line.get("outcome") != "infra"
        self._ended.append(float(line["time"]))
        if line.get("purpose") == "train":
            self.outcomes[str(line.get("outcome"))] += 1
        cluster = self._urls.get(str(line.get("engine")))
        if cluster:
            self.clusters.setdefault(cluster, Cluster()).rollouts += 1
        self.last_rollouts.append(line)

    def _on_publish(self, line: dict[str, Any]) -> None:
        self.bytes_full = int(line.get("bytes_full") or 0)
        self.bytes_last, self.form_last = int(line.get("bytes") or 0), str(line.get("form"))
        if line.get("form") == "delta":
            self.deltas.append(self.bytes_last)

    def _on_swap(self, line: dict[str, Any]) -> None:
        cluster = self.clusters.setdefault(str(line["cluster"]), Cluster())
        cluster.version, cluster.pause_s = int(line["version"]), float(line.get("pause_s") or 0.0)

    def _on_service(self, line: dict[str, Any]) -> None:
        if line.get("role") == "engine" and line.get("url"):
            self._urls[line["url"]] = str(line.get("cluster"))

    def _on_busy(self, line: dict[str, Any]) -> None:
        span = (float(line["start"]), float(line["end"]), float(line.get("share", 1.0)))
        self._busy.setdefault(str(line["process"]), deque(maxlen=400)).append(span)

    def _on_eval(self, line: dict[str, Any]) -> None:
        tries = sum(line.get("valid") or [])
        if line.get("name") == "before-heldout" and tries:
            self.before = sum(line["solved"]) / tries

    def _on_event(self, line: dict[str, Any]) -> None:
        self.events.append(str(line.get("text", "")))
        if line.get("alarm"):
            self.alarms.append(self.events[-1])

    def _on_stage(self, line: dict[str, Any]) -> None:
        if line.get("name") == "starting":  # a run that goes on: the pause is not a step, old spans are not idleness
            self.step_times.clear()
            self._busy.clear()
