"""The loop in its thread: what it tells of its work, and that its failure reaches those who wait."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from stretto.config import EngineConfig
from stretto.engine.runner import BUSY_SECONDS, Runner, Serving
from stretto.engine.scheduler import Ended
from stretto.model import checkpoint
from stretto.records import GenerateRequest, Sampling

from .conftest import SPEC

CONFIG = EngineConfig(slots=4, max_tokens=64, prefill_tokens=64)
REQUEST = GenerateRequest(ids=[1, 2, 3], max_tokens=30, stop=[], sampling=Sampling())


class Lines:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: queue.Queue[dict] = queue.Queue()

    def log(self, kind: str, **values) -> None:
        self.lines.put({"kind": kind, **values})


@pytest.fixture
def start():
    started: list[Runner] = []

    def make(**options) -> Runner:
        model = checkpoint.random_init(SPEC, seed=0)
        runner = Runner(model, CONFIG, serving=Serving(3, ""), seed=0, **options)
        started.append(runner)
        runner.start()
        return runner

    yield make
    for runner in started:
        runner.stop()


def test_busy_time_is_told_when_there_was_work_and_only_then(start):
    log, ended = Lines(), threading.Event()
    runner = start(deliver=lambda events: ended.set(), metrics=log)
    time.sleep(0.2)
    before = time.time()
    runner.submit(REQUEST)
    assert ended.wait(5)
    line = log.lines.get(timeout=BUSY_SECONDS + 5)
    assert (line["kind"], line["what"]) == ("busy", "engine")
    assert 0 < line["share"] <= 1
    assert before - 0.05 <= line["start"] < line["end"]
    with pytest.raises(queue.Empty):
        log.lines.get(timeout=BUSY_SECONDS * 2)


def test_a_failure_of_the_loop_is_reported(start):
    found: queue.Queue[BaseException] = queue.Queue()
    hook, threading.excepthook = threading.excepthook, lambda args: None  # the test wants no traceback

    def deliver(events) -> None:
        raise RuntimeError("nobody listens")

    try:
        runner = start(deliver=deliver, failed=found.put)
        runner.submit(REQUEST)
        assert str(found.get(timeout=5)) == "nobody listens"
        runner.stop()
    finally:
        threading.excepthook = hook


def test_a_caller_that_goes_away_does_not_end_the_loop(start):
    failures: queue.Queue[BaseException] = queue.Queue()
    ended = threading.Event()
    runner = start(deliver=lambda events: ended.set(), failed=failures.put)
    for _ in range(200):
        runner.release("nobody").cancel()  # cancelled before, while or after the loop comes to it
    runner.submit(REQUEST)
    assert ended.wait(5) and failures.empty()


def test_weights_that_give_nan_end_the_request_not_the_engine(start):
    events: queue.Queue[Ended] = queue.Queue()
    runner = start(deliver=lambda batch: [events.put(event) for event in batch])
    good = {name: tensor.clone() for name, tensor in checkpoint.named_tensors(runner.model).items()}
    checkpoint.named_tensors(runner.standby.model)["model.norm.weight"].fill_(float("nan"))
    runner.exchange(Serving(4, "")).result(5)
    runner.submit(REQUEST)
    assert events.get(timeout=5).error == "version 4 gave logits that are not finite"
    checkpoint.load_named(runner.standby.model, good)
    runner.exchange(Serving(5, "")).result(5)
    runner.submit(REQUEST)
    assert events.get(timeout=5).response.finish == "length"
