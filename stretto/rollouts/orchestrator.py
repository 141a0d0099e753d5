"""The orchestrator: one HTTP service per run that hands out rollouts and cuts batches.

    worker   ── POST /lease, /move, /receipts, … ───▶ ┌──────┐ ◀── GET /batch, POST /trained, /version ── trainer
    follower ── POST /engine, DELETE /engine ───────▶ │ Flow │ ◀── POST /start, /pause, /evaluate, /status ── launcher
                                                      └──┬───┘
                                             ledger.sqlite, store/batches/

Thin: each handler decodes, calls `Flow`, encodes. Answers that have to wait are long polls. A sentence in the body says
why something was refused: 400 malformed, 404 unknown, 409 not possible now. Any other error ends the service.

    python -m stretto.launch.service orchestrator --help
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from stretto.config import Config
from stretto.records import PAUSED_HEADER, EngineStatus, Receipt, Task, Trained, decode
from stretto.rollouts import standing
from stretto.rollouts.flow import Flow
from stretto.rollouts.groups import TRAIN
from stretto.rollouts.handover import Call
from stretto.rollouts.ledger import Ledger
from stretto.rollouts.refusals import Conflict, Unknown
from stretto.rollouts.source import Tasks, from_folder
from stretto.rollouts.watchdog import LAG_SECONDS, Watchdog
from stretto.watch.metrics import Metrics
from stretto.weights.store import Store

LEASE_SECONDS = 1.0
BATCH_SECONDS = 5.0
TICK_SECONDS = 0.25
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LeaseRequest(msgspec.Struct, frozen=True):
    worker: str
    slots: int
    life: int  # as in `handover.Call`
    number: int

    def __post_init__(self) -> None:
        if not self.worker or self.slots < 1 or self.number < 1:
            raise ValueError(
                f"worker {self.worker!r} asks for {self.slots} slots in its request number {self.number}: a lease "
                f"request needs a name, a slot at least, and is counted from 1"
            )


class MoveRequest(msgspec.Struct, frozen=True):
    worker: str
    rollout: str
    engine: str  # the one that failed
    again: bool = False  # the same failure was told before, and there was no other engine yet


class Heartbeat(msgspec.Struct, frozen=True):
    worker: str
    rollouts: list[str]  # all the worker is at; its other leases lapse, if it knows of them
    life: int
    number: int


class SetVersion(msgspec.Struct, frozen=True):
    version: int
    chain: str


class EvaluationRequest(msgspec.Struct, frozen=True):
    name: str
    split: str
    attempts: int
    temperature: float
    tasks: int | None = None

    def __post_init__(self) -> None:
        if not self.name or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in self.name):
            raise ValueError(f"evaluation name {self.name!r}: use letters, digits, '-', '_' and '.'")
        if self.name == TRAIN:
            raise ValueError(f"an evaluation cannot be named {TRAIN!r}: that is the purpose of training rollouts")


def serve(config: Config, run_dir: Path, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises LedgerError, TaskError, OSError with a sentence when it cannot."""
    with Metrics(run_dir / "metrics.jsonl", "orchestrator") as metrics:
        asyncio.run(Orchestrator(config, run_dir, metrics, from_folder(run_dir)).run(host, port))


class Orchestrator:
    def __init__(self, config: Config, run_dir: Path, metrics: Metrics, tasks: Tasks) -> None:
        self.config = config
        self.ledger = Ledger(run_dir / "ledger.sqlite")
        self.flow = Flow(config, self.ledger, metrics)
        self.metrics = metrics
        self.store = Store(config.store_url)
        self.tasks = tasks
        self._loading: dict[str, asyncio.Task[Sequence[Task]]] = {}  # by split
        self._changed = asyncio.Event()
        self._seen = self.flow.news
        self._stored: set[int] = set()  # batches whose file is known to lie in the store
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self, host: str, port: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        watchdog = Watchdog(lambda text: self.metrics.log("event", text=text, alarm=True))
        runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=2.0)
        try:
            for split in self.flow.splits_needed:
                await self._tasks_of(split)
            await runner.setup()
            await web.TCPSite(runner, host, port).start()
            ticking = asyncio.create_task(self._tick())
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait([ticking, stopping], return_when=asyncio.FIRST_COMPLETED)
            ticking.cancel()
            stopping.cancel()
            self._fail(next(iter(await asyncio.gather(ticking, return_exceptions=True))))
        finally:
            watchdog.close()
            self._stop.set()
            self._wake()
            await runner.cleanup()
            self.ledger.close()
        if self._failure is not None:
            raise self._failure

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._refusals], client_max_size=4 * 2**20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/lease", self._lease),
                web.post("/move", self._move),
                web.post("/heartbeat", self._heartbeat),
                web.delete("/worker", self._worker_left),
                web.post("/receipts", self._receipts),
                web.post("/engine", self._engine),
                web.delete("/engine", self._engine_left),
                web.get("/batch", self._batch),
                web.post("/trained", self._trained),
                web.post("/version", self._version),
                web.post("/evaluate", self._evaluate),
                web.get("/evaluate/{id}", self._evaluation),
                web.post("/start", self._start),
                web.post("/pause", self._pause),
                web.get("/status", self._status),
            ]
        )
        return app

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except (msgspec.DecodeError, ValueError) as error:  # msgspec.ValidationError, TaskError
            return web.Response(status=400, text=f"{request.path}: {error}")
        except Unknown as error:
            return web.Response(status=404, text=str(error))
        except Conflict as error:
            return web.Response(status=409, text=str(error))
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._wake()

    # Workers

    async def _lease(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=LeaseRequest)
        call = Call(body.life, body.number)
        leases = await self._poll(LEASE_SECONDS, lambda: self.flow.lease(body.worker, body.slots, call))
        return _packed(msgspec.msgpack.encode(leases or []))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=Heartbeat)
        call = Call(body.life, body.number)
        return web.json_response({"drop": self.flow.heartbeat(body.worker, body.rollouts, call)})

    async def _move(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=MoveRequest)
        if not body.again:
            self.flow.engine_failed(body.engine, body.worker, body.rollout)
        url = await self._poll(LEASE_SECONDS, lambda: self.flow.move(body.rollout, body.engine))
        return web.json_response({"engine": url or ""})

    async def _worker_left(self, request: web.Request) -> web.Response:
        self.flow.worker_left(request.query.get("name", ""))
        return web.json_response({})

    async def _receipts(self, request: web.Request) -> web.Response:
        return web.json_response({"unknown": self.flow.receive_all(decode(await request.read(), list[Receipt]))})

    # Followers

    async def _engine(self, request: web.Request) -> web.Response:
        self.flow.engine(decode(await request.read(), EngineStatus))
        return web.json_response({})

    async def _engine_left(self, request: web.Request) -> web.Response:
        self.flow.engine_left(request.query.get("url", ""))
        return web.json_response({})

    # The trainer

    async def _batch(self, request: web.Request) -> web.Response:
        try:
            version = int(request.query.get("version", ""))
        except ValueError:
            raise ValueError("say which version the step updates: ?version=V, a whole number") from None
        self.flow.hear_trainer()
        seconds = BATCH_SECONDS if request.query.get("wait", "0") != "0" else 0.0
        flowing = self.flow.flowing

        def look() -> tuple[bytes | None] | None:
            """A batch, or the news that training was started or paused, which the trainer hears at once."""
            record = self.flow.batch(version)
            return (record,) if record is not None or self.flow.flowing != flowing else None

        (record,) = await self._poll(seconds, look) or (None,)
        if record is None:
            return web.Response(status=204, headers={} if flowing and self.flow.flowing else {PAUSED_HEADER: "1"})
        if version not in self._stored:
            await asyncio.to_thread(self.store.put, f"batches/{version:06d}.msgpack", record)
            self._stored.add(version)
        return _packed(record)

    async def _trained(self, request: web.Request) -> web.Response:
        self.flow.hear_trainer()
        self.flow.trained(decode(await request.read(), Trained))
        return web.json_response({})

    async def _version(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=SetVersion)
        self.flow.hear_trainer()
        self.flow.set_version(body.version, body.chain)
        return web.json_response({})

    # The launcher

    async def _evaluate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=EvaluationRequest)
        await self._tasks_of(body.split)
        id = self.flow.evaluate(body.name, body.split, body.tasks, body.attempts, body.temperature)
        return web.json_response({"id": id})

    async def _evaluation(self, request: web.Request) -> web.Response:
        return web.json_response(self.flow.evaluations.progress(request.match_info["id"]))

    async def _start(self, request: web.Request) -> web.Response:
        await self._tasks_of(TRAIN)
        self.flow.switch(True)
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.Response:
        self.flow.switch(False)
        return web.json_response({})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(standing.status(self.flow))

    async def _health(self, request: web.Request) -> web.Response:
        name, version = self.config.run.name, self.flow.version
        return web.json_response({"role": "orchestrator", "name": name, "ready": True, "version": version})

    # Inside

    async def _tasks_of(self, split: str) -> None:
        """Load the tasks of a split, once for all who ask."""
        if split in self.flow.prompts:
            return
        if split not in self._loading:
            self._loading[split] = asyncio.create_task(asyncio.to_thread(self.tasks, split))
        loading = self._loading[split]
        try:
            tasks = await asyncio.shield(loading)
        finally:
            if loading.done():
                self._loading.pop(split, None)
        if split not in self.flow.prompts:
            self.flow.give_tasks(split, tasks)

    async def _poll(self, seconds: float, attempt: Callable[[], Any]) -> Any:
        """The first true answer of `attempt`, tried at once and after every change, or None when the time is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            changed = self._changed
            answer = attempt()
            left = end - loop.time()
            if answer or left <= 0 or self._stop.is_set():
                return answer
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                return attempt()

    def _wake(self) -> None:
        """Let the long polls look again if something has changed for them."""
        if self.flow.news != self._seen or self._stop.is_set():
            self._seen = self.flow.news
            self._changed.set()
            self._changed = asyncio.Event()

    async def _tick(self) -> None:
        stalls, last_queue, queue_at, before = standing.StallWatch(), None, 0.0, time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            lag = now - before - TICK_SECONDS
            before = now
            if lag > LAG_SECONDS:
                self.flow.event(f"the orchestrator stood still for {lag:.1f} s")
            if lag > 1.0:  # whatever came in meanwhile is answered before anybody is called silent
                self.flow.leases.forgive(lag)
                self.flow.engines.forgive(lag)
                continue
            self.flow.tick()
            self._wake()
            stalls.report(self.flow)
            if now - queue_at >= 1.0:
                queue = standing.queue(self.flow)
                if queue != last_queue:
                    self.metrics.log("queue", **queue)
                last_queue, queue_at = queue, now

    def _fail(self, error: object) -> None:
        """The first error ends the service."""
        if isinstance(error, Exception) and self._failure is None:
            self._failure = error
            self._stop.set()


def _packed(data: bytes) -> web.Response:
    return web.Response(body=data, content_type="application/msgpack")
