"""The worker: leases in, payloads and receipts out, whatever happens to engine, orchestrator and itself.

The orchestrator here is a peer that speaks its HTTP contract from a list; box, grader and store are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stretto.config import Config, dump, parse
from stretto.harness.chat import call_text
from stretto.records import Lease, Outcome, Receipt, Rollout, Sampling, Task, decode
from stretto.rollouts.link import Link, OrchestratorGone
from stretto.rollouts.worker import Worker
from stretto.sandbox.pool import BoxPool
from stretto.watch.metrics import Metrics, read
from stretto.weights.store import Store

ORACLE = {"module": "solution", "function": "double", "arguments": [{"kind": "int", "low": -50, "high": 50}]}
TASK = Task(
    id="double/1",
    split="train",
    instruction="double(x) must return twice x. Fix solution.py.",
    files={
        "solution.py": "def double(x):\n    return x + 3\n",
        "test_solution.py": "from solution import double\nassert double(2) == 4\nassert double(0) == 0\n",
    },
    grading={
        "solution/solution.py": "def double(x):\n    return 2 * x\n",
        "tests/oracle.json": json.dumps(ORACLE),
    },
)
READ = call_text("read_file", {"path": "solution.py"})
FIX = call_text("edit_file", {"path": "solution.py", "line": 2, "text": "    return x + x"})
TEST = call_text("run_tests", {})
SUBMIT = call_text("submit", {})
HONEST = [READ, FIX, TEST, SUBMIT]


class Orchestrator:
    """Hands out what lies in `leases`, keeps what comes back."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.receipts: list[Receipt] = []
        self.slots: list[int] = []
        self.heartbeats = 0
        self.elsewhere: list[str] = []  # engines to go on at, in order; the last one is repeated, "" is: not yet
        self.moves: list[dict] = []
        self.drop: list[str] = []  # what the next heartbeat says that nobody waits for
        self.refusals: list[int] = []  # statuses to answer to receipts before accepting one
        self.url = ""

    async def lease(self, http: web.Request) -> web.Response:
        slots = (await http.json())["slots"]
        self.slots.append(slots)
        given, self.leases = self.leases[:slots], self.leases[slots:]
        if not given:
            await asyncio.sleep(0.05)
        return web.Response(body=msgspec.msgpack.encode(given))

    async def receipt(self, http: web.Request) -> web.Response:
        words = decode(await http.read(), list[Receipt])
        status = self.refusals.pop(0) if self.refusals else 200
        if status == 404:
            return web.json_response({"unknown": [word.rollout for word in words]})
        if status != 200:
            return web.Response(status=status, text="not now")
        self.receipts += words
        return web.json_response({"unknown": []})

    async def heartbeat(self, http: web.Request) -> web.Response:
        self.heartbeats += 1
        held = (await http.json())["rollouts"]
        return web.json_response({"drop": [rollout for rollout in held if rollout in self.drop]})

    async def move(self, http: web.Request) -> web.Response:
        self.moves.append(await http.json())
        if not self.elsewhere:
            return web.Response(status=404, text="nobody waits")
        url = self.elsewhere.pop(0) if len(self.elsewhere) > 1 else self.elsewhere[0]
        return web.json_response({"engine": url})


@pytest.fixture
async def orchestrator() -> AsyncIterator[Orchestrator]:
    peer = Orchestrator()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/lease", peer.lease)
    app.router.add_post("/receipts", peer.receipt)
    app.router.add_post("/heartbeat", peer.heartbeat)
    app.router.add_post("/move", peer.move)
    async with TestServer(app) as server:
        peer.url = str(server.make_url("")).rstrip("/")
        yield peer


def configuration(**rollouts) -> Config:
    return parse(
        {
            "harness": {"max_tokens": 700, "max_turn_tokens": 200, "max_turns": 6},
            "rollouts": {"concurrency": 8, **rollouts},
            "sandbox": {"warm": 2},
        }
    )


def leases(engine: str, count: int, group: str = "g", seconds: float = 30.0) -> list[Lease]:
    return [
        Lease(
            rollout=f"{group}-{number}",
            group=group,
            purpose="train",
            task=TASK,
            sampling=Sampling(),
            engine=engine,
            version=7,
            deadline=time.time() + seconds,
        )
        for number in range(count)
    ]


@pytest.fixture
async def running(orchestrator, chat, tmp_path) -> AsyncIterator[object]:
    """Starts a worker as a task; `await running(n)` waits for n receipts and gives them by rollout id."""
    config = configuration()
    pool = BoxPool(config.sandbox)
    await pool.start()
    async with aiohttp.ClientSession() as session:
        link = Link(orchestrator.url, "w0", session)
        metrics = Metrics(tmp_path / "metrics.jsonl", "w0")
        worker = Worker(config, "w0", link, session, chat, pool, Store(tmp_path / "store"), metrics)
        task = asyncio.create_task(worker.run())

        async def receipts(count: int, seconds: float = 10.0) -> dict[str, Receipt]:
            end = time.monotonic() + seconds
            while len(orchestrator.receipts) < count:
                assert not task.done(), task
                assert time.monotonic() < end, f"{len(orchestrator.receipts)} of {count} receipts came"
                await asyncio.sleep(0.01)
            return {word.rollout: word for word in orchestrator.receipts}

        yield receipts
        task.cancel()
        await asyncio.wait([task])
    await pool.close()


def payload_of(word: Receipt, tmp_path: Path) -> Rollout:
    rollout = decode(Store(tmp_path / "store").get(word.key), Rollout)
    for segment in rollout.segments:
        segment.validate()
    assert (rollout.id, rollout.outcome, rollout.reward) == (word.rollout, word.outcome, word.reward)
    assert rollout.reward == pytest.approx(sum(rollout.rewards.values()))
    return rollout


async def test_a_group_is_played_graded_and_handed_in(running, orchestrator, scripted_engine, tmp_path):
    scripts = {"g-0": HONEST, "g-1": [SUBMIT], "g-2": [READ], "g-3": ["hm"], "g-4": ["hm", *HONEST]}
    scripted_engine.script = lambda request, turn: scripts[request.session][
        min(turn, len(scripts[request.session]) - 1)
    ]
    orchestrator.leases = leases(scripted_engine.url, 5)
    words = await running(5)
    assert {id: (word.outcome, word.solved) for id, word in words.items()} == {
        "g-0": (Outcome.SCORED, True),
        "g-1": (Outcome.SCORED, False),
        "g-2": (Outcome.TRUNCATED, False),
        "g-3": (Outcome.FAULT, False),
        "g-4": (Outcome.SCORED, True),
    }
    rollouts = {id: payload_of(word, tmp_path) for id, word in words.items()}
    assert words["g-0"].reward > words["g-4"].reward > words["g-1"].reward >= words["g-2"].reward
    assert words["g-4"].behaviour["bad_calls"] == 1 and words["g-0"].behaviour["tested"] == 1
    assert words["g-1"].behaviour["submitted_untested"] == 1
    assert "6 turns" in rollouts["g-2"].reason and "well-formed" in words["g-3"].reason
    honest = words["g-0"]
    assert (honest.oldest_version, honest.newest_version, honest.turns, honest.worker) == (7, 7, 4, "w0")
    assert honest.sampled == rollouts["g-0"].segments[0].sampled_T.sum() and honest.tokens > honest.sampled
    assert sorted(scripted_engine.released) == sorted(words)
    assert orchestrator.heartbeats >= 1


async def test_an_engine_that_is_gone_makes_infra_and_the_worker_goes_on(running, orchestrator, scripted_engine):
    scripted_engine.say(*HONEST)
    orchestrator.leases = leases("http://127.0.0.1:9", 2, "lost") + leases(scripted_engine.url, 2, "fine")
    words = await running(4)
    assert words["lost-0"].outcome is words["lost-1"].outcome is Outcome.INFRA
    assert "http://127.0.0.1:9" in words["lost-0"].reason
    assert (words["lost-0"].oldest_version, words["lost-0"].sampled) == (7, 0)
    assert words["fine-0"].solved and words["fine-1"].solved


async def test_a_rollout_survives_the_death_of_its_engine(running, orchestrator, scripted_engine, tmp_path):
    """The engine is gone in the middle of a rollout: another one gets the whole history and it goes on."""
    scripted_engine.say(*HONEST)
    app = web.Application()
    turns = 0

    async def die_at_the_third_turn(http: web.Request) -> web.Response:
        nonlocal turns
        turns += 1
        if turns == 3:
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        return await scripted_engine.generate(http)

    app.router.add_post("/generate", die_at_the_third_turn)
    async with TestServer(app) as server:
        dying = str(server.make_url("")).rstrip("/")
        orchestrator.elsewhere = ["", scripted_engine.url]
        orchestrator.leases = leases(dying, 1)
        word = (await running(1))["g-0"]
    assert word.solved and word.turns == 4 and word.engine == scripted_engine.url
    assert [move["again"] for move in orchestrator.moves] == [False, True]
    assert {(move["rollout"], move["engine"]) for move in orchestrator.moves} == {("g-0", dying)}
    rollout = payload_of(word, tmp_path)
    assert rollout.engine == scripted_engine.url
    sampled = rollout.segments[0].sampled_T.sum()
    assert sampled == word.sampled, "no turn was lost, none is there twice"


async def test_a_rollout_nobody_waits_for_is_given_up(running, orchestrator, scripted_engine):
    never = asyncio.Event()
    scripted_engine.say(*HONEST)

    async def stuck(request) -> None:
        if request.session == "stuck-0":
            await never.wait()

    scripted_engine.pause = stuck
    orchestrator.leases = leases(scripted_engine.url, 1, "stuck") + leases(scripted_engine.url, 1, "fine")
    await running(1)
    orchestrator.drop = ["stuck-0"]
    end = time.monotonic() + 10
    while "stuck-0" not in scripted_engine.released:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    orchestrator.leases = leases(scripted_engine.url, 1, "next")
    words = await running(2)
    assert set(words) == {"fine-0", "next-0"}


async def test_slots_are_never_exceeded_and_refill(running, orchestrator, scripted_engine):
    playing, most = set(), 0

    async def pause(request):
        nonlocal most
        playing.add(request.session)
        most = max(most, len(playing - set(scripted_engine.released)))
        await asyncio.sleep(0.005)

    scripted_engine.pause = pause
    scripted_engine.say(*HONEST)
    orchestrator.leases = leases(scripted_engine.url, 20)
    words = await running(20)
    assert all(word.solved for word in words.values()) and most == 8
    assert orchestrator.slots[0] == 8 and max(orchestrator.slots) == 8


async def test_a_receipt_is_repeated_until_it_is_taken(running, orchestrator, scripted_engine):
    scripted_engine.say(*HONEST)
    orchestrator.refusals = [503, 500]
    orchestrator.leases = leases(scripted_engine.url, 1)
    assert (await running(1))["g-0"].solved


async def test_a_receipt_nobody_knows_is_dropped(running, orchestrator, scripted_engine):
    scripted_engine.say(*HONEST)
    orchestrator.refusals = [404]
    orchestrator.leases = leases(scripted_engine.url, 1, "old")
    ended = asyncio.create_task(running(1))
    while orchestrator.refusals:  # else both could go together, and be refused together
        await asyncio.sleep(0.01)
    orchestrator.leases = leases(scripted_engine.url, 1, "new")
    assert len(await ended) == 1


async def test_busy_time_is_reported(running, orchestrator, scripted_engine, tmp_path):
    scripted_engine.say(*HONEST)
    orchestrator.leases = leases(scripted_engine.url, 4)
    await running(4)
    await asyncio.sleep(0.6)
    busy = [line for line in read(tmp_path / "metrics.jsonl") if line["kind"] == "busy"]
    assert busy and all(0 < line["share"] <= 1 and line["what"] == "rollouts" for line in busy)


async def test_a_worker_whose_orchestrator_is_gone_ends_with_its_name():
    async with aiohttp.ClientSession() as session:
        link = Link("http://127.0.0.1:9/", "w0", session, patience=0.3)
        with pytest.raises(OrchestratorGone, match=r"http://127.0.0.1:9 has not answered /lease for 0.3 s"):
            await link.lease(3)


async def test_sigterm_ends_the_process_cleanly_in_the_middle_of_rollouts(
    orchestrator, scripted_engine, chat_folder, tmp_path
):
    config = configuration().model_copy(update={"model": parse({"model": {"path": str(chat_folder)}}).model})
    (tmp_path / "config.toml").write_text(dump(config))
    forever = asyncio.Event()

    scripted_engine.script = lambda request, turn: TEST if turn == 0 else forever.set() or TEST
    orchestrator.leases = leases(scripted_engine.url, 40)
    command = [sys.executable, "-m", "stretto.launch.service", "worker", "--run", str(tmp_path), "--name", "w0"]
    process = subprocess.Popen([*command, "--orchestrator", orchestrator.url], stderr=subprocess.PIPE, env=os.environ)
    try:
        await asyncio.wait_for(forever.wait(), 10)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, 5)
        assert (code, process.stderr.read()) == (0, b"")
        gone, alive = psutil.wait_procs(children, timeout=2)
        assert not alive and len(gone) == len(children)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
