"""Which processes are hung: they live, and give no sign of it for too long.

    orchestrator, engine   answer /health
    worker                 its heartbeats reach the orchestrator
    follower               it renews its engine at the orchestrator; asked of it only while that engine is ready
    trainer                it asks or tells the orchestrator something, or uses processor time: a step may take long

Time is not counted in which this process stood still itself, nor, for those that are judged by what the orchestrator
heard of them, in which that does not answer. Before its first sign a process may take as long as it may take to start.
Whoever is hung is killed and started again by `train.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from stretto.launch.client import Unanswered, ask
from stretto.launch.local import Child

LOOK_SECONDS = 1.0
HEALTH_SECONDS = 5.0
"""One health request waits for so long; the next one follows."""
STOOD_STILL_SECONDS = 3.0
BUSY = 0.01
"""Share of a core from which on a trainer counts as busy."""
TRAINER_TIMES = 4
"""A trainer may be quiet for so many times as long: it may wait for a slow store."""
SIGNS = {
    "orchestrator": "has not answered /health",
    "engine": "has not answered /health",
    "worker": "has sent no heartbeat to the orchestrator",
    "follower": "has not renewed its engine, which is ready, at the orchestrator",
    "trainer": "has neither spoken to the orchestrator nor used its processor",
}


@dataclass
class _Watch:
    """What is known of one process; times are monotonic."""

    pid: int
    born: float
    sign: float  # when it last showed that it goes on; later by what is not counted
    shown: bool = False  # has it given any sign yet
    ready: bool = False
    cpu: float = 0.0  # seconds of processor time
    health: Future[dict[str, Any] | None] | None = None


class Vigil:
    """Call `look` a few times a second; it does not wait for anybody."""

    def __init__(
        self, silent_seconds: float, start_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._silent, self._start, self._clock = silent_seconds, start_seconds, clock
        self._watches: dict[str, _Watch] = {}
        self._looked = clock()
        self._pool = ThreadPoolExecutor(16, "health")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self, children: Sequence[Child], status: dict[str, Any] | None) -> list[tuple[Child, str]]:
        """Those that are hung, each with a sentence that goes on after its name. `status` is what the orchestrator
        says now, None when it does not answer."""
        now = self._clock()
        passed = now - self._looked
        if passed < LOOK_SECONDS:
            return []
        self._looked = now
        if passed > STOOD_STILL_SECONDS:
            for watch in self._watches.values():
                watch.sign += passed
        hung = []
        for child in children:
            if child.exit_code is not None:
                self._watches.pop(child.name, None)
                continue
            watch = self._watches.get(child.name)
            if watch is None or watch.pid != child.process.pid:
                watch = self._watches[child.name] = _Watch(child.process.pid, now, now)
            at = self._sign(child, watch, children, status, now, passed)
            if at is not None and at >= watch.born:
                watch.sign, watch.shown = max(watch.sign, at), True
            limit = self._limit(child, watch)
            if now - watch.sign > limit:
                hung.append((child, f"{SIGNS[_role(child)]} for {limit:g} s, though its process lives"))
        return hung

    def _limit(self, child: Child, watch: _Watch) -> float:
        limit = self._silent * (TRAINER_TIMES if _role(child) == "trainer" else 1)
        return limit if watch.shown else max(limit, self._start)

    def _sign(
        self,
        child: Child,
        watch: _Watch,
        children: Sequence[Child],
        status: dict[str, Any] | None,
        now: float,
        passed: float,
    ) -> float | None:
        """When it last gave a sign, None when nothing is known; what must not be counted is taken off."""
        role = _role(child)
        if child.url is not None:
            return self._answered(child, watch, now)
        if role == "trainer" and self._busy(watch, passed):
            return now
        if status is None or (role == "follower" and not self._ready_engine(child, children, now)):
            watch.sign += passed
            return None
        if role == "follower":
            cluster = child.details.get("cluster")
            found = [e.get("renewed_seconds_ago") for e in status.get("engines", []) if e.get("cluster") == cluster]
        elif role == "worker":
            found = [status.get("workers", {}).get(child.name, {}).get("heard_seconds_ago")]
        else:
            found = [status.get("trainer_heard_seconds_ago")]
        return max((now - ago for ago in found if ago is not None), default=None)

    def _answered(self, child: Child, watch: _Watch, now: float) -> float | None:
        health = watch.health
        if health is not None and not health.done():
            return None
        watch.health = self._pool.submit(_health, f"{child.url}/health")
        answer = None if health is None else health.result()
        watch.ready = answer is not None and bool(answer.get("ready"))
        return None if answer is None else now

    def _ready_engine(self, follower: Child, children: Sequence[Child], now: float) -> bool:
        cluster = follower.details.get("cluster")
        engines = [child for child in children if _role(child) == "engine" and child.details.get("cluster") == cluster]
        watches = [self._watches.get(engine.name) for engine in engines]
        return bool(watches) and all(
            watch is not None and watch.ready and now - watch.sign < STOOD_STILL_SECONDS for watch in watches
        )

    def _busy(self, watch: _Watch, passed: float) -> bool:
        try:
            times = psutil.Process(watch.pid).cpu_times()
        except psutil.Error:
            return False
        before, watch.cpu = watch.cpu, times.user + times.system
        return watch.cpu - before > BUSY * passed


def _role(child: Child) -> str:
    return str(child.details.get("role"))


def _health(url: str) -> dict[str, Any] | None:
    try:
        return ask(url, timeout=HEALTH_SECONDS)
    except Unanswered:
        return None
