"""One rollout, end to end: a real HTTP engine that speaks a script, a real sandbox, every way to end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import numpy as np
import pytest

from stretto.config import HarnessConfig, SandboxConfig
from stretto.engine.client import EngineClient
from stretto.harness.behaviour import behaviour
from stretto.harness.chat import call_text
from stretto.harness.ending import Ending
from stretto.harness.loop import FAULT_AFTER, Played, play
from stretto.records import NOT_SAMPLED, CallStatus, Lease, Sampling, Task, encode, unknown_expert
from stretto.sandbox.pool import BoxPool
from stretto.support import Support

TASK = Task(
    id="double/1",
    split="train",
    instruction="double(x) must return twice x. Fix solution.py.",
    files={
        "solution.py": "def double(x):\n    return x + 3\n",
        "test_solution.py": "from solution import double\nassert double(2) == 4\nassert double(0) == 0\n",
    },
    grading={},
)
FULL = Sampling()
READ = call_text("read_file", {"path": "solution.py"})
FIX = call_text("edit_file", {"path": "solution.py", "line": 2, "text": "    return 2 * x"})
SPOIL = call_text("edit_file", {"path": "solution.py", "line": 2, "text": "    return x + 4"})
TEST = call_text("run_tests", {})
SUBMIT = call_text("submit", {})


@pytest.fixture
async def pool() -> AsyncIterator[BoxPool]:
    pool = BoxPool(SandboxConfig(warm=1))
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
def go(chat, scripted_engine, pool):
    """Plays one rollout of `TASK`, and checks what must hold of any."""

    async def go(*turns, task: Task = TASK, seconds: float = 30.0, sampling: Sampling = FULL, **harness) -> Played:
        if turns:
            scripted_engine.say(*turns)
        lease = Lease(
            rollout="r1",
            group="g1",
            purpose="train",
            task=task,
            sampling=sampling,
            engine=scripted_engine.url,
            version=7,
            deadline=time.time() + seconds,
        )
        config = HarnessConfig(**{"max_tokens": 2000, "max_turn_tokens": 300, **harness})
        async with aiohttp.ClientSession() as session:
            played = await play(lease, EngineClient(lease.engine, session), chat, pool, config)
        check(played, scripted_engine, config)
        return played

    return go


def check(played: Played, engine, config: HarnessConfig) -> None:
    (segment,) = played.segments
    segment.validate()
    encode(segment), [encode(call) for call in played.calls], [encode(message) for message in played.messages]
    assert len(segment.ids_T) <= config.max_tokens or played.turns == 0
    ids = segment.ids_T.tolist()
    for request in engine.requests["r1"]:
        assert ids[: len(request.ids)] == request.ids
    for call in played.calls:
        assert call.segment == 0 and 0 <= call.start <= call.end <= len(ids)
        assert segment.sampled_T[call.start : call.end].all()
    assert engine.released == ["r1"] or played.ending is Ending.INFRA


async def test_ENG_3_an_honest_solve(go, chat, scripted_engine):
    played = await go(READ, FIX, f"Now the tests.\n{TEST}", SUBMIT)
    assert (played.ending, played.reason, played.turns) == (Ending.SUBMITTED, "", 4)
    assert played.files["solution.py"] == b"def double(x):\n    return 2 * x\n"
    assert [call.observation for call in played.calls] == [
        "1\tdef double(x):\n2\t    return x + 3",
        "ok",
        "2 passed",
        "submitted",
    ]
    assert [message.role for message in played.messages] == ["user"] + ["assistant", "tool"] * 4
    segment = played.segments[0]
    test = played.calls[2]
    assert chat.decode(segment.ids_T[test.start : test.end].tolist()) == TEST

    spoken = [chat.encode(text) + chat.stop for text in (READ, FIX, f"Now the tests.\n{TEST}", SUBMIT)]
    assert segment.ids_T[segment.sampled_T].tolist() == [token for turn in spoken for token in turn]
    assert set(segment.versions_T.tolist()) == {NOT_SAMPLED, 7}
    expected = chat.start(TASK.instruction)
    for turn, call in zip(spoken, played.calls):
        expected += turn + (chat.observe([call.observation]) if call.name != "submit" else [])
    assert segment.ids_T.tolist() == expected


async def test_ENG_1_what_was_sampled_is_never_tokenised_again(go, chat, scripted_engine):
    """Spelled letter by letter, as no tokenizer would: the next turn goes on from these very ids."""
    spelled = [token for letter in READ for token in chat.encode(letter)]
    assert spelled != chat.encode(READ) and chat.decode(spelled) == READ
    played = await go(spelled + chat.stop, SUBMIT)
    segment = played.segments[0]
    assert segment.ids_T[segment.sampled_T].tolist() == spelled + chat.stop + chat.encode(SUBMIT) + chat.stop
    first, second = scripted_engine.requests["r1"]
    assert second.ids[: len(first.ids) + len(spelled) + 1] == first.ids + spelled + chat.stop
    assert [call.status for call in played.calls] == [CallStatus.OK] * 2


async def test_ENG_4_arguments_are_read_by_meaning_and_ids_kept(go, chat):
    said = '<tool_call>{"arguments":{ "path" :"solution.py"},\n "name":"read_file"}</tool_call>'
    played = await go(said, SUBMIT)
    assert played.calls[0].status is CallStatus.OK and played.calls[0].arguments == {"path": "solution.py"}
    segment = played.segments[0]
    assert chat.decode(segment.ids_T[segment.sampled_T].tolist()).startswith(said + "<|im_end|>")


@pytest.mark.parametrize("which", [1, 2])
async def test_every_token_that_spells_the_stop_token_ends_the_turn(go, chat, scripted_engine, which):
    """Its text counts up to the stop token; the message it opened is closed, not sampled, and the talk goes on."""
    spoken = [*chat.encode(READ), chat.ends[which]]
    played = await go(spoken, SUBMIT)
    first, second = scripted_engine.requests["r1"]
    assert first.stop == chat.ends and spoken[-1] not in chat.stop
    assert second.ids == first.ids + spoken + chat.stop + chat.observe([played.calls[0].observation])
    said = played.messages[1].text
    assert "<|im_" not in said and said.startswith(READ) and played.calls[0].status is CallStatus.OK
    at = len(first.ids) + len(spoken)
    assert played.segments[0].sampled_T[at - 1] and not played.segments[0].sampled_T[at]
    assert (played.ending, played.turns) == (Ending.SUBMITTED, 2)


async def test_ENG_5_supports_travel_with_the_tokens(go):
    segment = (await go(READ, SUBMIT, sampling=Sampling(top_p=0.9))).segments[0]
    support = Support.join([Support.open(chunk) for chunk in segment.support])
    assert len(segment.support) == 2 and support.contains(segment.ids_T[segment.sampled_T]).all()
    assert (support.counts_N == 3).all()


async def test_ENG_5_an_engine_that_cuts_and_does_not_say_how_is_refused(go, scripted_engine):
    scripted_engine.change = lambda response: msgspec.structs.replace(response, support=None)
    played = await go(READ, sampling=Sampling(top_k=3))
    assert played.ending is Ending.INFRA and "does not say from which tokens" in played.reason


async def test_RPL_1_routes_are_joined_and_only_the_last_row_is_unknown(go, scripted_engine):
    segment = (await go(READ, FIX, TEST, SUBMIT)).segments[0]
    routes, ids = segment.routes_TLK, segment.ids_T.tolist()
    assert routes[:-1].tolist() == [scripted_engine.route_row(p, token) for p, token in enumerate(ids[:-1])]
    assert (routes[-1] == unknown_expert(8)).all()


async def test_several_calls_in_one_turn_run_in_order_up_to_the_submit(go):
    played = await go("\n".join([TEST, FIX, TEST, SUBMIT, SPOIL]))
    assert [call.name for call in played.calls] == ["run_tests", "edit_file", "run_tests", "submit"]
    assert played.calls[0].observation.startswith("FAILED") and played.calls[2].observation == "2 passed"
    assert played.turns == 1 and b"2 * x" in played.files["solution.py"]


async def test_a_retry_is_seen_as_one(go):
    played = await go(READ, SPOIL, TEST, FIX, TEST, SUBMIT)
    found = behaviour(played.calls, True)
    assert found["retried"] and found["solved_after_retry"] and not found["repeated_edit"]


@pytest.mark.parametrize(
    ("said", "status", "answer"),
    [
        (
            '<tool_call>\n{"name": "read_file", "arguments": {"path"\n</tool_call>',
            CallStatus.BAD_JSON,
            "not valid JSON",
        ),
        ('<tool_call>\n{"name": "submit"', CallStatus.UNCLOSED, "</tool_call> is missing"),
        ("<tool_call>\n{}\n</tool_call>", CallStatus.NO_NAME, 'no "name"'),
        (call_text("rm", {}), CallStatus.UNKNOWN_TOOL, "no tool named 'rm'"),
        (call_text("read_file", {"file": "x"}), CallStatus.BAD_ARGUMENTS, "read_file needs path"),
        (call_text("read_file", {"path": "nope.py"}), CallStatus.FAILED, "nope.py"),
        (call_text("read_file", {"path": "../etc/passwd"}), CallStatus.FAILED, "error: "),
        ("I am done.", CallStatus.NO_CALL, "no tool call"),
        ("", CallStatus.NO_CALL, "no tool call"),
        (
            '<tool_call>{"name": "submit", "arguments": {"a": "\\ud800"}}</tool_call>',
            CallStatus.BAD_ARGUMENTS,
            "stored",
        ),
        (call_text("edit_file", {"path": "solution.py", "line": 10**30, "text": ""}), CallStatus.BAD_ARGUMENTS, ""),
    ],
)
async def test_ENG_11_a_broken_call_is_answered_and_the_rollout_goes_on(go, said, status, answer):
    played = await go(said, SUBMIT)
    assert played.calls[0].status is status and answer in played.calls[0].observation
    assert played.ending is Ending.SUBMITTED and played.files.keys() == TASK.files.keys()


async def test_the_turn_limit_ends_it(go):
    played = await go(READ, max_turns=3)
    assert (played.ending, played.turns) == (Ending.TURNS, 3)
    assert "3 turns" in played.reason and played.files == {}
    assert played.segments[0].sampled_T[-1], "no observation is appended after the last turn"


async def test_ENG_11_endless_broken_calls_are_the_policys_fault(go):
    played = await go("hm")
    assert (played.ending, played.turns) == (Ending.FAULT, FAULT_AFTER)


async def test_a_turn_limit_reached_with_broken_calls_only_is_the_policys_fault(go):
    played = await go("hm", max_turns=2)
    assert played.ending is Ending.FAULT and "none of 2 turns" in played.reason


async def test_ENG_3_a_turn_cut_at_its_limit_gets_a_stop_token_that_is_not_sampled(go, chat, scripted_engine):
    body = chat.encode(READ)
    played = await go(body + body, SUBMIT, max_turn_tokens=len(body) + 2)
    segment = played.segments[0]
    first = scripted_engine.requests["r1"][0]
    cut = len(first.ids) + len(body) + 2
    assert segment.sampled_T[cut - 1] and not segment.sampled_T[cut]
    assert segment.ids_T[cut] == chat.stop[0] and np.isnan(segment.logprobs_T[cut])
    assert played.calls[0].status is CallStatus.OK and played.ending is Ending.SUBMITTED


async def test_ENG_12_the_token_budget_spans_all_turns(go, chat, scripted_engine):
    budget = len(chat.start(TASK.instruction)) + 150
    played = await go(READ, max_tokens=budget, max_turn_tokens=100)
    assert played.ending is Ending.TOKENS and str(budget) in played.reason
    for request in scripted_engine.requests["r1"]:
        assert request.max_tokens == min(100, budget - len(request.ids)) > 0


async def test_a_prompt_beyond_the_budget_ends_before_it_begins(go, scripted_engine):
    played = await go(READ, max_tokens=5)
    assert (played.ending, played.turns) == (Ending.TOKENS, 0) and "prompt alone" in played.reason


async def test_an_engine_that_is_gone_is_infra(go, scripted_engine):
    scripted_engine.url = "http://127.0.0.1:9"
    played = await go(READ)
    assert played.ending is Ending.INFRA and "http://127.0.0.1:9" in played.reason


async def test_an_engine_that_dies_half_way_is_infra_and_keeps_what_was_said(go, scripted_engine):
    def script(request, turn):
        if turn == 1:
            raise RuntimeError("boom")
        return READ

    scripted_engine.script = script
    played = await go()
    assert played.ending is Ending.INFRA and scripted_engine.url in played.reason
    assert played.turns == 1 and played.segments[0].sampled_T.any()


@pytest.mark.parametrize("shift", [-1, 1])
async def test_routes_that_do_not_join_are_the_engines_fault(go, scripted_engine, shift):
    def change(response):
        if response.routes.start == 0:
            return response
        moved = msgspec.structs.replace(response.routes, start=response.routes.start + shift)
        return msgspec.structs.replace(response, routes=moved)

    scripted_engine.change = change
    played = await go(READ, SUBMIT)
    assert played.ending is Ending.INFRA and scripted_engine.url in played.reason
    assert ("overlap" if shift < 0 else "hole") in played.reason


async def test_ENG_12_a_turn_the_engine_broke_off_goes_on_within_its_limit(go, chat, scripted_engine):
    said = chat.encode(READ) + chat.stop
    scripted_engine.say(said[:2], said[2:], SUBMIT)
    broken = iter([True])

    def change(response):
        return msgspec.structs.replace(response, finish="aborted") if next(broken, False) else response

    scripted_engine.change = change
    played = await go(max_turn_tokens=100)
    assert (played.ending, played.turns, played.reason) == (Ending.SUBMITTED, 2, "")
    first, second = scripted_engine.requests["r1"][:2]
    assert second.ids == first.ids + said[:2] and second.max_tokens == 98
    assert second.routes_from == len(second.ids) - 1


async def test_an_engine_that_breaks_off_for_ever_is_infra(go, scripted_engine):
    scripted_engine.change = lambda r: msgspec.structs.replace(r, ids=[], logprobs=b"", versions=b"", finish="aborted")
    played = await go(READ)
    assert played.ending is Ending.INFRA and "broke off" in played.reason and played.turns == 0


async def test_a_slow_engine_is_named_when_the_lease_runs_out(go, scripted_engine):
    scripted_engine.pause = lambda request: asyncio.sleep(0.6)
    played = await go(READ, seconds=0.3)
    assert played.ending is Ending.INFRA


async def test_tests_that_burn_time_are_the_policys_own(go):
    """Sleeping in the box must not let a rollout out of the batch."""
    sleep = call_text("edit_file", {"path": "solution.py", "line": 2, "text": "    __import__('time').sleep(9)"})
    played = await go(f"{sleep}\n{TEST}", seconds=6.0)
    assert played.ending is Ending.TIME and played.calls[1].observation == "FAILED timed out"


async def test_a_workspace_that_cannot_be_collected_is_the_policys_fault(go):
    litter = "    return [open(str(n), 'w').close() for n in range(200)]"
    played = await go(call_text("edit_file", {"path": "solution.py", "line": 2, "text": litter}) + TEST, SUBMIT)
    assert played.ending is Ending.FAULT and "cannot be collected" in played.reason


async def test_no_rollout_imports_torch():
    code = "import sys, stretto.rollouts.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
