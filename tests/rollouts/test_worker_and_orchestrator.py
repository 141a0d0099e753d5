"""Worker and orchestrator together: leases, groups, grading, payloads, and a batch that can be trained on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter

import aiohttp
import msgspec

from stretto.config import parse
from stretto.harness.chat import call_text
from stretto.records import Batch, EngineStatus, Outcome, Rollout, Task, decode, encode
from stretto.rollouts.link import Link
from stretto.rollouts.orchestrator import Orchestrator
from stretto.rollouts.worker import Worker
from stretto.sandbox.pool import BoxPool
from stretto.watch.metrics import Metrics, read
from stretto.weights.store import Store

ORACLE = {"module": "solution", "function": "double", "arguments": [{"kind": "int", "low": -50, "high": 50}]}
FIX = call_text("edit_file", {"path": "solution.py", "line": 2, "text": "    return x + x"})
SUBMIT = call_text("submit", {})


def task(number: int) -> Task:
    return Task(
        id=f"double/{number}",
        split="train",
        instruction="double(x) must return twice x. Fix solution.py.",
        files={"solution.py": "def double(x):\n    return x + 3\n", "test_solution.py": ""},
        grading={
            "solution/solution.py": "def double(x):\n    return 2 * x\n",
            "tests/oracle.json": json.dumps(ORACLE),
        },
    )


async def test_a_batch_of_groups_comes_out(scripted_engine, chat, tmp_path):
    config = parse(
        {
            "run": {"name": tmp_path.name, "root": str(tmp_path.parent)},
            "rollouts": {"group_size": 4, "groups_per_step": 3, "concurrency": 10, "max_staleness": 0},
            "sandbox": {"warm": 2},
            "harness": {"max_tokens": 600},
        }
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    metrics = Metrics(tmp_path / "metrics.jsonl", "test")
    orchestrator = Orchestrator(config, tmp_path, metrics, lambda split: [task(n) for n in range(20)])
    serving = asyncio.create_task(orchestrator.run("127.0.0.1", port))

    scripted_engine.version = 0
    turns = Counter[str]()
    answered: list[str] = []

    def script(request, turn):
        """Every other rollout solves its task, in the order in which they begin."""
        if request.session not in answered:
            answered.append(request.session)
        turns[request.session] += 1
        solves = answered.index(request.session) % 2 == 0
        return FIX if solves and turn == 0 else SUBMIT

    scripted_engine.script = script
    pool = BoxPool(config.sandbox)
    await pool.start()
    async with aiohttp.ClientSession() as session:

        async def post(path: str, body: bytes) -> None:
            async with session.post(url + path, data=body) as answer:
                assert answer.status == 200, await answer.text()

        worker = Worker(config, "w0", Link(url, "w0", session), session, chat, pool, Store(tmp_path / "store"), metrics)
        working = asyncio.create_task(worker.run())
        await asyncio.sleep(0.2)
        await post("/version", msgspec.json.encode({"version": 0, "chain": "c"}))
        await post("/engine", encode(EngineStatus(url=scripted_engine.url, cluster="c0", version=0, fingerprint="f")))
        await post("/start", b"")
        end = time.monotonic() + 12
        batch = None
        while batch is None:
            assert time.monotonic() < end and not working.done() and not serving.done()
            async with session.get(f"{url}/batch?version=0&wait=1") as answer:
                batch = decode(await answer.read(), Batch) if answer.status == 200 else None
        working.cancel()
        await asyncio.wait([working])
    await pool.close()
    serving.cancel()
    await asyncio.wait([serving])

    assert batch.groups == 3 and len(batch.items) == 12 and 0 < batch.solve_rate < 1
    store = Store(tmp_path / "store")
    for item in batch.items:
        rollout = decode(store.get(item.key), Rollout)
        assert (rollout.id, rollout.group, rollout.outcome) == (item.rollout, item.group, Outcome.SCORED)
        assert rollout.reward == item.reward == float(rollout.solved)
        for segment in rollout.segments:
            segment.validate()
    assert max(Counter(item.group for item in batch.items).values()) == 4
    lines = [line for line in read(tmp_path / "metrics.jsonl") if line["kind"] == "rollout"]
    assert len(lines) >= 12
