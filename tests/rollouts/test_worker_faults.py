"""What goes wrong inside a worker: an error in reset, in a tool or in grading is the outcome of its rollout; anywhere
else it ends the worker with its cause. And what takes long does not take the loop."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

import stretto
from stretto.grading.grader import Grader
from stretto.records import Lease, Outcome, Task
from stretto.rollouts.link import Link
from stretto.rollouts.watchdog import LAG_SECONDS, Watchdog
from stretto.rollouts.worker import HEARTBEAT_SECONDS, Worker
from stretto.sandbox.box import Box
from stretto.sandbox.pool import BoxPool
from stretto.watch.metrics import Metrics, read
from stretto.weights.store import Store, StoreError

from .test_worker import HONEST, READ, SUBMIT, TEST, Orchestrator, configuration, leases, orchestrator

__all__ = ["orchestrator"]  # the fixture


class BrokenPool(BoxPool):
    """A real pool whose boxes cannot be had (`reset`), or whose tools break (`tool`)."""

    reset: Exception | None = None
    tool: Exception | None = None

    async def box(self, *words, **settings) -> Box:
        if self.reset is not None:
            raise self.reset
        box = await super().box(*words, **settings)
        if self.tool is not None:
            error = self.tool

            async def exec(*_, **__):
                raise error

            box.exec = box.python = box.read = exec
        return box


class BrokenGrader(Grader):
    error: Exception

    async def grade(self, task: Task, submissions, seed: int):
        raise self.error


@contextlib.asynccontextmanager
async def working(
    peer: Orchestrator,
    chat,
    tmp_path: Path,
    store: Store | None = None,
    reset: Exception | None = None,
    tool: Exception | None = None,
) -> AsyncIterator[Worker]:
    """A worker at work on the leases of `peer`; what ended it is raised at the end of the block."""
    config = configuration()
    pool = BrokenPool(config.sandbox)
    pool.reset, pool.tool = reset, tool
    await pool.start()
    async with aiohttp.ClientSession() as session:
        metrics = Metrics(tmp_path / "metrics.jsonl", "w0")
        link = Link(peer.url, "w0", session)
        worker = Worker(config, "w0", link, session, chat, pool, store or Store(tmp_path / "store"), metrics)
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            await pool.close()
        if isinstance(ended, Exception):
            raise ended


async def outcome(peer: Orchestrator, given: list[Lease], seconds: float = 15.0) -> tuple[Outcome, str]:
    peer.leases = given
    end = time.monotonic() + seconds
    while not peer.receipts:
        assert time.monotonic() < end, "no receipt came"
        await asyncio.sleep(0.02)
    return peer.receipts[0].outcome, peer.receipts[0].reason


async def test_ASY_11_an_error_in_reset_is_an_outcome(orchestrator, scripted_engine, chat, tmp_path):
    scripted_engine.say(*HONEST)
    async with working(orchestrator, chat, tmp_path, reset=OSError("no more boxes")):
        found, reason = await outcome(orchestrator, leases(scripted_engine.url, 1))
    assert found is Outcome.INFRA and "no more boxes" in reason


@pytest.mark.parametrize(
    ("script", "error"), [([READ, TEST, SUBMIT], KeyError("tool")), ([TEST, SUBMIT], ZeroDivisionError("in a tool"))]
)
async def test_ASY_11_an_error_in_a_tool_is_an_outcome(orchestrator, scripted_engine, chat, tmp_path, script, error):
    scripted_engine.say(*script)
    async with working(orchestrator, chat, tmp_path, tool=error):
        found, _ = await outcome(orchestrator, leases(scripted_engine.url, 1))
    assert found in (Outcome.SCORED, Outcome.FAULT, Outcome.TRUNCATED), "it stays in the batch"
    assert not orchestrator.receipts[0].solved


async def test_ASY_11_an_error_in_score_is_an_outcome(orchestrator, scripted_engine, chat, tmp_path):
    scripted_engine.say(*HONEST)
    async with working(orchestrator, chat, tmp_path) as worker:
        grader = BrokenGrader(worker.config.grading, worker.pool)
        grader.error = ZeroDivisionError("in the grader")
        worker.desk._grader = grader
        found, reason = await outcome(orchestrator, leases(scripted_engine.url, 1))
    assert found is Outcome.FAULT and "ZeroDivisionError: in the grader" in reason


async def test_ASY_11_an_error_elsewhere_ends_the_worker_with_its_cause(orchestrator, scripted_engine, chat, tmp_path):
    tried = threading.Event()

    class Full(Store):
        def put(self, key: str, data: bytes) -> None:
            tried.set()
            raise StoreError("the bucket is gone")

    scripted_engine.say(*HONEST)
    with pytest.raises(StoreError, match="the bucket is gone"):
        async with working(orchestrator, chat, tmp_path, Full(tmp_path / "store")):
            orchestrator.leases = leases(scripted_engine.url, 2)
            assert await asyncio.to_thread(tried.wait, 15)
            await asyncio.sleep(0.5)
    assert not orchestrator.receipts


def pack_slowly(seconds: float) -> None:
    """Real work for the processor, in Python."""
    end, total = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        total += sum(range(1000))


async def test_ASY_9_heartbeats_flow_beside_a_packer_that_takes_10_s_and_one_on_a_loop_is_named(
    orchestrator, scripted_engine, chat, tmp_path
):
    """The same 10 s of computing twice: where a worker packs its payloads, and, in another thread, on a loop."""

    class Slow(Store):
        def put(self, key: str, data: bytes) -> None:
            pack_slowly(10.0)
            super().put(key, data)

    said: list[str] = []

    async def held_up() -> None:
        watchdog = Watchdog(said.append)
        await asyncio.sleep(0.1)
        pack_slowly(10.0)
        await asyncio.sleep(0.1)
        watchdog.close()

    scripted_engine.say(*HONEST)
    other = threading.Thread(target=lambda: asyncio.run(held_up()))
    other.start()
    async with working(orchestrator, chat, tmp_path, Slow(tmp_path / "store")) as worker:
        orchestrator.leases = leases(scripted_engine.url, 1)
        while not worker.held or worker.playing:
            await asyncio.sleep(0.05)
        before, began = orchestrator.heartbeats, time.monotonic()
        while not orchestrator.receipts:
            await asyncio.sleep(0.05)
        passed = time.monotonic() - began
        assert passed > 9.0 and orchestrator.receipts[0].solved
        assert orchestrator.heartbeats - before >= passed / HEARTBEAT_SECONDS / 2, "heartbeats flow all the time"
    other.join()
    assert len(said) == 1 and f"stood still for {LAG_SECONDS:g} s" in said[0] and "pack_slowly" in said[0]
    alarms = [line["text"] for line in read(tmp_path / "metrics.jsonl") if line.get("alarm")]
    assert alarms == [], "the worker's own loop never stood still"


def test_ASY_9_nobody_waits_under_a_lock():
    """In the rooms whose loops everybody waits for: no `await` inside a `with` of a lock."""
    waits = []
    for room in ("rollouts", "launch"):
        for path in sorted((Path(stretto.__file__).parent / room).glob("*.py")):
            tree = ast.parse(path.read_text())
            locks = {
                name.attr if isinstance(name, ast.Attribute) else name.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
                if any(word in ast.unparse(node.value) for word in ("Lock(", "Condition("))
                for name in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(name, ast.Attribute | ast.Name)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.With | ast.AsyncWith):
                    held = {ast.unparse(item.context_expr).rpartition(".")[2] for item in node.items}
                    awaits = any(isinstance(inner, ast.Await) for part in node.body for inner in ast.walk(part))
                    if awaits and held & locks:
                        waits.append(f"{path.name}:{node.lineno}")
    assert waits == []
