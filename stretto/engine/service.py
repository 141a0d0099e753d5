"""One engine as asyncio code sees it: a request is an awaitable, a stream an async iterator, weights an update.

It joins the loop's thread (`runner`) to the server's event loop: events come over once per pass, and a caller that
goes away takes its request out of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from stretto.config import EngineConfig
from stretto.engine.contract import Fault, Gauge, Log, Status, Unavailable
from stretto.engine.runner import Events, Runner, Serving
from stretto.engine.scheduler import Ended, Streamed
from stretto.engine.standby import model_fingerprint
from stretto.model.mtp import Heads
from stretto.model.transformer import Transformer
from stretto.records import GenerateRequest, GenerateResponse, WeightsOrder, WeightsTaken

Event = Streamed | Ended | Exception


class Service:
    """Create and close it inside the event loop that uses it."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        version: int,
        seed: int,
        name: str,
        metrics: Log | None = None,
        heads: Heads | None = None,
    ):
        self._loop = asyncio.get_running_loop()
        self._queues: dict[int, asyncio.Queue[Event]] = {}
        self._gone: Exception | None = None
        self._updating = asyncio.Lock()
        self.broken: asyncio.Future[None] = self._loop.create_future()
        """Fails when the engine's loop has failed: nothing will be served again."""
        self.runner = Runner(
            model,
            config,
            serving=Serving(version, model_fingerprint(model) if version >= 0 else ""),
            seed=seed,
            name=name,
            deliver=lambda events: self._call(self._dispatch, events),
            metrics=metrics,
            failed=lambda error: self._call(self._break, error),
            heads=heads,
        )
        self.runner.start()

    @property
    def version(self) -> int | None:
        """Policy version that samples now; None before the first weights."""
        version = self.runner.serving.version
        return None if version < 0 else version

    @property
    def max_tokens(self) -> int:
        return self.runner.scheduler.slots.max_tokens

    def status(self) -> Status:
        scheduler, serving = self.runner.scheduler, self.runner.serving
        return Status(
            version=None if serving.version < 0 else serving.version,
            fingerprint=serving.fingerprint,
            paused=self.runner.paused,
            slots=len(scheduler.slots),
            active=len(scheduler.active),
            waiting=len(scheduler.waiting),
            sessions=len(scheduler.slots.sessions),
        )

    def gauges(self) -> list[Gauge]:
        counters = self.runner.counters
        return [
            Gauge("kv_bytes", "gauge", "Memory of the KV slots, all allocated at start", self.runner.cache.bytes),
            Gauge("requests_total", "counter", "Requests ended", counters.requests),
            Gauge("sampled_tokens_total", "counter", "Tokens sampled", counters.sampled),
            Gauge("prefill_tokens_total", "counter", "Prompt tokens computed in chunks", counters.prefilled),
            Gauge("reused_tokens_total", "counter", "Prompt tokens whose KV was there already", counters.reused),
            Gauge("guessed_tokens_total", "counter", "Tokens guessed ahead", counters.guessed),
            Gauge("guessed_right_tokens_total", "counter", "Guessed tokens that were sampled", counters.guessed_right),
            Gauge("passes_total", "counter", "Forward passes", counters.passes),
            Gauge("swaps_total", "counter", "Weight versions taken over", counters.swaps),
            Gauge("busy_seconds_total", "counter", "Seconds in forward passes", round(counters.busy_seconds, 6)),
        ]

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """The whole turn. Cancelling it takes the request out. Raises BadRequest, Unavailable, Fault."""
        async with aclosing(self._events(request, stream=False)) as events:
            async for event in events:
                if isinstance(event, GenerateResponse):
                    return event
        raise AssertionError("a request ends with a response or an exception")

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Streamed | GenerateResponse, None]:
        """Each token as it is sampled, then the response. Closing the iterator takes the request out."""
        return self._events(request, stream=True)

    async def update(self, order: WeightsOrder) -> WeightsTaken:
        """Load or patch, verify and swap. Raises WeightsRefused and, for a patch, WrongBase, after which the old
        version serves as before. Repeating the version that serves is a no-op."""
        wanted, runner = Serving(order.version, order.fingerprint), self.runner
        async with self._updating:
            if wanted == runner.serving:
                return WeightsTaken(version=order.version, pause_s=0.0)
            serving = runner.serving.fingerprint
            apart = await asyncio.to_thread(runner.standby.prepare, order, runner.live, serving)
            taken = await asyncio.wrap_future(runner.exchange(wanted, order.kv, order.drain_seconds))
            await asyncio.to_thread(runner.standby.settle, runner.live)
            return msgspec.structs.replace(taken, canary=apart)

    async def pause(self) -> None:
        await asyncio.wrap_future(self.runner.pause())

    async def resume(self) -> None:
        await asyncio.wrap_future(self.runner.resume())

    async def release(self, session: str) -> None:
        await asyncio.wrap_future(self.runner.release(session))

    async def close(self) -> None:
        """Stop the loop; whoever still waits gets Unavailable."""
        await asyncio.to_thread(self.runner.stop)
        self._leave(Unavailable("the engine is going down"))

    async def _events(
        self, request: GenerateRequest, stream: bool
    ) -> AsyncGenerator[Streamed | GenerateResponse, None]:
        if self.version is None:
            raise Unavailable("the engine has no weights yet: they come with the first /update_weights")
        if self._gone is not None:
            raise self._gone
        key = self.runner.submit(request, stream)
        queue = self._queues[key] = asyncio.Queue()
        event: Event | None = None
        try:
            while isinstance(event := await queue.get(), Streamed):
                yield event
            if isinstance(event, Exception):
                raise event
            if event.response is None:
                raise Fault(event.error)
            yield event.response
        finally:
            del self._queues[key]
            if event is None or isinstance(event, Streamed):
                self.runner.abort(key)

    def _dispatch(self, events: Events) -> None:
        for event in events:
            if queue := self._queues.get(event.job.key):
                queue.put_nowait(event)

    def _break(self, error: BaseException) -> None:
        self.broken.set_exception(error)
        self._leave(Unavailable(f"the engine's loop has failed: {error!r}"))

    def _leave(self, reason: Exception) -> None:
        self._gone = reason
        for queue in self._queues.values():
            queue.put_nowait(reason)

    def _call(self, function: Any, argument: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)
