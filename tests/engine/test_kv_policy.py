"""What becomes of keys and values at a swap: kept, made again by the new weights, or let go with their generation.

The loop is driven without its thread, so that a swap meets a generation where the test wants it; numerics are exact, so
that "the same as a fresh prefill" means the same bits.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from stretto.config import EngineConfig
from stretto.engine.runner import Events, Runner, Serving
from stretto.engine.scheduler import Ended
from stretto.model import checkpoint
from stretto.model.numerics import Numerics
from stretto.records import GenerateRequest, GenerateResponse, KvPolicy, Sampling, WeightsTaken

from .conftest import SPEC

EXACT = Numerics(exact=True)
IDS = np.random.default_rng(0).integers(0, 256, 40).tolist()


class Driven:
    """An engine whose passes the test makes."""

    def __init__(self, version: int = 0) -> None:
        self.ended: dict[int, GenerateResponse] = {}
        self.version = version
        model = checkpoint.random_init(SPEC, seed=version, numerics=EXACT)
        config = EngineConfig(slots=6, max_tokens=160, prefill_tokens=64)
        self.runner = Runner(model, config, serving=Serving(version, str(version)), seed=0, deliver=self._take)

    def _take(self, events: Events) -> None:
        for event in events:
            if isinstance(event, Ended):
                assert event.response is not None, event.error
                self.ended[event.job.key] = event.response

    def ask(self, ids: list[int], tokens: int, session: str = "", seed: int = 7) -> int:
        sampling = Sampling(seed=seed)
        return self.runner.submit(
            GenerateRequest(ids=ids, max_tokens=tokens, stop=[], sampling=sampling, session=session)
        )

    def passes(self, count: int) -> None:
        for _ in range(count):
            self.runner.advance()

    def until(self, *keys: int) -> None:
        for _ in range(300):
            if all(key in self.ended for key in keys):
                return
            self.runner.advance()
        raise AssertionError("a request did not end")

    def swap(self, version: int, kv: KvPolicy, seconds: float = 30.0) -> Future[WeightsTaken]:
        model = checkpoint.random_init(SPEC, seed=version, numerics=EXACT)
        checkpoint.load_named(self.runner.standby.model, checkpoint.named_tensors(model))
        return self.runner.exchange(Serving(version, str(version)), kv, seconds)

    def versions(self, key: int) -> list[int]:
        return np.frombuffer(self.ended[key].versions, "<i4").tolist()

    def logprobs(self, key: int) -> np.ndarray:
        return np.frombuffer(self.ended[key].logprobs, "<f4")


def crossed(kv: KvPolicy) -> tuple[Driven, int, int]:
    """A generation of 12 tokens that meets a swap after its 5th, and what a fresh engine says of the same history."""
    engine = Driven()
    key = engine.ask(IDS, 12)
    engine.passes(5)
    engine.swap(1, kv)
    engine.until(key)
    fresh = Driven(version=1)
    again = fresh.ask(IDS + engine.ended[key].ids[:5], 7)
    fresh.until(again)
    engine.ended[-1] = fresh.ended[again]
    return engine, key, -1


def test_recompute_goes_on_as_a_fresh_prefill_under_the_new_weights_to_the_bit() -> None:
    engine, key, fresh = crossed(KvPolicy.RECOMPUTE)
    assert engine.versions(key) == [0] * 5 + [1] * 7
    assert engine.ended[key].ids[5:] == engine.ended[fresh].ids
    assert engine.logprobs(key)[5:].tobytes() == engine.logprobs(fresh).tobytes()
    alone = Driven()
    before = alone.ask(IDS, 5)
    alone.until(before)
    assert engine.logprobs(key)[:5].tobytes() == alone.logprobs(before).tobytes()  # what was said stays said


def test_keep_goes_on_with_the_keys_it_has() -> None:
    engine, key, fresh = crossed(KvPolicy.KEEP)
    assert engine.versions(key) == [0] * 5 + [1] * 7
    assert abs(engine.logprobs(key)[5] - engine.logprobs(fresh)[0]) > 1e-4


@pytest.mark.parametrize("kv", [KvPolicy.KEEP, KvPolicy.RECOMPUTE])
def test_a_session_between_two_turns(kv: KvPolicy) -> None:
    engine = Driven()
    first = engine.ask(IDS, 6, session="a")
    engine.until(first)
    engine.swap(1, kv)
    history = IDS + engine.ended[first].ids + [1, 2, 3]
    second = engine.ask(history, 6, session="a")
    engine.until(second)
    fresh = Driven(version=1)
    again = fresh.ask(history, 6)
    fresh.until(again)
    same = engine.logprobs(second).tobytes() == fresh.logprobs(again).tobytes()
    assert same == (kv is KvPolicy.RECOMPUTE)
    assert engine.ended[second].cached == (0 if kv is KvPolicy.RECOMPUTE else 45)


def test_drain_lets_generations_end_and_the_next_ones_wait() -> None:
    engine = Driven()
    under_way = [engine.ask(IDS[n:], 4 + 3 * n) for n in range(3)]
    engine.passes(3)
    answer = engine.swap(1, KvPolicy.DRAIN)
    engine.passes(1)
    waiting = [engine.ask(IDS[5 + n :], 6) for n in range(3)]
    engine.until(*under_way)
    assert not any(key in engine.ended for key in waiting)
    engine.until(*waiting)
    assert [engine.versions(key) for key in under_way] == [[0] * (4 + 3 * n) for n in range(3)]
    assert all(engine.versions(key) == [1] * 6 for key in waiting)
    taken = answer.result(0)
    assert taken.drain_s > 0 and taken.note == "" and taken.pause_s < 0.1


def test_a_drain_that_takes_too_long_goes_on_as_keep_and_says_so() -> None:
    engine = Driven()
    key = engine.ask(IDS, 20)
    engine.passes(4)
    answer = engine.swap(1, KvPolicy.DRAIN, seconds=0.0)
    engine.passes(1)
    waiting = engine.ask(IDS[3:], 3)
    engine.until(key, waiting)
    assert set(engine.versions(key)) == {0, 1} and engine.versions(key) == sorted(engine.versions(key))
    assert engine.versions(waiting) == [1] * 3
    assert "1 generations had not ended 0 s after version 1 came" in answer.result(0).note


def test_a_paused_engine_does_not_drain_for_ever() -> None:
    """With its thread, which sleeps while it is paused: the deadline wakes it."""
    engine = Driven()
    engine.ask(IDS, 100)
    engine.passes(2)
    engine.runner.pause()
    engine.runner.start()
    try:
        taken = engine.swap(1, KvPolicy.DRAIN, seconds=0.2).result(5)
        assert taken.drain_s >= 0.2 and "kv = keep" in taken.note
    finally:
        engine.runner.stop()
