"""A product's own agent in the box: what it says becomes segments, and every way it may end is a defined one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from stretto.config import ConfigError, HarnessConfig, SandboxConfig, parse
from stretto.engine.client import EngineClient
from stretto.harness import loop
from stretto.harness.chat import call_text
from stretto.harness.client import load
from stretto.harness.ending import Ending
from stretto.harness.loop import Played
from stretto.harness.product import play
from stretto.harness.toolset import ToolSetError
from stretto.records import CallStatus, Lease, Sampling, Task, encode
from stretto.sandbox.pool import BoxPool

AGENTS = Path(__file__).parent / "agents"
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
LOOK = call_text("bash", {"command": "cat solution.py"})
FIX = call_text("bash", {"command": "sed -i 's/x + 3/2 * x/' solution.py && echo fixed"})
DONE = "It is done."


@pytest.fixture
async def pool() -> AsyncIterator[BoxPool]:
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
def go(chat, scripted_engine, pool, tmp_path):
    """Plays `TASK` by a client that is declared by `keys`, the small agent in `mode` by default."""

    async def go(*turns, mode: str = "", declared: str = "", seconds: float = 60.0, **harness) -> Played:
        if turns:
            scripted_engine.say(*turns)
        file = tmp_path / "agent.toml"
        command = f"python3 /opt/libraries/agents/small_agent.py {mode}"
        file.write_text(declared or f'command = "{command}"\nfolder = "{AGENTS}"\ndoes.bash = "run"\n')
        load.cache_clear()
        config = HarnessConfig(**{"max_tokens": 2000, "max_turn_tokens": 300, **harness, "client": str(file)})
        async with aiohttp.ClientSession() as session:
            played = await play(
                lease(scripted_engine.url, seconds), EngineClient(scripted_engine.url, session), chat, pool, config
            )
        for segment in played.segments:
            segment.validate()
            assert segment.sampled_T.any() and len(segment.ids_T) <= config.max_tokens
            assert segment.routes_TLK.shape[0] == len(segment.ids_T)
        for call in played.calls:
            assert played.segments[call.segment].sampled_T[call.start : call.end].all()
        for record in (*played.segments, *played.calls, *played.messages):
            encode(record)
        assert "r1" in scripted_engine.released
        return played

    return go


def lease(url: str, seconds: float = 60.0) -> Lease:
    return Lease(
        rollout="r1",
        group="g1",
        purpose="train",
        task=TASK,
        sampling=Sampling(),
        engine=url,
        version=7,
        deadline=time.time() + seconds,
    )


async def test_ENG_1_a_client_solves_a_task_and_its_tokens_are_those_sampled(go, chat, scripted_engine):
    spelled = [token for letter in LOOK for token in chat.encode(letter)]  # as no tokenizer would
    played = await go(spelled + chat.stop, FIX, DONE)
    assert (played.ending, played.reason, played.turns) == (Ending.SUBMITTED, "", 3)
    assert played.files["solution.py"] == b"def double(x):\n    return 2 * x\n"
    (segment,) = played.segments
    spoken = [spelled + chat.stop, *(chat.encode(text) + chat.stop for text in (FIX, DONE))]
    assert segment.ids_T[segment.sampled_T].tolist() == [token for turn in spoken for token in turn]
    first, second, third = scripted_engine.requests["r1"]
    assert second.ids == first.ids + spoken[0] + chat.observe([TASK.files["solution.py"]])
    assert third.ids == second.ids + spoken[1] + chat.observe(["fixed\n"])
    assert segment.ids_T.tolist() == third.ids + spoken[2]
    assert [(call.does, call.status, call.observation) for call in played.calls] == [
        ("run", CallStatus.OK, TASK.files["solution.py"]),
        ("run", CallStatus.OK, "fixed\n"),
    ]
    roles = ["system", "user", *("assistant", "tool") * 2, "assistant"]
    assert [message.role for message in played.messages] == roles
    assert played.tools.startswith("client-") and played.effort.calls == 2 and played.effort.turns == 3


async def test_a_client_that_speaks_as_our_loop_does_makes_our_loops_rollout(go, chat, scripted_engine, pool):
    """Same prompt, same results, same policy: the segments are equal to the byte."""
    read, submit = call_text("read_file", {"path": "solution.py"}), call_text("submit", {})
    scripted_engine.say(read, submit)
    async with aiohttp.ClientSession() as session:
        engine = EngineClient(scripted_engine.url, session)
        config = HarnessConfig(max_tokens=2000, max_turn_tokens=300)
        ours = await loop.play(lease(engine.url), engine, chat, pool, config)
    scripted_engine.turns.clear()
    scripted_engine.requests.clear()
    agent = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "x", "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)["choices"][0]["message"]
messages = [{"role": "user", "content": sys.stdin.read()}]
messages.append(ask(messages))
assert "read_file" in messages[-1]["content"]
lines = open("solution.py").read().splitlines()
messages.append({"role": "tool", "content": "\\n".join(f"{n}\\t{line}" for n, line in enumerate(lines, 1))})
assert "submit" in ask(messages)["content"]
"""
    played = await go(
        read, submit, declared=f"command = '''cat > /tmp/a.py <<\"END\"\n{agent}\nEND\npython3 /tmp/a.py'''"
    )
    assert played.ending is Ending.SUBMITTED, played.reason
    assert played.segments == ours.segments
    assert [call.name for call in played.calls] == ["read_file", "submit"]


async def test_the_example_works_as_our_tools_do(go, scripted_engine):
    fix = call_text("edit_file", {"path": "solution.py", "line": 2, "text": "    return 2 * x"})
    read, tests, submit = (
        call_text("read_file", {"path": "solution.py"}),
        call_text("run_tests", {}),
        call_text("submit", {}),
    )
    example = Path(__file__).parents[2] / "examples" / "agent"
    declared = (example / "agent.toml").read_text().replace('"."', f'"{example}"')
    played = await go(read, tests, fix, tests, "And now?", submit, declared=declared)
    assert (played.ending, played.reason, len(played.segments)) == (Ending.SUBMITTED, "", 1)
    assert [call.observation for call in played.calls] == [
        "1\tdef double(x):\n2\t    return x + 3",
        "FAILED double(2): got 5, expected 4",
        "ok",
        "2 passed",
        "",
    ]


async def test_the_openai_package_streamed(go):
    agent = """
import openai, sys
client = openai.OpenAI(max_retries=0)
tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
messages = [{"role": "user", "content": sys.stdin.read()}]
with client.chat.completions.stream(model="gpt-5", messages=messages, tools=tools, temperature=0.2) as stream:
    answer = stream.get_final_completion().choices[0]
assert answer.finish_reason == "tool_calls", answer
call = answer.message.tool_calls[0]
assert "sed" in call.function.arguments
messages += [answer.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
stream = client.chat.completions.create(model="gpt-5", messages=messages, tools=tools, stream=True)
assert "".join(piece.choices[0].delta.content or "" for piece in stream) == "It is done."
"""
    declared = f"command = '''cat > /tmp/a.py <<\"END\"\n{agent}\nEND\npython3 /tmp/a.py'''\nlibraries = ['openai']"
    played = await go(FIX, DONE, declared=declared)
    assert played.ending is Ending.SUBMITTED, played.reason
    assert (len(played.segments), played.turns, played.calls[0].observation) == (1, 2, "ok")


async def test_a_compacted_history_is_a_new_segment(go, scripted_engine):
    played = await go(LOOK, mode="compact", max_turns=3)
    assert played.ending is Ending.TURNS and len(played.segments) == 3
    assert [call.segment for call in played.calls] == [0, 1, 2]
    assert {"r1", "r1/1", "r1/2"} <= set(scripted_engine.requests)


async def test_an_answer_that_nobody_waited_for_is_not_trained_on(go, scripted_engine):
    """The client gives up and asks again: the first request leaves the engine, and no segment holds it."""
    left = asyncio.Event()

    async def first_is_slow(request) -> None:
        if request.session == "r1":
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                left.set()
                raise

    scripted_engine.pause = first_is_slow
    played = await go(DONE, mode="impatient")
    assert (played.ending, len(played.segments), played.turns) == (Ending.SUBMITTED, 1, 1)
    assert set(scripted_engine.requests) == {"r1/1"}


async def test_a_policy_that_floods_the_port_stays_in_the_batch(go):
    flood = call_text("bash", {"command": "python3 /opt/libraries/agents/flood.py"})
    played = await go(flood, DONE)
    assert (played.ending, played.reason, played.turns) == (Ending.SUBMITTED, "", 2)
    assert played.calls[0].observation.split() == ["400", "400", "413", "400", "400", "400", "404"]


@pytest.mark.parametrize(
    "turns, mode, harness, ending, words",
    [
        ([DONE], "fail", {}, Ending.FAULT, "the client ended with 3"),
        ([DONE], "crash", {}, Ending.INFRA, "before the policy had said anything: no such model"),
        ([DONE], "idle", {}, Ending.INFRA, "ended with 0 before the policy"),
        ([DONE], "endless", {"max_turns": 4}, Ending.TURNS, "no end within 4 turns"),
        ([DONE], "endless", {"max_tokens": 200}, Ending.TOKENS, "there are 200 in all"),
        ([call_text("bash", {"command": "pkill -9 python3"})], "", {}, Ending.FAULT, "the client ended with 137"),
        ([call_text("bash", {"command": "kill -9 -1"})], "", {}, Ending.FAULT, "the client ended with"),
        (["<tool_call>\n{"], "endless", {"max_turns": 3}, Ending.TURNS, "no end within 3 turns"),
        ([call_text("bash", {"command": "rm -rf /workspace/*"}), DONE], "", {}, Ending.SUBMITTED, ""),
        ([call_text("bash", {"command": "head -c 9000000 /dev/zero | tr '\\0' x"})], "", {}, Ending.TOKENS, "in all"),
    ],
)
async def test_every_ending(go, turns, mode, harness, ending, words):
    played = await go(*turns, mode=mode, **harness)
    assert played.ending is ending and words in played.reason, played.reason


async def test_a_client_that_does_nothing_runs_out_of_its_own_time(go):
    played = await go(DONE, mode="sleep", seconds=6.0)
    assert played.ending is Ending.TIME and "without asking the policy" in played.reason


async def test_a_box_that_we_lost_is_infra(go, scripted_engine, pool):
    async def end_all(request) -> None:
        if scripted_engine.turns["r1"]:
            for pid in pool.carrier.spawner_pids():
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.5)

    scripted_engine.pause = end_all
    played = await go(LOOK, DONE)
    assert played.ending is Ending.INFRA, played.reason


async def test_a_client_that_hangs_before_it_asks_is_ours(go):
    played = await go(declared="command = 'echo waiting for a licence; sleep 100'", seconds=4.0)
    assert played.ending is Ending.INFRA and "waiting for a licence" in played.reason


async def test_a_client_that_floods_its_terminal_is_ended(go):
    flood = call_text("bash", {"command": "yes > /proc/$PPID/fd/1"})
    played = await go(flood, DONE)
    assert played.ending is Ending.FAULT and "wrote more than 16 MiB" in played.reason


@pytest.mark.parametrize("good", [0, 1])
async def test_an_engine_that_fails_is_infra_whatever_the_client_makes_of_it(go, scripted_engine, good):
    answered = iter(range(9))

    def change(response):
        return response if next(answered) < good else msgspec.structs.replace(response, logprobs=b"")

    scripted_engine.change = change
    played = await go(LOOK, DONE)
    assert played.ending is Ending.INFRA and len(played.segments) == good
    assert played.reason.startswith(f"{scripted_engine.url}: the engine sampled"), played.reason


@pytest.mark.parametrize(
    "text, words",
    [
        ("comand = 'x'", "did you mean command"),
        ("libraries = []", "needs a command"),
        ("command = 'x'\nfolder = 'nowhere'", "there is no folder"),
        ("command = 'x'\nlibraries = ['/etc']", "a folder goes into folder"),
        ("command = 'x'\ndoes.bash = 'runs'", "did you mean run"),
        ("command = 'x'\nenvironment.X = 3", "table of texts"),
        ("command = 'x", "not valid TOML"),
    ],
)
def test_a_wrong_declaration_is_a_sentence(tmp_path, text, words):
    (tmp_path / "agent.toml").write_text(text)
    load.cache_clear()
    with pytest.raises(ToolSetError, match=words):
        load(str(tmp_path / "agent.toml"))


def test_a_client_goes_with_no_tools_of_ours():
    with pytest.raises(ConfigError, match="leave tools out"):
        parse({"harness": {"client": "agent.toml", "tools": "code"}})
