"""The rollout worker: leases tasks, plays them against an engine, has them graded, and hands in receipts.

    orchestrator ──lease──▶ play ──submission──▶ desk (group-wise grading) ──▶ payload into the store ──▶ receipt
                             ⇅ engine, box

When an engine fails in the middle of a rollout, the orchestrator names another one, which computes the whole history
anew (it gets all token ids with each turn anyway), and the rollout goes on.

One process, one event loop, any number of workers anywhere there are CPUs. A rollout holds its slot while it plays;
grading and handing in happen beside, so that engines are kept busy. A worker keeps nothing: when it is killed, its
leases run out and the orchestrator gives the tasks to others. Never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import time
from pathlib import Path

import aiohttp

from stretto.config import Config
from stretto.engine.client import EngineClient, EngineError
from stretto.grading.grader import Grader
from stretto.grading.outcome import Grade
from stretto.harness import loop, product
from stretto.harness.chat import Chat
from stretto.harness.ending import Ending
from stretto.harness.loop import TRAIN, Played
from stretto.harness.rates import Rates
from stretto.harness.spans import Spans
from stretto.harness.speaker import Elsewhere
from stretto.records import Lease, Receipt, encode
from stretto.rollouts.desk import GradingDesk
from stretto.rollouts.link import Link
from stretto.rollouts.record import payload, receipt
from stretto.rollouts.seeds import derive
from stretto.rollouts.watchdog import Watchdog
from stretto.sandbox.latency import latency
from stretto.sandbox.pool import BoxPool
from stretto.watch.metrics import Metrics
from stretto.weights.store import Store

HEARTBEAT_SECONDS = 2.0
MOVE_SECONDS = 0.2
"""A rollout whose engine failed asks for another one after this time, then after twice as long, and so on."""
BUSY_SECONDS = 0.5


def work(config: Config, run_dir: Path, name: str, orchestrator: str) -> None:
    """Serve until SIGTERM or SIGINT, then give boxes back and return. Raises OrchestratorGone when nobody answers."""
    _raise_descriptors()
    logging.basicConfig(format=f"{name} %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with Metrics(run_dir / "metrics.jsonl", name) as metrics:
        asyncio.run(_serve(config, name, orchestrator, metrics))


def _raise_descriptors() -> None:
    """As many open files as this process may have: boxes and connections take several each."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(config: Config, name: str, orchestrator: str, metrics: Metrics) -> None:
    chat = Chat(config.model.folder)
    pool = BoxPool(config.sandbox)
    connector = aiohttp.TCPConnector(limit=0)
    with contextlib.suppress(asyncio.CancelledError):
        _cancel_on_signal()
        async with aiohttp.ClientSession(connector=connector) as session:
            await pool.start()
            try:
                link = Link(orchestrator, name, session)
                await Worker(config, name, link, session, chat, pool, Store(config.store_url), metrics).run()
            finally:
                await pool.close()


def _cancel_on_signal() -> None:
    """The first SIGTERM or SIGINT cancels this task; later ones must not disturb the clearing up."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop() -> None:
        if not task.cancelling():
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


class Worker:
    """The rollouts in flight of one process."""

    def __init__(
        self,
        config: Config,
        name: str,
        link: Link,
        session: aiohttp.ClientSession,
        chat: Chat,
        pool: BoxPool,
        store: Store,
        metrics: Metrics,
    ):
        self.config, self.name, self.link, self.session = config, name, link, session
        self.chat, self.pool, self.store, self.metrics = chat, pool, store, metrics
        self.spans = Spans(chat)
        self.grader = Grader(config.grading, pool)
        self.desk = GradingDesk(self.grader, draw=lambda group: derive(config.run.seed, "grading", group))
        self.rates = Rates()
        self.playing = 0
        self.held: dict[str, asyncio.Task[None] | None] = {}  # rollouts playing, being graded or handed in
        self._engines: dict[str, EngineClient] = {}
        self._change = asyncio.Event()
        self._busy, self._since = 0.0, time.time()  # rollouts x seconds played, up to when

    async def run(self) -> None:
        """Until cancelled; the first error of any part ends all of it."""
        watchdog = Watchdog(lambda text: self.metrics.log("event", text=f"{self.name}: {text}", alarm=True))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeats())
                group.create_task(self._report_busy())
                await self._lease(group)
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            watchdog.close()
            await self.grader.close()

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        concurrency = self.config.rollouts.concurrency
        while True:
            slots = min(concurrency - self.playing, 2 * concurrency - len(self.held))
            if slots <= 0:
                self._change.clear()
                await self._change.wait()
                continue
            for lease in await self.link.lease(slots):
                self.desk.expect(lease)
                self._count(+1)
                self.held[lease.rollout] = group.create_task(self._rollout(lease), name=lease.rollout)

    async def _rollout(self, lease: Lease) -> None:
        started = time.time()
        seconds = self.config.rollouts.turn_seconds
        try:
            engine, elsewhere = self._engine(lease.engine), self._elsewhere(lease)
            play = product.play if self.config.harness.client else loop.play
            played = await play(
                lease,
                engine,
                self.chat,
                self.pool,
                self.config.harness,
                self.spans,
                elsewhere,
                seconds,
                latency(self.config.sandbox, lease.sampling.seed),
            )
        except asyncio.CancelledError:
            self.desk.absent(lease)
            self.held.pop(lease.rollout, None)
            raise
        finally:
            self._count(-1)
        try:
            grade = None
            if played.ending is Ending.SUBMITTED or played.files:
                grade = await self.desk.grade(lease, played.files)
            else:
                self.desk.absent(lease)
            ended = time.time()
            word = await asyncio.to_thread(self._pack, lease, played, grade, started, ended)  # long for a long one
            await self.link.receipt(word)
            for text in self.rates.add(word) if lease.purpose == TRAIN else ():
                self.metrics.log("event", text=f"{self.name}: {text}", alarm=True)
        finally:
            self.held.pop(lease.rollout, None)
            self._change.set()

    def _pack(self, lease: Lease, played: Played, grade: Grade | None, started: float, ended: float) -> Receipt:
        """The payload into the store; what is said of it."""
        rollout = payload(
            lease,
            played,
            grade,
            self.config.grading,
            shaping=self.config.shaping,
            worker=self.name,
            started=started,
            ended=ended,
        )
        word = receipt(rollout, lease.version)
        self.store.put(word.key, encode(rollout))
        return word

    def _engine(self, url: str) -> EngineClient:
        return self._engines.setdefault(url, EngineClient(url, self.session))

    def _elsewhere(self, lease: Lease) -> Elsewhere:
        """Where this rollout goes on when an engine has failed it."""
        pause = MOVE_SECONDS

        async def find(failed: EngineClient) -> EngineClient:
            nonlocal pause
            url = await self.link.move(lease.rollout, failed.url)
            if url is None:
                raise EngineError(f"{failed.url} failed, and nobody waits for {lease.rollout} any more")
            if url == failed.url:  # restarted, or not found dead yet
                await asyncio.sleep(pause)
                pause *= 2
            return self._engine(url)

        return find

    async def _heartbeats(self) -> None:
        while True:
            for rollout in await self.link.heartbeat(sorted(self.held)):
                task = self.held.get(rollout)
                if task is not None:
                    task.cancel()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _report_busy(self) -> None:
        """One line per half second in which something was in flight: the share of slots in use, and of a core."""
        start, cpu = time.time(), time.process_time()
        while True:
            await asyncio.sleep(BUSY_SECONDS)
            self._count()
            busy, self._busy = self._busy, 0.0
            end, spent = time.time(), time.process_time()
            if busy:
                seconds = end - start
                share = min(busy / seconds / self.config.rollouts.concurrency, 1.0)
                core = round((spent - cpu) / seconds, 4)
                self.metrics.log("busy", start=start, end=end, what="rollouts", share=round(share, 4), cpu=core)
            start, cpu = end, spent

    def _count(self, change: int = 0) -> None:
        """Rollouts that begin (+1) or end (-1) to play."""
        now = time.time()
        self._busy += self.playing * (now - self._since)
        self._since = now
        self.playing += change
        self._change.set()


def _first(errors: BaseExceptionGroup) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
