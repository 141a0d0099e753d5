"""The engines of one cluster, each brought to the newest target and vouched for.

    target ──▶ tend: POST /update_weights ──▶ GET /health agrees ──▶ registered with the orchestrator
               vouch: GET /health, again and again ──▶ registration renewed, or taken back

An engine that serves what the target's patch starts from is given the patch, any other one the whole version. It is
registered only when its own /health names version and fingerprint; its canary was compared before it swapped.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.config import WeightsConfig
from stretto.records import Canary, EngineStatus, KvPolicy, WeightsOrder, WeightsTaken
from stretto.weights.complaints import Complaints
from stretto.weights.peers import Mistrusted, NoPatch, Peers, Refused, Silent, Unreachable

if TYPE_CHECKING:
    from stretto.watch.metrics import Metrics

CHECK_SECONDS = 1.0
"""How often engines are looked at, and registrations renewed, while there is no new version."""
AGAIN_SECONDS = 30.0
"""A refused version is offered again after this time."""


@dataclass
class Target:
    """A version, ready for engines."""

    version: int
    root: str
    parent: str  # root that the patch starts from; empty: there is none
    patch: Path
    canary: Canary | None
    form: str
    bytes: int  # what it cost to fetch; counted for the first engine that takes it
    fetch_seconds: float
    apply_seconds: float


class Cluster:
    """`whole` gives the file of a target's whole version; `mistrusted` is told of one that an engine found wrong."""

    def __init__(
        self,
        name: str,
        engines: list[str],
        peers: Peers,
        config: WeightsConfig,
        metrics: Metrics | None,
        complaints: Complaints,
        whole: Callable[[Target], Awaitable[Path]],
        mistrusted: Callable[[Target], Awaitable[None]],
    ) -> None:
        self.name, self.engines = name, [url.rstrip("/") for url in engines]
        self.target: Target | None = None
        self._peers, self._config, self._metrics, self._complaints = peers, config, metrics, complaints
        self._whole, self._mistrusted = whole, mistrusted
        self._news = asyncio.Event()
        self._files: dict[str, Path] = {}  # engine -> file it was told to load
        self._registered: dict[str, EngineStatus] = {}  # what the orchestrator was told last
        self._seen: set[str] = set()  # engines that have answered
        self._refused: set[str] = set()  # roots that engines refused once: the next refusal is final

    @property
    def in_use(self) -> set[Path]:
        """Files that an engine was told to load and has not answered for."""
        return set(self._files.values())

    @property
    def serves(self) -> int | None:
        """The lowest version among the registered engines."""
        return min((status.version for status in self._registered.values()), default=None)

    def bring_to(self, target: Target | None) -> None:
        self.target = target
        if target is not None:
            self._news.set()
            self._news = asyncio.Event()

    async def leave(self) -> None:
        """Take all engines off the orchestrator's list."""
        await asyncio.gather(*map(self._leave, list(self._registered)), return_exceptions=True)

    async def tend(self, engine: str) -> None:
        """Bring one engine to each new target; again after a failure, or when `vouch` found that it fell back."""
        while True:
            news, target, pause = self._news, self.target, CHECK_SECONDS
            if target is not None and self._registered.get(engine) != self._status(engine, target):
                try:
                    await self._bring(engine, target)
                    self._complaints.settled(engine)
                except Silent as error:
                    self._complaints.say(engine, str(error), patient=engine not in self._seen)
                    pause = AGAIN_SECONDS if isinstance(error, Refused) else CHECK_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), pause)

    async def vouch(self, engine: str) -> None:
        """Renew the registration while the engine serves what it is registered for, however long an update takes.

        One that serves something else, or where nobody listens, leaves at once. One that is slow to answer is just
        not renewed, and the orchestrator draws its own conclusion.
        """
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            status = self._registered.get(engine)
            if status is None:
                continue
            try:
                found = await self._health(engine)
                if self._registered.get(engine) != status:
                    continue  # `tend` was faster
                if found == (status.version, status.fingerprint):
                    await self._register(status)
                elif self.target is None or found != (self.target.version, self.target.root):
                    self._complaints.say(engine, f"engine {engine} fell from version {status.version} to {found[0]}")
                    await self._leave(engine)
            except Unreachable as error:
                self._complaints.say(engine, str(error))
                with suppress(Silent):
                    await self._leave(engine)
            except Silent as error:
                self._complaints.say(engine, str(error))

    async def _bring(self, engine: str, target: Target) -> None:
        """Make `engine` serve `target`, then let the orchestrator know."""
        wanted = (target.version, target.root)
        found = await self._health(engine)
        if found != wanted:
            taken = await self._update(engine, target, found[1])
            if taken.note:
                self._complaints.say(f"note {engine}", f"engine {engine}: {taken.note}")
            found = await self._health(engine)
            if found != wanted:
                raise Silent(
                    f"engine {engine} took version {target.version}, but its /health says version {found[0]}, "
                    f"fingerprint {found[1]}: not routable"
                )
            self._log_swap(engine, target, taken)
        await self._register(self._status(engine, target))

    async def _update(self, engine: str, target: Target, serving: str | None) -> WeightsTaken:
        """By a patch if the engine serves what it starts from, else by the whole version."""
        try:
            if target.parent and serving == target.parent:
                with suppress(NoPatch):
                    return await self._order(engine, target, target.patch, target.parent)
            return await self._order(engine, target, await self._whole(target), "")
        except Mistrusted as error:
            if target.root in self._refused:
                raise Refused(f"{error}; it goes on with the version it has") from None
            self._refused.add(target.root)
            await self._mistrusted(target)
            raise Refused(f"{error}; fetching an anchor") from None

    async def _order(self, engine: str, target: Target, path: Path, parent: str) -> WeightsTaken:
        order = WeightsOrder(
            version=target.version,
            fingerprint=target.root,
            path=str(path),
            parent=parent,
            canary=target.canary,
            kv=KvPolicy(self._config.kv),
            drain_seconds=self._config.drain_seconds,
        )
        self._files[engine] = path
        try:
            return await self._peers.update(engine, order)
        finally:
            del self._files[engine]

    async def _health(self, engine: str) -> tuple[int | None, str | None]:
        found = await self._peers.health(engine)
        self._seen.add(engine)
        return found

    async def _register(self, status: EngineStatus) -> None:
        await self._peers.register(status)
        self._registered[status.url] = status

    async def _leave(self, engine: str) -> None:
        if self._registered.pop(engine, None) is not None:
            await self._peers.leave(engine)

    def _status(self, engine: str, target: Target) -> EngineStatus:
        return EngineStatus(url=engine, cluster=self.name, version=target.version, fingerprint=target.root)

    def _log_swap(self, engine: str, target: Target, taken: WeightsTaken) -> None:
        if self._metrics is not None:
            self._metrics.log(
                "swap",
                cluster=self.name,
                engine=engine,
                version=target.version,
                form=target.form,
                bytes=target.bytes,
                fetch_s=target.fetch_seconds,
                apply_s=target.apply_seconds,
                pause_s=taken.pause_s,
                drain_s=taken.drain_s,
                canary=taken.canary,
                rss_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            )
        target.bytes, target.fetch_seconds, target.apply_seconds = 0, 0.0, 0.0
