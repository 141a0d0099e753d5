"""The engine's loop, in a thread of its own: forward, sample, write down, deliver.

    server's thread ── submit, abort, pause, exchange ──▶ inbox ──▶ [ between two passes: carry out what came ]
                    ◀── deliver(events), once a pass ───────────── [ pass: copies, forward, sample, commit   ]

Everything that changes the engine's state is a call carried out by the loop between two passes. Weights therefore
change strictly between two tokens, without a lock that could be forgotten.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from stretto.config import EngineConfig
from stretto.engine import lookahead
from stretto.engine.cache import KVCache
from stretto.engine.contract import Log
from stretto.engine.drafter import Drafter, Guesser, Repeats, can_guess
from stretto.engine.forward import warm_up
from stretto.engine.sampler import Drawn, sample, uniforms
from stretto.engine.scheduler import Ended, Job, Plan, Scheduler, Streamed
from stretto.engine.slots import Routes
from stretto.engine.standby import Copy, Standby
from stretto.model.mtp import Heads
from stretto.model.transformer import Transformer
from stretto.records import GenerateRequest, KvPolicy, WeightsTaken

BUSY_SECONDS = 0.5
"""One `busy` line per so many seconds in which there was work."""

Events = list[Ended | Streamed]


@dataclass
class Counters:
    """Totals since start, for /metrics. Written by the loop, read by anyone."""

    passes: int = 0
    prefilled: int = 0  # rows of prompts that went through the network
    reused: int = 0  # prompt tokens that did not have to
    sampled: int = 0
    guessed: int = 0
    guessed_right: int = 0
    requests: int = 0
    swaps: int = 0
    busy_seconds: float = 0.0


@dataclass(frozen=True)
class Serving:
    """What samples now: one object, so that nobody sees half of a swap."""

    version: int  # -1: no weights yet
    fingerprint: str


@dataclass(frozen=True)
class Drain:
    """A swap that waits for generations to end."""

    serving: Serving
    answer: Future[WeightsTaken]
    since: float  # time.monotonic()
    seconds: float


class Runner:
    """One network, its slots and its thread. `deliver` is called in the loop's thread, at most once per pass."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        serving: Serving,
        seed: int,
        name: str = "engine",
        deliver: Callable[[Events], None],
        metrics: Log | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
        heads: Heads | None = None,
    ):
        spec = model.spec
        layers, per_token = spec.route_shape
        self.serving = serving
        self.counters = Counters()
        self.scheduler = Scheduler(
            config.slots,
            config.max_tokens,
            config.prefill_tokens,
            spec.vocab_size,
            Routes(layers, per_token, spec.experts),
        )
        kv_heads, key_dim, value_dim = spec.cache_shape
        guesses = bool(config.speculate) and can_guess(heads, model)
        layers = spec.layers + guesses  # the head that guesses is one more
        self.cache = KVCache(layers, config.slots, kv_heads, config.max_tokens, key_dim, value_dim)
        self.live = Copy(model, self.cache, every_row=guesses)
        warm_up(self.live.forward)
        self.drafter: Drafter | None = None
        if heads is not None and guesses:
            self.drafter = Guesser(heads, self.cache, config.speculate)
        elif config.speculate:
            self.drafter = Repeats(config.speculate)
        one, none = np.ones(1, np.float32), np.zeros(1, np.int64)
        sample(torch.zeros(1, spec.vocab_size), one, one, none, uniforms(none, none))
        self.standby = Standby(spec, model.numerics, self.cache, every_row=guesses)
        self._drain: Drain | None = None
        self._deliver, self._failed, self._metrics = deliver, failed, metrics
        self._keys = itertools.count(1)
        self._seed = f"{name}/{seed}"
        self._inbox: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        self._wake = threading.Event()
        self._paused = False
        self._stopping = False
        self._mark, self._worked = time.time(), 0.0
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the pass in progress. Requests in flight are not answered."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def model(self) -> Transformer:
        """What samples now."""
        return self.live.model

    @property
    def paused(self) -> bool:
        return self._paused

    def submit(self, request: GenerateRequest, stream: bool = False) -> int:
        """Queue a request; its events come through `deliver` under the returned key. Raises BadRequest."""
        self.scheduler.check(request)
        key = next(self._keys)
        seed = request.sampling.seed
        seed = xxhash.xxh64_intdigest(f"{self._seed}/{key}".encode()) if seed is None else seed % (1 << 64)
        job = Job(key, request, seed, stream)
        self._tell(lambda: self.scheduler.submit(job))
        return key

    def abort(self, key: int) -> None:
        """Drop a request whose caller has gone; nothing is delivered, its slot becomes idle."""
        self._tell(lambda: self.scheduler.abort(key))

    def release(self, session: str) -> Future[None]:
        """Forget a session; a request of it that is running ends as `aborted`."""
        return self._ask(lambda: self._deliver(list(self.scheduler.release(session))))

    def pause(self) -> Future[None]:
        """Done when no pass is running; none starts until `resume`."""
        return self._ask(lambda: setattr(self, "_paused", True))

    def resume(self) -> Future[None]:
        return self._ask(lambda: setattr(self, "_paused", False))

    def exchange(
        self, serving: Serving, kv: KvPolicy = KvPolicy.KEEP, drain_seconds: float = 0.0
    ) -> Future[WeightsTaken]:
        """Put the weights prepared in `standby` to work, between two tokens; what becomes of old keys and values is up
        to `kv`. A drain that has not ended after `drain_seconds` goes on as `keep`."""
        answer: Future[WeightsTaken] = Future()

        def begin() -> None:
            if kv is KvPolicy.DRAIN:
                self.scheduler.holding = True
                self._drain = Drain(serving, answer, time.monotonic(), drain_seconds)
            else:
                _resolve(answer, self._swap(serving, kv))

        self._tell(begin)
        return answer

    def _swap(self, serving: Serving, kv: KvPolicy) -> WeightsTaken:
        start = time.perf_counter()
        self.live = self.standby.exchange(self.live)
        self.serving = serving
        self.scheduler.swapped(recompute=kv is KvPolicy.RECOMPUTE)
        self.counters.swaps += 1
        return WeightsTaken(version=serving.version, pause_s=time.perf_counter() - start)

    def _attend_drain(self) -> None:
        """Swap when what was under way has ended, or has taken too long."""
        drain, scheduler = self._drain, self.scheduler
        if drain is None:
            return
        waited, left = time.monotonic() - drain.since, len(scheduler.active)
        if left and waited < drain.seconds:
            return
        note = (
            f"{left} generations had not ended {drain.seconds:g} s after version {drain.serving.version} came: they go "
            "on with the keys and values they have (kv = keep), and their tokens say which version sampled them"
        )
        taken = self._swap(drain.serving, KvPolicy.KEEP)
        self._drain, scheduler.holding = None, False
        _resolve(drain.answer, msgspec.structs.replace(taken, drain_s=waited, note=note if left else ""))

    def _tell(self, act: Callable[[], Any], answer: Future[Any] | None = None) -> None:
        self._inbox.append((act, answer))
        self._wake.set()

    def _ask(self, act: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._tell(act, answer)
        return answer

    @torch.inference_mode()
    def advance(self) -> bool:
        """Carry out what came, then make one pass; False when there was nothing to compute. The loop's own turn, for
        those who drive an engine without its thread."""
        self._attend_inbox()
        self._attend_drain()
        plan = None if self._paused else self.scheduler.plan()
        if plan is None:
            return False
        start = time.perf_counter()
        if events := self._step(plan):
            self._count(events)
            self._deliver(events)
        self._account(time.perf_counter() - start)
        return True

    def _loop(self) -> None:
        try:
            while not self._stopping:
                if not self.advance():
                    self._account(0.0)
                    self._wake.wait(BUSY_SECONDS if self._worked else self._patience())
                    self._wake.clear()
                    self._mark = self._mark if self._worked else time.time()
        except BaseException as error:
            self._failed(error)
            raise

    def _patience(self) -> float | None:
        """Seconds until there is something to do without being told; None when there is nothing."""
        drain = self._drain
        return None if drain is None else max(0.0, drain.since + drain.seconds - time.monotonic())

    def _attend_inbox(self) -> None:
        while self._inbox:
            act, answer = self._inbox.popleft()
            result = act()
            if answer is not None:
                _resolve(answer, result)

    def _step(self, plan: Plan) -> Events:
        """One pass. Returns what it means for the callers."""
        self.cache.copy(plan.copies)
        model, version, scheduler = self.model, self.serving.version, self.scheduler
        sequences = plan.decoding
        if self.drafter is not None and lookahead.suits(plan):
            plan = lookahead.extended(plan, self.drafter.propose(plan, scheduler, model))
        passed = self.live.forward(plan)
        slots_N = plan.samplers_N
        if len(slots_N):
            drawn = sample(
                self.live.forward.logits(passed.hidden_ND),
                scheduler.temperature_S[slots_N],
                scheduler.top_p_S[slots_N],
                scheduler.top_k_S[slots_N],
                uniforms(scheduler.seed_S[slots_N], plan.next_N),
                model.numerics.exact,
            )
        else:
            drawn = Drawn(np.zeros(0, np.int32), np.zeros(0, np.float32), None)
        if plan.decoding > sequences:
            self.counters.guessed += plan.decoding - sequences
            kept = lookahead.accepted(plan, drawn.ids_N, drawn.logprobs_N, scheduler.stop_SV)
            plan, passed, drawn = lookahead.narrowed(plan, kept), passed.rows(kept), drawn.rows(kept)
            self.counters.guessed_right += plan.decoding - sequences
        self.counters.passes += 1
        self.counters.sampled += len(plan.samplers_N)
        self.counters.prefilled += len(plan.slots_T) - plan.decoding
        events = scheduler.commit(plan, passed.routes_TLK, drawn.ids_N, drawn.logprobs_N, version, drawn.support)
        if self.drafter is not None:
            self.drafter.absorb(plan, scheduler, model, passed)
        self.cache.copy(plan.twins)
        return events

    def _count(self, events: Events) -> None:
        for event in events:
            if isinstance(event, Ended):
                self.counters.requests += 1
                self.counters.reused += event.job.cached

    def _account(self, seconds: float) -> None:
        """Sum up working time and log it as one `busy` line per window."""
        now = time.time()
        self._worked += seconds
        self.counters.busy_seconds += seconds
        if now - self._mark < BUSY_SECONDS:
            return
        if self._worked and self._metrics is not None:
            share = min(self._worked / (now - self._mark), 1.0)
            self._metrics.log("busy", start=self._mark, end=now, what="engine", share=round(share, 4))
        self._mark, self._worked = now, 0.0


def _resolve(answer: Future[Any], result: Any) -> None:
    if answer.set_running_or_notify_cancel():  # else the caller has gone away
        answer.set_result(result)
