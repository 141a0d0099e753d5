"""Engines that may be used, and which of them gets the next group.

A follower announces an engine when it has acknowledged a version, and again every second or so, also while it fetches
or applies the next one; nothing of it is kept over a restart of the orchestrator. An engine that was renewed at least
once and then is not for `SILENCE_SECONDS` has left; it is back with the next announcement. One that is announced a
single time (an engine somebody else looks after) stays until it is taken off.

A worker whose engine failed says so: the engine is in doubt, and gets nothing, until its follower has looked at it and
renewed it, or for `DOUBT_SECONDS` when nobody looks after it.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.records import EngineStatus

SILENCE_SECONDS = 30.0
"""Several times what a follower may take for one look at an engine and one announcement (about 11 s)."""
DOUBT_SECONDS = 2.0


class Engines:
    def __init__(self) -> None:
        self.by_url: dict[str, EngineStatus] = {}
        self._renewed: dict[str, float] = {}  # url -> unix seconds
        self._doubted: dict[str, float] = {}  # url -> unix seconds

    def put(self, status: EngineStatus, now: float) -> bool:
        """True when this says something new."""
        known = self.by_url.get(status.url)
        if known is not None:
            self._renewed[status.url] = now
        self.by_url[status.url] = status
        return self._doubted.pop(status.url, None) is not None or known != status

    def remove(self, url: str) -> EngineStatus | None:
        self._renewed.pop(url, None)
        self._doubted.pop(url, None)
        return self.by_url.pop(url, None)

    def doubt(self, url: str, now: float) -> None:
        """A rollout's engine failed: leave it alone until somebody has looked at it."""
        if url in self.by_url:
            self._doubted[url] = now

    def doubted(self, now: float) -> set[str]:
        return {url for url, at in self._doubted.items() if url in self._renewed or now - at < DOUBT_SECONDS}

    def heard(self, url: str) -> float | None:
        """When its follower renewed it last; None when nobody looks after it."""
        return self._renewed.get(url)

    def silent(self, now: float) -> list[str]:
        return [url for url, heard in self._renewed.items() if now - heard > SILENCE_SECONDS]

    def forgive(self, seconds: float) -> None:
        """This process stood still for a while: do not count that as silence."""
        for url in self._renewed:
            self._renewed[url] += seconds

    def choose(
        self, fit: Callable[[EngineStatus], bool], load: Callable[[str], int], prefer: str = ""
    ) -> EngineStatus | None:
        """The least loaded fit engine, the newer version on a tie; `prefer` (a URL) wins as long as it is fit."""
        candidates = [engine for engine in self.by_url.values() if fit(engine)]
        for engine in candidates:
            if engine.url == prefer:
                return engine
        return min(candidates, key=lambda e: (load(e.url), -e.version, e.cluster, e.url), default=None)

    def clusters(self) -> dict[str, int]:
        """Version per cluster; the oldest one where a cluster has several engines."""
        versions: dict[str, int] = {}
        for engine in self.by_url.values():
            versions[engine.cluster] = min(engine.version, versions.get(engine.cluster, engine.version))
        return versions
