"""The cluster's side: a service that keeps the engines behind it at the newest version of a chain.

    store: HEAD ──▶ fetch, verify, decode beside ──▶ cache folder: a patch, or the whole version
                                                                    │
                                                          cluster.py: engines, orchestrator

One download per cluster, however many engines. Whatever fails, the old version goes on serving, a sentence says who did
not answer or what did not fit, and it is tried again. On a mismatch everything held is distrusted and an anchor is
fetched. What it serves and still needs is written into the store (`readers.py`), so that nothing of it is deleted; with
`relay` it hands on to others nearby what it fetched (`relay.py`).

    stretto follow --help
    python -m stretto.launch.service follower --help

Memory: the version held, and beside it what `rebuild.py` says; engines load files. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from stretto.config import WeightsConfig
from stretto.weights import chain as chains
from stretto.weights import cluster as clusters
from stretto.weights import codec
from stretto.weights.cachefolder import CacheFolder
from stretto.weights.chain import ChainError, Head
from stretto.weights.cluster import Cluster, Target
from stretto.weights.complaints import Complaints
from stretto.weights.peers import Peers, Silent
from stretto.weights.readers import RENEW_SECONDS, Lease
from stretto.weights.rebuild import Rebuilt, State, rebuild
from stretto.weights.relay import Cached, serving
from stretto.weights.store import Store, StoreError

if TYPE_CHECKING:
    from stretto.watch.metrics import Metrics

HEAD_SECONDS = 30.0
"""The store must answer for HEAD within this time."""
REBUILD_SECONDS = 1800.0
"""A version must be fetched and decoded within this time."""
LEAVE_SECONDS = 5.0
"""The store may take so long to hear that this follower leaves."""
AGAIN_SECONDS = 30.0
"""A version that could not be rebuilt is tried again after this time."""
WHOLE_EVERY = 8
"""Versions after which the cache folder gets a whole one, so that a restart has few deltas to fetch."""

THREADS = "follower"
"""How the threads that talk to the store are named."""

log = logging.getLogger(__name__)


class _Way:
    """What is held while a version is being rebuilt."""

    def __init__(self, state: State | None) -> None:
        self.state = state

    def reached(self, state: State) -> None:
        self.state = state

    def dropped(self) -> None:
        self.state = None


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
        stop, pool = asyncio.Event(), ThreadPoolExecutor(thread_name_prefix=THREADS)
        asyncio.get_running_loop().set_default_executor(pool)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            if relay is not None:
                port = await stack.enter_async_context(serving(opened, *relay))
                log.info("relay at http://%s:%d", relay[0], port)
            await Follower(opened, chain, cluster, engines, orchestrator, cache, config, metrics, session).run(stop)
        await _leave(pool)

    asyncio.run(main())


async def _leave(pool: ThreadPoolExecutor) -> None:
    """Everybody has been told. A thread that still waits for a store which is dead may not hold up the end."""
    pool.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            log.warning("the store has not answered yet: going without")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)  # the interpreter's own end would wait for that thread
        await asyncio.sleep(0.05)


class Follower:
    """One task follows the chain, one keeps the record in the store, and `cluster` has two for each engine."""

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
        self.store, self.chain, self.name, self.config = store, chain, cluster, config
        self.state: State | None = None
        self.cache = CacheFolder(cache, chain)
        self.metrics = metrics
        self._complaints = Complaints(metrics)
        peers = Peers(session, orchestrator)
        self.cluster = Cluster(
            cluster, engines, peers, config, metrics, self._complaints, self._whole, self._mistrusted
        )
        self._lease = Lease(store, chain, cluster)
        self._held = asyncio.Lock()  # the tensors of `state` are read or written
        self._whole_at = -WHOLE_EVERY  # version that the cache folder last got whole
        self._needs = 0  # no object of an older version is fetched
        self._known_head: tuple[Head, str] | None = None
        self._unusable = ("", 0.0)  # root that could not be rebuilt, time

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until `stop` is set, then take the engines off the orchestrator's list."""
        kinds = ("uint16", "uint8", "uint32") if self.config.serve_dtype == "fp8" else ()
        threading.Thread(target=codec.warm_up, args=kinds, name="codec", daemon=True).start()
        self.state = await asyncio.to_thread(self.cache.open)
        self._whole_at = self.state.version if self.state else self._whole_at
        work = [
            self._follow_chain(),
            self._keep_lease(),
            *map(self.cluster.tend, self.cluster.engines),
            *map(self.cluster.vouch, self.cluster.engines),
        ]
        tasks = [asyncio.create_task(job) for job in work]
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, *tasks):
            task.cancel()
        await asyncio.gather(stopping, *tasks, return_exceptions=True)
        await self.cluster.leave()
        with suppress(StoreError, Silent, OSError):
            async with _deadline(LEAVE_SECONDS, f"store {self.store.url} did not answer"):
                await asyncio.to_thread(self._lease.end)
        for task in done - {stopping}:
            task.result()  # these never end by themselves: raise what ended it

    async def _follow_chain(self) -> None:
        await self._renew()  # before HEAD is read: see collect.py
        while True:
            head = None
            try:
                head = await self._head()
                if head is None:
                    self._complaints.say(
                        "chain", f"chain {self.chain} in {self.store.url} has no version yet", patient=True
                    )
                elif self._is_news(head):
                    await self._advance(head)
                    self._complaints.settled("chain")
            except (ChainError, StoreError, Silent, OSError) as error:
                self._complaints.say("chain", f"{self.name} stays at version {self._version()}: {error}")
                if isinstance(error, ChainError) and head is not None:
                    self._unusable = (head.root, time.monotonic())
                if self.cluster.target is None and self.state is not None:  # what the cache held is better than nothing
                    with suppress(OSError):  # said already
                        async with self._held:
                            await self._offer(Rebuilt(self.state))
                await asyncio.sleep(clusters.CHECK_SECONDS)
            await asyncio.sleep(self.config.poll_seconds)

    def _is_news(self, head: Head) -> bool:
        """Not what engines are brought to already, and not what could not be rebuilt a moment ago."""
        root, at = self._unusable
        if head.root == root and time.monotonic() - at < AGAIN_SECONDS:
            return False
        target = self.cluster.target
        return target is None or (target.version, target.root) != (head.version, head.root)

    async def _head(self) -> Head | None:
        async with _deadline(HEAD_SECONDS, f"store {self.store.url} did not answer for HEAD of chain {self.chain}"):
            self._known_head = await asyncio.to_thread(chains.read_head, self.store, self.chain, self._known_head)
        return self._known_head[0] if self._known_head else None

    async def _keep_lease(self) -> None:
        while True:
            serves = self.cluster.serves
            for _ in range(max(1, int(RENEW_SECONDS / clusters.CHECK_SECONDS))):
                await asyncio.sleep(clusters.CHECK_SECONDS)
                if self.cluster.serves != serves:
                    break
            await self._renew()

    async def _renew(self) -> None:
        """What is served, for everyone to see; and that nothing is deleted that may be fetched."""
        try:
            async with _deadline(HEAD_SECONDS, f"store {self.store.url} did not take the record of {self.name}"):
                await asyncio.to_thread(self._lease.renew, self.cluster.serves, self._needs)
            self._complaints.settled("lease")
        except (StoreError, Silent, OSError) as error:
            self._complaints.say("lease", f"what {self.name} serves is not known in the store, go on without: {error}")

    async def _advance(self, head: Head) -> None:
        """Fetch and decode beside, then offer it to the engines."""
        self._needs = min(link.version for link in head.links)
        async with self._held:
            built = await self._rebuild(head)
            for note in built.notes:
                self._complaints.say(f"rebuild {head.version}", f"{self.name}: {note}")
            await self._offer(built)
        if isinstance(self.store, Cached):
            await asyncio.to_thread(self.store.forget, self.chain, self._needs)

    async def _rebuild(self, head: Head) -> Rebuilt:
        """`state` is what is held afterwards, also when this raises."""
        base, self.state = self.state, None  # while a thread is at its tensors, nobody else is
        way = _Way(base)
        try:
            async with _deadline(REBUILD_SECONDS, f"store {self.store.url} did not deliver version {head.version}"):
                built = await asyncio.to_thread(rebuild, self.store, head, base, way.reached, way.dropped)
        except Silent:
            self.state = await asyncio.to_thread(self.cache.open)  # that thread may come back to what it has
            raise
        except (ChainError, StoreError, OSError):
            self.state = way.state or await asyncio.to_thread(self.cache.open)
            raise
        self.state = built.state
        return built

    async def _offer(self, built: Rebuilt) -> None:
        """Write what engines need and make it what they are brought to."""
        state, started = built.state, time.monotonic()
        if self.metrics is not None:
            self.metrics.log(
                "rebuilt", cluster=self.name, version=state.version, form=built.form, bytes=built.bytes, way=built.path
            )
        parent, patch = built.parent if self.cluster.engines else "", Path()
        if parent:
            patch = await asyncio.to_thread(self.cache.patch, state, built.changes)
        if not built.parent:
            await self._keep(state)
        self.cluster.bring_to(
            Target(
                version=state.version,
                root=state.root,
                parent=parent,
                patch=patch,
                canary=built.canary,
                form=built.form,
                bytes=built.bytes,
                fetch_seconds=built.fetch_seconds,
                apply_seconds=built.apply_seconds + time.monotonic() - started,
            )
        )
        if state.version >= self._whole_at + WHOLE_EVERY:
            await self._keep(state)
        await asyncio.to_thread(self.cache.prune, self.cluster.in_use)

    async def _keep(self, state: State) -> None:
        await asyncio.to_thread(self.cache.whole, state)
        self._whole_at = state.version

    async def _whole(self, target: Target) -> Path:
        """The target's whole file. Silent when there is a newer one already."""
        path = self.cache.path(target.version, target.root)
        if path.exists():
            return path
        async with self._held:
            if self.state is None or self.state.root != target.root:
                raise Silent(f"version {target.version} is not held any more: the next one comes")
            return await asyncio.to_thread(self.cache.whole, self.state)

    async def _mistrusted(self, target: Target) -> None:
        """Distrust all that is held: the chain's task starts at an anchor."""
        async with self._held:
            self.state = None
            self.cluster.bring_to(None)
            await asyncio.to_thread(self.cache.drop, target.root)

    def _version(self) -> str:
        return "none" if self.state is None else str(self.state.version)


@asynccontextmanager
async def _deadline(seconds: float, sentence: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Silent(f"{sentence} within {seconds:g} s") from None
