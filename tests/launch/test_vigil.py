"""A process that hangs is found and named, one that is only slow, starting or not to be judged is left alone. Real
processes, real signals; only the clock is the test's where minutes would pass."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.launch.local import Child, Processes, free_port
from stretto.launch.restarts import Restarts
from stretto.launch.vigil import TRAINER_TIMES, Vigil

from .test_local import HEALTHY, SLEEP, python, wait_until


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path, restarts=Restarts(3, 60.0))
    yield found
    for child in found.children:
        if child.exit_code is None:
            os.kill(child.process.pid, signal.SIGCONT)
    found.stop(grace=0.2)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vigil(clock: Clock) -> Iterator[Vigil]:
    found = Vigil(silent_seconds=30.0, start_seconds=100.0, clock=clock)
    yield found
    found.close()


def healthy(processes: Processes, name: str, role: str, **details) -> Child:
    port = free_port("127.0.0.1")
    command = python(HEALTHY.replace("READY", "true"), str(port))
    child = processes.start(name, command, f"http://127.0.0.1:{port}", role=role, **details)
    wait_until(lambda: processes.answers(child))
    return child


def pass_time(vigil: Vigil, clock: Clock, children: list[Child], seconds: float, status=None) -> list[str]:
    """Look every second of the clock; the first verdicts, each as a sentence."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        hung = vigil.look(children, status)
        if hung:
            return [f"{child.name} {why}" for child, why in hung]
        time.sleep(0.005)
    return []


def test_ASY_14_a_hung_engine_is_killed_named_and_started_again(processes: Processes) -> None:
    """The whole of it with the real clock: SIGSTOP, found, killed, a new process that answers."""
    vigil = Vigil(silent_seconds=2.0, start_seconds=30.0)
    died: list[str] = []
    processes._died = lambda child: died.append(f"{child.name} {child.end()}")
    child = healthy(processes, "cluster-0-engine", "engine")
    fine = healthy(processes, "cluster-1-engine", "engine")
    first = child.process.pid

    def tick() -> bool:
        for hung, why in vigil.look(processes.children, {}):
            processes.kill(hung, why)
        processes.revive()
        return child.process.pid != first and processes.answers(child)

    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        tick()
        time.sleep(0.05)
    assert child.process.pid == first and not died, "healthy ones are left alone"
    os.kill(first, signal.SIGSTOP)
    wait_until(tick, 20.0)
    assert died == ["cluster-0-engine has not answered /health for 2 s, though its process lives; it was killed"]
    assert child.restarts == 1 and fine.restarts == 0
    vigil.close()


def test_one_that_starts_may_take_as_long_as_it_may_take_to_start(processes, vigil, clock) -> None:
    child = processes.start("engine", SLEEP, f"http://127.0.0.1:{free_port('127.0.0.1')}", role="engine")
    assert pass_time(vigil, clock, [child], 99) == []
    assert pass_time(vigil, clock, [child], 9) == [
        "engine has not answered /health for 100 s, though its process lives"
    ]


def test_a_worker_is_judged_by_its_heartbeats_while_the_orchestrator_answers(processes, vigil, clock) -> None:
    child = processes.start("worker-0", SLEEP, role="worker")
    status = {"workers": {"worker-0": {"heard_seconds_ago": 0.5}}}
    assert pass_time(vigil, clock, [child], 200, status) == []
    assert pass_time(vigil, clock, [child], 200, None) == [], "the orchestrator does not answer: nobody knows"
    assert pass_time(vigil, clock, [child], 29, {}) == []
    clock.now += 500.0  # the launcher itself stood still
    assert vigil.look([child], {}) == []
    assert pass_time(vigil, clock, [child], 5, {}) == [
        "worker-0 has sent no heartbeat to the orchestrator for 30 s, though its process lives"
    ]


def test_a_follower_is_judged_only_while_its_engine_is_ready(processes, vigil, clock) -> None:
    engine = healthy(processes, "c0-engine", "engine", cluster="c0")
    child = processes.start("c0-follower", SLEEP, role="follower", cluster="c0")
    other = {"cluster": "c1", "renewed_seconds_ago": 0.1}
    both = [engine, child]

    def settle() -> None:  # its health arrives in another thread
        for _ in range(3):
            pass_time(vigil, clock, both, 1, {"engines": [{"cluster": "c0", "renewed_seconds_ago": 0.1}, other]})
            time.sleep(0.1)

    settle()
    engine.process.kill()
    engine.process.wait()
    assert pass_time(vigil, clock, both, 200, {"engines": [other]}) == [], "there is nothing to renew"
    processes.again(engine)
    wait_until(lambda: processes.answers(engine))
    settle()
    (text,) = pass_time(vigil, clock, both, 40, {"engines": [other]})
    assert text.startswith("c0-follower has not renewed its engine, which is ready, at the orchestrator for 30 s")


def test_a_trainer_that_computes_is_not_hung_one_that_does_nothing_is(processes, vigil, clock) -> None:
    busy = processes.start("trainer", [sys.executable, "-c", "while True: pass"], role="trainer")
    for _ in range(6):  # each look stands for half a minute
        time.sleep(0.35)
        clock.now += 2.0
        assert vigil.look([busy], {}) == []
    os.kill(busy.process.pid, signal.SIGSTOP)
    time.sleep(0.1)
    limit = 30.0 * TRAINER_TIMES
    assert pass_time(vigil, clock, [busy], limit - 2, {}) == []
    (text,) = pass_time(vigil, clock, [busy], 10, {})
    assert "trainer has neither spoken to the orchestrator nor used its processor for 120 s" in text
    assert pass_time(vigil, clock, [busy], 300, {"trainer_heard_seconds_ago": 1.0}) == [], "it waits for a batch"


def test_whoever_is_dead_or_was_started_again_is_not_hung(processes, vigil, clock) -> None:
    child = processes.start("worker-0", SLEEP, role="worker")
    assert pass_time(vigil, clock, [child], 99, {}) == []
    child.process.kill()
    child.process.wait()
    assert pass_time(vigil, clock, [child], 200, {}) == []
    processes.again(child)
    assert pass_time(vigil, clock, [child], 99, {}) == []
