"""vLLM as the rest of Stretto sees an engine: requests as awaitables, weights as an update between two tokens.

    update:  read and verify the file ─▶ pause (requests stay) ─▶ new salt, unbegun requests start over
             ─▶ workers take the weights, hash them ─▶ label ─▶ resume          (a failure: the old file is taken again)

Versions come from vLLM's core, which labels each token where it is sampled. KV is kept apart by a salt that changes
with every swap, so that no request ever begins on old weights' KV; a request that has sampled goes on with what it has.

Left out: keeping a session's KV over a swap (its next turn is computed anew), several engines behind one front.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from stretto.config import EngineConfig
from stretto.engine import vllm_turn, vllm_weights
from stretto.engine.canary import judge
from stretto.engine.contract import (
    BadRequest,
    Fault,
    Gauge,
    Log,
    Status,
    Unavailable,
    WeightsRefused,
    WrongBase,
    check_request,
)
from stretto.engine.vllm_weights import Files
from stretto.model.spec import ModelSpec
from stretto.records import (
    Canary,
    GenerateRequest,
    GenerateResponse,
    KvPolicy,
    Sampling,
    WeightsOrder,
    WeightsTaken,
)

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

BUSY_SECONDS = 0.5
"""One `busy` line per so many seconds in which there was work; also how often a dead core is noticed."""


CANARY_TOKENS = 48
SAME_NATS, ROUNDED_NATS = 0.02, 0.5
"""How far a log-prob of the canary may move when the same function is computed again: in float32, and where rounding to
bf16 comes in. Weights that are stale or packed wrongly move it by nats."""

MEAN_NATS = 0.1
"""How far log-probs may be from the trainer's on average where activations are bf16."""


class Sampled(NamedTuple):
    """One token of a stream."""

    token: int
    logprob: float


class Weights(NamedTuple):
    """What serves, and where it can be had again."""

    version: int
    fingerprint: str
    files: Files


@dataclass(eq=False)
class Turn:
    """A request under way. `id` changes when it starts over."""

    request: GenerateRequest
    seed: int | None
    id: str = ""
    begun: bool = False  # its first token has come
    again: bool = False  # the present attempt is void
    output: vllm_turn.Output = field(default_factory=vllm_turn.Output)


class VllmService:
    """Create and close it inside the event loop that uses it; `vllm.start` does. Owns `llm`."""

    def __init__(
        self, llm: AsyncLLM, spec: ModelSpec, config: EngineConfig, *, seed: int, name: str, metrics: Log | None
    ):
        self.max_tokens = config.max_tokens
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._llm, self._spec, self._config, self._metrics = llm, spec, config, metrics
        self._seed = f"{name}/{seed}"
        self._serving: Weights | None = None
        self._salt = 0  # one per set of weights tried
        self._turns: set[Turn] = set()
        self._sessions: set[str] = set()
        self._paused = False
        self._changing = asyncio.Lock()
        self._ids = itertools.count(1)
        self._gone: Exception | None = None
        self._counts = dict.fromkeys(("requests", "sampled", "reused", "swaps", "restarts"), 0)
        self._busy = 0.0
        self._watching = asyncio.create_task(self._watch())

    @property
    def version(self) -> int | None:
        return self._serving.version if self._serving else None

    def status(self) -> Status:
        begun = sum(turn.begun for turn in self._turns)
        return Status(
            version=self.version,
            fingerprint=self._serving.fingerprint if self._serving else "",
            paused=self._paused,
            slots=self._config.slots,
            active=begun,
            waiting=len(self._turns) - begun,
            sessions=len(self._sessions),
        )

    def gauges(self) -> list[Gauge]:
        counts = self._counts
        return [
            Gauge("requests_total", "counter", "Requests ended", counts["requests"]),
            Gauge("sampled_tokens_total", "counter", "Tokens sampled", counts["sampled"]),
            Gauge("reused_tokens_total", "counter", "Prompt tokens whose KV was there already", counts["reused"]),
            Gauge("swaps_total", "counter", "Weight versions taken over", counts["swaps"]),
            Gauge("restarts_total", "counter", "Requests begun anew because of a swap", counts["restarts"]),
            Gauge("busy_seconds_total", "counter", "Seconds with a request to work on", round(self._busy, 6)),
        ]

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        async with aclosing(self.stream(request)) as events:
            async for event in events:
                if isinstance(event, GenerateResponse):
                    return event
        raise AssertionError("a request ends with a response or an exception")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Sampled | GenerateResponse, None]:
        if self._serving is None:
            raise Unavailable("the engine has no weights yet: they come with the first /update_weights")
        async with aclosing(self._sample(request)) as events:
            async for event in events:
                yield event

    async def open(self, folder: Path, version: int) -> None:
        """Serve the checkpoint folder that vLLM has loaded as `version`, or nothing yet for -1; but first vLLM must
        show that it can do what training asks of it. Raises WeightsRefused and Fault.

        Updates must reach every kernel: a packed copy of old weights would go on serving, and nothing would say so.
        So vLLM is given the folder's weights in another basis, and then as they are; neither may change what it says.
        And one answer must be whole: a flag for routes can be set and the field still be empty.
        """
        files = vllm_weights.in_folder(folder, self._spec)
        await asyncio.to_thread(vllm_weights.check, files, self._spec)
        fingerprint = await asyncio.to_thread(vllm_weights.state, files)
        loaded, fp32 = await self._canary(), self._config.dtype == "float32"
        limit = SAME_NATS if fp32 and vllm_weights.rounded(files) else ROUNDED_NATS
        for turn in (True, False):
            await self._llm.collective_rpc("take_weights", args=(files, turn))
            moved = float(np.abs(await self._canary() - loaded).max())
            if not moved <= limit:
                raise Fault(
                    f"this vLLM does not take new weights as it loads them: given those of {folder} "
                    f"{'in another basis' if turn else 'again'}, it says something else (log-probs off by {moved:.3g})"
                )
        await self._swap(Weights(version, fingerprint, files))
        request = GenerateRequest(ids=self._canary_ids, max_tokens=2, stop=[], sampling=Sampling())
        async with aclosing(self._sample(request)) as events:
            async for _ in events:
                pass
        self._counts = dict.fromkeys(self._counts, 0)
        if version < 0:
            self._serving = None

    async def update(self, order: WeightsOrder) -> WeightsTaken:
        async with self._changing:
            serving = self._serving
            if serving and (serving.version, serving.fingerprint) == (order.version, order.fingerprint):
                return WeightsTaken(version=order.version, pause_s=0.0)
            if order.parent:
                raise WrongBase("vLLM loads whole files: it has no memory for a second copy that a patch could go into")
            if order.kv is not KvPolicy.KEEP:
                raise BadRequest(f"kv is {order.kv}, but with vLLM a generation can only keep its keys and values")
            path = Path(order.path)
            files = await asyncio.to_thread(vllm_weights.in_file, path, self._spec)
            await asyncio.to_thread(vllm_weights.check, files, self._spec)
            found = await asyncio.to_thread(vllm_weights.state, files)
            if found != order.fingerprint:
                raise WeightsRefused(
                    f"{path} has fingerprint {found}, but {order.fingerprint or '(none)'} was announced"
                )
            pause = await self._swap(Weights(order.version, order.fingerprint, files))
            if order.canary is None:
                return WeightsTaken(version=order.version, pause_s=pause)
            if self._paused:
                note = "the engine is paused, so its canary could not be asked"
                return WeightsTaken(version=order.version, pause_s=pause, note=note)
            return WeightsTaken(version=order.version, pause_s=pause, canary=await self._check(order.canary, serving))

    async def _check(self, canary: Canary, before: Weights | None) -> float:
        """The canary, after the swap: vLLM has no second copy to ask. Where it fails the old weights come back."""
        assert self._serving is not None
        limit = SAME_NATS if self._config.dtype == "float32" else MEAN_NATS
        try:
            return judge(await self._canary(canary.ids), canary, self._serving.version, limit)
        except WeightsRefused:
            if before is not None:
                await self._swap(before)
            else:
                self._serving = None
            raise

    async def pause(self) -> None:
        async with self._changing:
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            self._paused = True

    async def resume(self) -> None:
        async with self._changing:
            await self._call(self._llm.resume_generation())
            self._paused = False

    async def release(self, session: str) -> None:
        """Its KV stays in vLLM's prefix cache until the room is needed."""
        self._sessions.discard(session)
        for turn in [turn for turn in self._turns if turn.request.session == session]:
            await self._call(self._llm.abort(turn.id))

    async def close(self) -> None:
        """Whoever still waits gets Unavailable."""
        self._gone = self._gone or Unavailable("the engine is going down")
        self._watching.cancel()
        if not self._llm.errored:
            await self._llm.abort([turn.id for turn in self._turns])
            await asyncio.sleep(0)
        await asyncio.to_thread(self._llm.shutdown)

    async def _swap(self, weights: Weights) -> float:
        """Between two tokens. Raises WeightsRefused when the old weights serve on."""
        start = time.perf_counter()
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
        try:
            self._salt += 1
            await self._restart_unbegun()
            try:
                await self._take(weights)
            except Exception as error:
                await self._take_back(error)
                raise WeightsRefused(f"vLLM could not take version {weights.version}: {error}") from error
            self._serving = weights
            self._counts["swaps"] += 1
        finally:
            if not self._paused and self._gone is None:
                await self._call(self._llm.resume_generation())
        return time.perf_counter() - start

    async def _canary(self, ids: list[int] | None = None) -> np.ndarray:
        """float32 [T - 1]: log-probs of a few fixed tokens, computed anew."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        id = str(next(self._ids))
        ids = ids or self._canary_ids
        async for output in self._llm.generate(tokens_input(ids, cache_salt=f"canary {id}"), parameters, id):
            if output.finished:
                found = output.prompt_logprobs[1:]
                return np.array([each[token].logprob for token, each in zip(ids[1:], found, strict=True)], np.float32)
        raise Fault("vLLM ended the canary without an answer")

    @property
    def _canary_ids(self) -> list[int]:
        count = min(CANARY_TOKENS, self.max_tokens - 2)
        return (np.arange(1, count + 1) * 7919 % self._spec.vocab_size).tolist()

    async def _take(self, weights: Weights) -> None:
        roots = await self._llm.collective_rpc("take_weights", args=(weights.files,))
        if wrong := [root for root in roots if root != weights.fingerprint]:
            raise WeightsRefused(f"a worker was given {wrong[0]}, not {weights.fingerprint}")
        await self._llm.update_weight_version(str(weights.version))

    async def _take_back(self, reason: Exception) -> None:
        """vLLM writes over what it has, so the old weights are read again; if that fails too, nothing may be served."""
        if self._serving is None:
            return
        try:
            await self._take(self._serving)
        except Exception as error:
            broken = Fault(f"new weights failed ({reason}), and so did going back to the old ones: {error}")
            self._break(broken)
            raise broken from error

    async def _restart_unbegun(self) -> None:
        """What has sampled nothing yet may hold KV of the old weights: it starts over behind the pause."""
        unbegun = [turn for turn in self._turns if not turn.begun and not turn.again]
        for turn in unbegun:
            turn.again = True
        for turn in unbegun:
            await self._llm.abort(turn.id)

    async def _sample(self, request: GenerateRequest) -> AsyncGenerator[Sampled | GenerateResponse, None]:
        if self._gone is not None:
            raise self._gone
        check_request(request, self._spec.vocab_size, self.max_tokens)
        vllm_turn.check(request.sampling)
        turn = Turn(request, self._seed_of(request))
        self._turns.add(turn)
        if request.session:
            self._sessions.add(request.session)
        try:
            while not turn.output.finish or turn.again:
                turn.begun, turn.again, turn.output = False, False, vllm_turn.Output()
                async with aclosing(self._attempt(turn)) as tokens:
                    async for token in tokens:
                        yield token
                self._counts["restarts"] += turn.again
                if self._gone is not None:
                    raise self._gone
            response = vllm_turn.response(request, turn.output, self._spec, self._config.routes == "required")
            self._counts["requests"] += 1
            self._counts["sampled"] += len(response.ids)
            self._counts["reused"] += response.cached
            yield response
        finally:
            self._turns.discard(turn)

    async def _attempt(self, turn: Turn) -> AsyncGenerator[Sampled, None]:
        """Tokens of one try; `turn.output` holds them all at its end. Leaving it takes the request out of vLLM."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        turn.id = str(next(self._ids))
        prompt = tokens_input(turn.request.ids, cache_salt=str(self._salt))
        parameters = vllm_turn.parameters(turn.request, turn.seed)
        try:
            async with aclosing(self._llm.generate(prompt, parameters, turn.id)) as outputs:
                async for output in outputs:
                    if turn.again:
                        return
                    for token in self._taken(turn, output):
                        yield token
        except EngineDeadError as error:
            self._break(error)
            raise Unavailable("vLLM's engine core has died") from error
        except EngineGenerateError as error:
            raise Fault(f"vLLM failed at the request: {error.__cause__ or error!r}") from error
        except ValueError as error:
            raise BadRequest(f"vLLM refuses the request: {error}") from error

    def _taken(self, turn: Turn, output: RequestOutput) -> list[Sampled]:
        fresh = turn.output.add(output)
        turn.begun = turn.begun or bool(fresh)
        return [Sampled(token, logprob) for token, logprob in fresh]

    def _seed_of(self, request: GenerateRequest) -> int | None:
        """vLLM draws from one stream per request, so the turns of a session must not begin with the same seed."""
        seed = request.sampling.seed
        if seed is None:
            return None
        return xxhash.xxh64_intdigest(f"{seed % (1 << 64)}/{len(request.ids)}".encode()) >> 1

    async def _call(self, call: Any) -> Any:
        """A switch of vLLM's; a dead core is the end of this engine."""
        if self._gone is not None:
            call.close()
            raise self._gone
        try:
            return await call
        except Exception as error:
            if self._llm.errored:
                self._break(error)
                raise Unavailable("vLLM's engine core has died") from error
            raise

    async def _watch(self) -> None:
        """Sum up working time and log it as one `busy` line per window; notice a core that has died in idleness."""
        mark, worked, step = time.time(), 0.0, BUSY_SECONDS / 10
        while True:
            before = time.time()
            await asyncio.sleep(step)
            now = time.time()
            if self._turns and not self._paused:
                worked += now - before
                self._busy += now - before
            if self._llm.errored and self._gone is None:
                self._break(RuntimeError("vLLM's engine core has died"))
            if now - mark < BUSY_SECONDS:
                continue
            if worked and self._metrics is not None:
                share = round(min(worked / (now - mark), 1.0), 4)
                self._metrics.log("busy", start=mark, end=now, what="engine", share=share)
            mark, worked = now, 0.0

    def _break(self, error: BaseException) -> None:
        if self._gone is None:
            self._gone = Unavailable(f"vLLM has failed: {error!r}")
            self.broken.set_exception(error)
