"""Recorded rollouts once more through the engine, which is made to say what was recorded.

The scheduler, the KV slots, the chunks and the ragged decoding batches are the engine's own, turn by turn with sessions
and shared prefixes; only the draw is replaced by the recorded token. So engines of different arithmetic give log-probs
and routes of the very same tokens, and can be timed on the very same work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stretto.config import EngineConfig
from stretto.engine.cache import KVCache
from stretto.engine.forward import forward_of, logits, warm_up
from stretto.engine.scheduler import Ended, Job, Scheduler
from stretto.engine.slots import Routes
from stretto.model.transformer import Transformer
from stretto.records import GenerateRequest, RouteChunk, Sampling, Segment


@dataclass(frozen=True)
class Scored:
    """What the engine says of one segment. `T` counts its tokens up to the last sampled one, `N` the sampled ones."""

    logprobs_N: np.ndarray  # float32
    routes_TLK: np.ndarray  # int32, rows of the network's inputs, each of its turn's pass; [T, 0, 0] without capture
    chunks: list[RouteChunk]  # as they would travel, one a turn


@dataclass(frozen=True)
class Pass:
    """All segments, and what it took."""

    scored: list[Scored]
    seconds: float
    sampled: int
    prefilled: int


@torch.inference_mode()
def force(model: Transformer, segments: Sequence[Segment], config: EngineConfig, capture: bool = True) -> Pass:
    """Score the sampled tokens of `segments` at temperature 1. Without `capture` no routes are kept, sent, paid for."""
    spec = model.spec
    layers, per_token = spec.route_shape if capture else (0, 0)
    routes = Routes(layers, per_token, spec.experts)
    scheduler = Scheduler(config.slots, config.max_tokens, config.prefill_tokens, spec.vocab_size, routes)
    kv_heads, key_dim, value_dim = spec.cache_shape
    cache = KVCache(spec.layers, config.slots, kv_heads, config.max_tokens, key_dim, value_dim)
    forward = forward_of(model, cache)
    warm_up(forward)
    speakers = [_Speaker(number, segment) for number, segment in enumerate(segments)]
    start = time.perf_counter()
    for speaker in speakers:
        scheduler.submit(speaker.turn())
    sampled = prefilled = 0
    while (plan := scheduler.plan()) is not None:
        cache.copy(plan.copies)
        passed = forward(plan)
        cache.copy(plan.twins)
        said_N = np.array(
            [
                speakers[scheduler.active[slot].key].ids_T[position]
                for slot, position in zip(plan.samplers_N.tolist(), plan.next_N.tolist(), strict=True)
            ],
            np.int64,
        )
        logp_NV = torch.log_softmax(logits(model, passed.hidden_ND), dim=-1)
        logprobs_N = logp_NV.gather(1, torch.from_numpy(said_N).unsqueeze(1)).squeeze(1).numpy()
        sampled, prefilled = sampled + len(said_N), prefilled + len(plan.slots_T) - plan.decoding
        for event in scheduler.commit(
            plan, passed.routes_TLK if capture else None, said_N.astype(np.int32), logprobs_N, version=0
        ):
            assert isinstance(event, Ended) and event.response is not None
            speaker = speakers[event.job.key]
            rows = scheduler.slots.routes_SMLK[event.job.slot, speaker.fresh].astype(np.int32)
            speaker.take(np.frombuffer(event.response.logprobs, "<f4"), rows, event.response.routes)
            if not speaker.done:
                scheduler.submit(speaker.turn())
    seconds = time.perf_counter() - start
    return Pass([speaker.scored() for speaker in speakers], seconds, sampled, prefilled)


class _Speaker:
    """One segment, said again turn by turn."""

    def __init__(self, key: int, segment: Segment) -> None:
        self.key = key
        last = int(np.flatnonzero(segment.sampled_T)[-1])
        self.ids_T = segment.ids_T[: last + 1]
        sampled_T = segment.sampled_T[: last + 1]
        edges = np.flatnonzero(np.diff(sampled_T.astype(np.int8))) + 1
        self._turns = list(zip(edges[::2].tolist(), [*edges[1::2].tolist(), last + 1], strict=True))
        self._turn = self._known = 0
        self._logprobs: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._chunks: list[RouteChunk] = []

    @property
    def done(self) -> bool:
        return self._turn == len(self._turns)

    @property
    def fresh(self) -> slice:
        """Positions whose rows this turn brings."""
        return slice(self._known, self._turns[self._turn][1] - 1)

    def turn(self) -> Job:
        start, end = self._turns[self._turn]
        request = GenerateRequest(
            ids=self.ids_T[:start].tolist(),
            max_tokens=end - start,
            stop=[],
            sampling=Sampling(),
            session=f"segment-{self.key}",
            routes_from=self._known,
        )
        return Job(self.key, request, seed=0)

    def take(self, logprobs_N: np.ndarray, rows_TLK: np.ndarray, chunk: RouteChunk | None) -> None:
        self._known = self.fresh.stop
        self._turn += 1
        self._logprobs.append(logprobs_N)
        self._rows.append(rows_TLK)
        if chunk is not None:
            self._chunks.append(chunk)

    def scored(self) -> Scored:
        return Scored(np.concatenate(self._logprobs), np.concatenate(self._rows), self._chunks)
