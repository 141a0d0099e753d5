"""The cluster's side: a service that keeps the engines behind it at the newest version of a chain.

    store: HEAD ──▶ fetch, verify, decode beside ──▶ cache/<chain>-v000007-….safetensors ──▶ POST /update_weights
                                                                                                     │
                   orchestrator ◀── POST /engine ◀── GET /health names version and fingerprint ◀── engine swaps

One download per cluster, however many engines. An engine becomes routable only when its own /health names the
version and the fingerprint; one that was restarted, or fell behind, is brought up again. Whatever fails, the old
version goes on serving, a sentence says who did not answer or what did not fit, and it is tried again. On a
mismatch everything held is distrusted and an anchor is fetched. What it serves and still needs is written into the
store (`readers.py`), so that nothing of it is deleted; with `relay` it hands on to others nearby what it fetched
(`relay.py`).

    stretto follow --help
    python -m stretto.launch.service follower --help

Memory: the version held, and beside it what `rebuild.py` says; engines load a file. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from stretto.config import WeightsConfig
from stretto.records import EngineStatus, encode
from stretto.weights import chain as chains
from stretto.weights import codec
from stretto.weights.chain import ChainError, Head
from stretto.weights.readers import RENEW_SECONDS, Lease
from stretto.weights.rebuild import Rebuilt, State, rebuild
from stretto.weights.relay import Cached, serving
from stretto.weights.state import fingerprint
from stretto.weights.store import Store, StoreError
from stretto.weights.tensorfile import save, unpack

if TYPE_CHECKING:
    from stretto.watch.metrics import Metrics

HEAD_SECONDS = 30.0
"""The store must answer for HEAD within this time."""
REBUILD_SECONDS = 1800.0
"""A version must be fetched and decoded within this time."""
UPDATE_SECONDS = 300.0
"""An engine must load and swap within this time."""
ANSWER_SECONDS = 5.0
"""Any other request must be answered within this time."""
CHECK_SECONDS = 1.0
"""How often engines are looked at, and registrations renewed, while there is no new version."""
REPEAT_SECONDS = 30.0
"""The same complaint is made again, and a refused version offered again, after this time."""
PATIENCE_SECONDS = 30.0
"""Trainer and engines may take this long to start before anyone is told that they are missing."""
KEEP_FILES = 2
"""Versions kept in the cache folder."""

log = logging.getLogger(__name__)


class Silent(RuntimeError):
    """Someone did not answer, or not with what was asked for; the sentence names them. Asked again soon."""


class Unreachable(Silent):
    """Nobody listens there."""


class Refused(Silent):
    """An engine said no to a version. Asked again later, or when there is another version."""


@dataclass
class Target:
    """A complete file, ready for engines."""

    version: int
    root: str
    path: Path
    form: str
    bytes: int  # what it cost to fetch; counted for the first engine that takes it
    fetch_seconds: float
    apply_seconds: float


def follow(
    store: str,
    chain: str,
    cluster: str,
    engines: list[str],
    orchestrator: str | None,
    cache: Path,
    config: WeightsConfig,
    metrics: Metrics | None,
    relay: tuple[str, int] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `engines` and `orchestrator` are base URLs; `cache` is a folder that the engines
    can read; `relay` is the address at which to hand on to other followers what was fetched. Raises ChainError for a
    bad chain id, StoreError for a bad URL and OSError for an address that is taken; nothing later ends it."""
    chains.head_key(chain)
    opened = Store(store)
    if relay is not None:
        opened = Cached(opened, cache / "relay")

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            if relay is not None:
                port = await stack.enter_async_context(serving(opened, *relay))
                log.info("relay at http://%s:%d", relay[0], port)
            await Follower(opened, chain, cluster, engines, orchestrator, cache, config, metrics, session).run(stop)

    asyncio.run(main())


class Follower:
    """One task follows the chain; per engine, one brings it to the newest target and one vouches for what it serves."""

    def __init__(
        self,
        store: Store,
        chain: str,
        cluster: str,
        engines: list[str],
        orchestrator: str | None,
        cache: Path,
        config: WeightsConfig,
        metrics: Metrics | None,
        session: aiohttp.ClientSession,
    ) -> None:
        self.store, self.chain, self.cluster = store, chain, cluster
        self.engines = [url.rstrip("/") for url in engines]
        self.orchestrator = orchestrator.rstrip("/") if orchestrator else None
        self.cache = cache.absolute()  # engines have other working folders
        self.config, self.metrics, self.session = config, metrics, session
        self.state: State | None = None
        self.target: Target | None = None
        self._lease = Lease(store, chain, cluster)
        self._needs = 0  # no object of an older version is fetched
        self._known_head: tuple[Head, str] | None = None
        self._news = asyncio.Event()
        self._in_use: dict[str, Path] = {}  # engine -> file it was told to load
        self._registered: dict[str, EngineStatus] = {}  # what the orchestrator was told last
        self._seen: set[str] = set()  # engines that have answered
        self._started = time.monotonic()
        self._refused: set[str] = set()  # roots that engines refused once: the next refusal is final
        self._unusable = ("", 0.0)  # root that could not be rebuilt, time
        self._complaints: dict[str, tuple[str, float]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until `stop` is set, then take the engines off the orchestrator's list."""
        threading.Thread(target=codec.warm_up, name="codec", daemon=True).start()
        await asyncio.to_thread(self._open_cache)
        await self._renew()  # before HEAD is read: see collect.py
        work = [
            self._follow_chain(),
            self._keep_lease(),
            *map(self._tend, self.engines),
            *map(self._vouch, self.engines),
        ]
        tasks = [asyncio.create_task(job) for job in work]
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, *tasks):
            task.cancel()
        await asyncio.gather(stopping, *tasks, return_exceptions=True)
        await asyncio.gather(*map(self._leave, list(self._registered)), return_exceptions=True)
        with suppress(StoreError, Silent, OSError):
            async with _deadline(ANSWER_SECONDS, f"store {self.store.url} did not answer"):
                await asyncio.to_thread(self._lease.end)
        for task in done - {stopping}:
            task.result()  # these never end by themselves: raise what ended it

    async def _follow_chain(self) -> None:
        while True:
            head = None
            try:
                head = await self._head()
                if head is None:
                    self._complain("chain", f"chain {self.chain} in {self.store.url} has no version yet", patient=True)
                elif self._is_news(head):
                    await self._advance(head)
                    self._settled("chain")
            except (ChainError, StoreError, Silent, OSError) as error:
                self._complain("chain", f"{self.cluster} stays at version {self._version()}: {error}")
                if isinstance(error, ChainError) and head is not None:
                    self._unusable = (head.root, time.monotonic())
                if self.target is None and self.state is not None:  # what the cache held is better than nothing
                    await self._offer(Rebuilt(self.state))
                await asyncio.sleep(CHECK_SECONDS)
            await asyncio.sleep(self.config.poll_seconds)

    def _is_news(self, head: Head) -> bool:
        """Not what engines are brought to already, and not what could not be rebuilt a moment ago."""
        root, at = self._unusable
        if head.root == root and time.monotonic() - at < REPEAT_SECONDS:
            return False
        return self.target is None or (self.target.version, self.target.root) != (head.version, head.root)

    async def _head(self) -> Head | None:
        async with _deadline(HEAD_SECONDS, f"store {self.store.url} did not answer for HEAD of chain {self.chain}"):
            self._known_head = await asyncio.to_thread(chains.read_head, self.store, self.chain, self._known_head)
        return self._known_head[0] if self._known_head else None

    async def _keep_lease(self) -> None:
        while True:
            serves = self._serves()
            for _ in range(max(1, int(RENEW_SECONDS / CHECK_SECONDS))):
                await asyncio.sleep(CHECK_SECONDS)
                if self._serves() != serves:
                    break
            await self._renew()

    async def _renew(self) -> None:
        """What is served, for everyone to see; and that nothing is deleted that may be fetched."""
        try:
            async with _deadline(HEAD_SECONDS, f"store {self.store.url} did not take the record of {self.cluster}"):
                await asyncio.to_thread(self._lease.renew, self._serves(), self._needs)
            self._settled("lease")
        except (StoreError, Silent, OSError) as error:
            self._complain("lease", f"what {self.cluster} serves is not known in the store, go on without: {error}")

    def _serves(self) -> int | None:
        return min((status.version for status in self._registered.values()), default=None)

    async def _advance(self, head: Head) -> None:
        """Fetch and decode beside, then offer it to the engines."""
        async with _deadline(REBUILD_SECONDS, f"store {self.store.url} did not deliver version {head.version}"):
            self._needs = min(link.version for link in head.links)
            built = await asyncio.to_thread(rebuild, self.store, head, self.state, self._reached)
        for note in built.notes:
            self._complain(f"rebuild {head.version}", f"{self.cluster}: {note}")
        await self._offer(built)
        if isinstance(self.store, Cached):
            await asyncio.to_thread(self.store.forget, self.chain, self._needs)

    def _reached(self, state: State) -> None:
        self.state = state

    async def _offer(self, built: Rebuilt) -> None:
        """Write the file and make it what engines are brought to."""
        state, started = built.state, time.monotonic()
        path = self.cache / f"{self.chain}-v{state.version:06d}-{state.root[:16]}.safetensors"
        await asyncio.to_thread(save, path, state.tensors, state.tags)
        apply = built.apply_seconds + time.monotonic() - started
        self.state = state
        self.target = Target(state.version, state.root, path, built.form, built.bytes, built.fetch_seconds, apply)
        self._news.set()
        self._news = asyncio.Event()
        await asyncio.to_thread(self._prune)

    async def _tend(self, engine: str) -> None:
        """Bring one engine to each new target; again after a failure, or when `_vouch` found that it fell back."""
        while True:
            news, target, pause = self._news, self.target, CHECK_SECONDS
            if target is not None and self._registered.get(engine) != self._status(engine, target):
                try:
                    await self._bring(engine, target)
                    self._settled(engine)
                except Silent as error:
                    self._complain(engine, str(error), patient=engine not in self._seen)
                    pause = REPEAT_SECONDS if isinstance(error, Refused) else CHECK_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), pause)

    async def _bring(self, engine: str, target: Target) -> None:
        """Make `engine` serve `target`, then let the orchestrator know."""
        wanted = (target.version, target.root)
        if await self._health(engine) != wanted:
            pause = await self._update(engine, target)
            found = await self._health(engine)
            if found != wanted:
                raise Silent(
                    f"engine {engine} took version {target.version}, but its /health says version {found[0]}, "
                    f"fingerprint {found[1]}: not routable"
                )
            self._log_swap(engine, target, pause)
        await self._register(self._status(engine, target))

    async def _vouch(self, engine: str) -> None:
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
                    continue  # `_tend` was faster
                if found == (status.version, status.fingerprint):
                    await self._register(status)
                elif self.target is None or found != (self.target.version, self.target.root):
                    self._complain(engine, f"engine {engine} fell from version {status.version} to {found[0]}")
                    await self._leave(engine)
            except Unreachable as error:
                self._complain(engine, str(error))
                with suppress(Silent):
                    await self._leave(engine)
            except Silent as error:
                self._complain(engine, str(error))

    async def _health(self, engine: str) -> tuple[int | None, str | None]:
        async with self._request("GET", engine, "/health", ANSWER_SECONDS) as (status, answer):
            if status != 200:
                raise Silent(f"engine {engine} answered /health with {status}: {_reason(answer)}")
            self._seen.add(engine)
            return answer.get("version"), answer.get("fingerprint")

    async def _update(self, engine: str, target: Target) -> float:
        """Seconds that generation stood still."""
        order = {"version": target.version, "path": str(target.path), "fingerprint": target.root}
        self._in_use[engine] = target.path
        try:
            async with self._request("POST", engine, "/update_weights", UPDATE_SECONDS, json=order) as (status, answer):
                if status == 409 and target.root not in self._refused:
                    self._refused.add(target.root)
                    self.state = self.target = None  # distrust all that is held; the chain's task starts at an anchor
                    raise Refused(
                        f"engine {engine} refused version {target.version}: {_reason(answer)}; fetching an anchor"
                    )
                if status != 200:
                    raise Refused(
                        f"engine {engine} refused version {target.version} with {status}: {_reason(answer)}; "
                        "it goes on with the version it has"
                    )
                return float(answer.get("pause_s") or 0.0)
        finally:
            del self._in_use[engine]

    async def _register(self, status: EngineStatus) -> None:
        if self.orchestrator is not None:
            async with self._request("POST", self.orchestrator, "/engine", ANSWER_SECONDS, data=encode(status)) as (
                code,
                answer,
            ):
                if code != 200:
                    raise Silent(
                        f"orchestrator {self.orchestrator} refused engine {status.url} at version {status.version} "
                        f"with {code}: {_reason(answer)}"
                    )
        self._registered[status.url] = status

    async def _leave(self, engine: str) -> None:
        if self._registered.pop(engine, None) is not None and self.orchestrator is not None:
            async with self._request("DELETE", self.orchestrator, "/engine", ANSWER_SECONDS, params={"url": engine}):
                log.info("engine %s left", engine)

    def _status(self, engine: str, target: Target) -> EngineStatus:
        return EngineStatus(url=engine, cluster=self.cluster, version=target.version, fingerprint=target.root)

    @asynccontextmanager
    async def _request(
        self, method: str, base: str, path: str, seconds: float, **body: Any
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Status and JSON object (empty if the answer is something else). Silent if there is no answer."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self.session.request(method, base + path, timeout=timeout, **body) as response:
                try:
                    answer = await response.json(content_type=None)
                except ValueError:
                    answer = {"error": (await response.text(errors="replace"))[:300]}
                result = response.status, answer if isinstance(answer, dict) else {}
        except TimeoutError:
            raise Silent(f"{base} did not answer {method} {path} within {seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"{base} cannot be reached for {method} {path}: {error}") from None
        except aiohttp.ClientError as error:
            raise Silent(f"{base} broke off {method} {path}: {error}") from None
        yield result

    def _log_swap(self, engine: str, target: Target, pause: float) -> None:
        if self.metrics is not None:
            self.metrics.log(
                "swap",
                cluster=self.cluster,
                engine=engine,
                version=target.version,
                form=target.form,
                bytes=target.bytes,
                fetch_s=target.fetch_seconds,
                apply_s=target.apply_seconds,
                pause_s=pause,
                rss_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            )
        target.bytes, target.fetch_seconds, target.apply_seconds = 0, 0.0, 0.0

    def _complain(self, about: str, sentence: str, patient: bool = False) -> None:
        """Say it once, and again only after a while. `patient`: not at all while everything is still starting."""
        if patient and time.monotonic() - self._started < PATIENCE_SECONDS:
            return
        last, at = self._complaints.get(about, ("", 0.0))
        if sentence == last and time.monotonic() - at < REPEAT_SECONDS:
            return
        self._complaints[about] = (sentence, time.monotonic())
        log.warning(sentence)
        if self.metrics is not None:
            self.metrics.log("event", text=sentence)

    def _settled(self, about: str) -> None:
        self._complaints.pop(about, None)

    def _version(self) -> str:
        return "none" if self.state is None else str(self.state.version)

    def _cached(self) -> list[Path]:
        """Files of this chain, oldest version first."""
        pattern = re.compile(re.escape(self.chain) + r"-v\d{6,}-[0-9a-f]{16}\.safetensors")
        return sorted(
            (path for path in self.cache.iterdir() if pattern.fullmatch(path.name)), key=lambda path: _version_of(path)
        )

    def _open_cache(self) -> None:
        """Take the newest file that still has the bits its name promises as a base for deltas."""
        self.cache.mkdir(parents=True, exist_ok=True)
        for path in reversed(self._cached()):
            with suppress(ValueError):
                tensors, tags = unpack(path.read_bytes())
                root = fingerprint(tensors)
                if path.stem.endswith(root[:16]):
                    self.state = State(_version_of(path), root, tensors, tags)
                    return
            path.unlink()

    def _prune(self) -> None:
        """Older versions go, but never a file that an engine was told to load and has not answered for."""
        for path in self._cached()[:-KEEP_FILES]:
            if path not in self._in_use.values():
                path.unlink(missing_ok=True)


@asynccontextmanager
async def _deadline(seconds: float, sentence: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Silent(f"{sentence} within {seconds:g} s") from None


def _reason(answer: dict[str, Any]) -> str:
    return str(answer.get("error") or answer or "no reason given")


def _version_of(path: Path) -> int:
    return int(path.stem.rsplit("-", 2)[1].removeprefix("v"))
