"""A policy whose context fills up sums it up and goes on in a new segment; nothing it said is lost to training."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from stretto.config import ConfigError, HarnessConfig, SandboxConfig, parse
from stretto.engine.client import EngineClient
from stretto.harness.chat import call_text
from stretto.harness.ending import Ending
from stretto.harness.loop import Played, play
from stretto.harness.summary import ASK, again
from stretto.records import Lease, Sampling, Task
from stretto.sandbox.pool import BoxPool

TASK = Task(
    id="double/1",
    split="train",
    instruction="double(x) must return twice x.",
    files={
        "solution.py": "def double(x):\n    return x + 3\n",
        "notes.txt": "".join(f"{number} is a number\n" for number in range(100)),
    },
    grading={},
    tools={"set": "code"},
)
PLAN = call_text("todo", {"items": [{"text": "fix it", "status": "doing"}]})
READ = call_text("read_file", {"path": "notes.txt"})
FIX = call_text("edit_file", {"path": "solution.py", "old": "x + 3", "new": "2 * x"})
SUBMIT = call_text("submit", {})
SUMMARY = f"<think>what mattered?</think>It adds 3; {FIX} is to be done."


@pytest.fixture
async def pool() -> AsyncIterator[BoxPool]:
    pool = BoxPool(SandboxConfig(warm=1))
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
def go(chat, scripted_engine, pool):
    async def go(script: dict[str, list[str]], **harness) -> Played:
        """`script`: what the policy says in each of the engine's sessions."""

        def say(request, turn: int) -> str:
            turns = script[request.session]
            return turns[min(turn, len(turns) - 1)]

        scripted_engine.script = say
        settings = {"max_tokens": 4000, "max_turn_tokens": 600, "compact_tokens": 400, **harness}
        lease = Lease(
            rollout="r1",
            group="g1",
            purpose="train",
            task=TASK,
            sampling=Sampling(seed=5),
            engine=scripted_engine.url,
            version=7,
            deadline=time.time() + 60,
        )
        async with aiohttp.ClientSession() as session:
            client = EngineClient(lease.engine, session)
            played = await play(lease, client, chat, pool, HarnessConfig(**settings))
        for segment in played.segments:
            segment.validate()
            assert segment.sampled_T.any() and len(segment.ids_T) <= settings["max_tokens"]
        return played

    return go


async def test_ENG_1_a_full_context_is_summed_up_and_the_work_goes_on(go, chat, scripted_engine):
    played = await go({"r1": [PLAN, READ, SUMMARY], "r1/1": [FIX, SUBMIT]})
    assert (played.ending, played.turns, played.reason) == (Ending.SUBMITTED, 5, "")
    assert played.files["solution.py"] == b"def double(x):\n    return 2 * x\n", "box and workspace stayed"
    first, second = played.segments
    summed = chat.encode(SUMMARY) + chat.stop
    assert first.ids_T[first.sampled_T].tolist()[-len(summed) :] == summed, "the summary is trained on"
    assert chat.decode(first.ids_T.tolist()).count(ASK) == 1
    plan = [{"text": "fix it", "status": "doing"}]
    start = chat.start(again(TASK.instruction, SUMMARY, plan, 1))
    assert second.ids_T.tolist()[: len(start)] == start and not second.sampled_T[: len(start)].any()
    text = chat.decode(start)
    assert "It adds 3" in text and "- fix it (doing)" in text and "what mattered" not in text
    assert [(call.name, call.segment) for call in played.calls] == [
        ("todo", 0),
        ("read_file", 0),
        ("edit_file", 1),
        ("submit", 1),
    ]
    for call in played.calls:
        segment = played.segments[call.segment]
        assert chat.decode(segment.ids_T[call.start : call.end].tolist()).startswith("<tool_call>")
    assert [message.role for message in played.messages].count("user") == 3
    seeds = [scripted_engine.requests[name][0].sampling.seed for name in ("r1", "r1/1")]
    assert seeds[0] == 5 and seeds[1] != 5, "the second segment has draws of its own"
    assert sorted(scripted_engine.released) == ["r1", "r1/1"]


@pytest.mark.parametrize(
    "script, harness, ending, words, segments",
    [
        ({"r1": [READ, "Go on."], "r1/1": [READ, "Go on."]}, {"max_turns": 4}, "turns", "within 4 turns", 2),
        ({"r1": [READ, "Go on."], "r1/1": ["Hm."]}, {}, "fault", "in a row", 2),
        ({"r1": [READ], "r1/1": [READ], "r1/2": [READ]}, {"max_turns": 5}, "turns", "within 5 turns", 3),
        ({"r1": [READ, "w " * 290]}, {}, "tokens", "the summary alone", 1),
        ({"r1": [READ, SUMMARY, SUBMIT]}, {"compact_tokens": 0}, "submitted", "", 1),
    ],
)
async def test_summing_up_for_ever_is_no_way_out(go, script, harness, ending, words, segments):
    played = await go(script, **harness)
    assert (played.ending, len(played.segments)) == (ending, segments) and words in played.reason, played.reason


def test_a_summary_needs_room():
    with pytest.raises(ConfigError, match="more than max_tokens"):
        parse({"harness": {"compact_tokens": 500}})
