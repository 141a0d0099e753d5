"""A model behind an OpenAI-compatible endpoint: the same tools and endings; `stretto eval URL` counts it strictly and
permissively. The endpoint is a real HTTP server that speaks a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest
from rich.console import Console

from stretto.config import HarnessConfig, SandboxConfig
from stretto.harness.declare import of
from stretto.harness.ending import Ending
from stretto.harness.loop import FAULT_AFTER
from stretto.harness.remote import Endpoint, Talked, talk
from stretto.harness.session import Session
from stretto.launch.endpoint import counts
from stretto.launch.evaluate import evaluate
from stretto.launch.local import LaunchError
from stretto.launch.scores import scores, show
from stretto.records import CallStatus, Task
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder

ORACLE = {"module": "solution", "function": "double", "arguments": [{"kind": "int", "low": -50, "high": 50}]}


def task(number: int) -> Task:
    return Task(
        id=f"double/{number}",
        split="heldout",
        instruction=f"double(x) must return twice x. Task {number}.",
        files={"solution.py": "def double(x):\n    return x + 3\n"},
        grading={"solution/solution.py": "def double(x):\n    return 2 * x\n", "tests/oracle.json": json.dumps(ORACLE)},
        tools={"set": "code"},
    )


def call(name: str, id: str = "call_1", /, **arguments) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def says(*calls: dict, text: str = "") -> dict:
    return {"role": "assistant", "content": text or None, **({"tool_calls": list(calls)} if calls else {})}


FIX = call("edit_file", path="solution.py", old="x + 3", new="2 * x")
SUBMIT = call("submit")


class Server:
    """`script(messages)` is the answer to a conversation: a message, or (status, text)."""

    def __init__(self) -> None:
        self.script: Callable[[list[dict]], dict | tuple[int, str]] = lambda messages: says(SUBMIT)
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/v1/models"
                self.answer(200 if found else 404, json.dumps({"data": [{"id": "scripted"}]}) if found else "no")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.keys.add(self.headers.get("Authorization"))
                said = outer.script(body["messages"])
                if isinstance(said, tuple):
                    return self.answer(*said)
                tokens = sum(len(json.dumps(message)) for message in body["messages"]) // 4
                usage = {"total_tokens": tokens}
                self.answer(200, json.dumps({"choices": [{"message": said}], "usage": usage}))

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


async def attempt(server: Server, *turns: dict | tuple[int, str], **config) -> Talked:
    """One attempt against a script of turns, the last of which repeats."""
    if turns:
        said = iter(turns)
        last: list = [None]

        def script(messages):
            last[0] = next(said, last[0])
            return last[0]

        server.script = script
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    try:
        async with aiohttp.ClientSession() as http:
            session = Session(task(0), pool, of(task(0)))
            endpoint = Endpoint(f"{server.url}/v1", "scripted", http)
            talked = await talk(session, endpoint, HarnessConfig(**{"max_tokens": 9000, **config}), 20)
            await session.close()
            return talked
    finally:
        await pool.close()


async def test_calls_in_one_turn_are_carried_out_in_order_and_answered_by_id(server: Server) -> None:
    bad = {"id": "b", "type": "function", "function": {"name": "grep", "arguments": "{"}}
    gone = call("read_file", "c", path="gone.py")
    look = says(bad, gone, call("read_file", "d", path="solution.py"), text="Look.")
    talked = await attempt(server, look, says(FIX, SUBMIT))
    assert (talked.ending, talked.turns, talked.reason) == (Ending.SUBMITTED, 2, "")
    assert [c.status for c in talked.calls] == [CallStatus.BAD_JSON, CallStatus.FAILED, *[CallStatus.OK] * 3]
    assert talked.files["solution.py"].endswith(b"return 2 * x\n")
    tools = [message for message in server.bodies[1]["messages"] if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in tools] == ["b", "c", "d"]
    assert tools[0]["content"].startswith("error: the arguments are not valid JSON") and "1\tdef" in tools[2]["content"]
    assert server.bodies[0]["tools"] == of(task(0)).schemas and server.bodies[0]["model"] == "scripted"


async def test_endings_are_those_of_training(server: Server) -> None:
    assert (await attempt(server, says(text="hm"))).ending is Ending.FAULT
    assert len(server.bodies) == FAULT_AFTER
    assert (await attempt(server, says(call("list_dir")), max_turns=3)).ending is Ending.TURNS
    assert (await attempt(server, says(call("run", command="seq 9999")), max_tokens=3000)).ending is Ending.TOKENS
    given = await attempt(server, says(call("give_up", reason="odd")))
    assert given.ending is Ending.GAVE_UP and "odd" in given.reason
    full = await attempt(server, says(FIX), (400, "this model's maximum context length is 9"))
    assert full.ending is Ending.TOKENS and full.files["solution.py"].endswith(b"2 * x\n")
    broken = await attempt(server, (401, "no such key"))
    assert broken.ending is Ending.INFRA and "answers 401: no such key" in broken.reason
    odd = await attempt(server, (200, "<html>"))
    assert odd.ending is Ending.INFRA and "does not answer as OpenAI's" in odd.reason


async def test_calls_left_in_the_text_are_read_by_our_parser(server: Server) -> None:
    text = '<tool_call>\n{"name": "read_file", "arguments": {"path": "solution.py"}}\n</tool_call>'
    talked = await attempt(server, says(text=text), says(SUBMIT))
    assert talked.ending is Ending.SUBMITTED and talked.calls[0].status is CallStatus.OK
    assert (
        server.bodies[1]["messages"][-1]["role"] == "user" and "1\tdef" in server.bodies[1]["messages"][-1]["content"]
    )


def test_eval_counts_strictly_and_permissively(server: Server, tmp_path: Path, monkeypatch, capsys) -> None:
    """Task 0 is solved and handed in, task 1 repaired and given up, task 2 neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    def script(messages):
        if messages[-1]["role"] == "tool":
            return says(call("give_up", reason="tired")) if "Task 1" in messages[0]["content"] else says(SUBMIT)
        return says(SUBMIT) if "Task 2" in messages[0]["content"] else says(FIX)

    server.script = script
    for number in range(3):
        folder.write(task(number), tmp_path / "tasks")
    console = Console(quiet=True)
    result = evaluate(server.url, "tasks", "heldout", 1, 2, 0.5, [], console)
    strict, permissive = result["strict"], result["permissive"]
    assert (result["tasks"], result["attempts"], result["model"]) == (3, 2, f"{server.url}/v1 scripted")
    assert strict["solve_rate"] == result["solve_rate"] == pytest.approx(1 / 3)
    assert permissive["solve_rate"] == pytest.approx(2 / 3) and set(strict["pass_at_k"]) == {"1", "2"}
    low, high = permissive["pass_at_k"]["2"]["ci95"]
    assert low < permissive["pass_at_k"]["2"]["value"] < high
    assert result["outcomes"] == {"scored": 6} and result["behaviour"]["gave_up"] == pytest.approx(1 / 3)
    assert server.keys == {"Bearer k"} and server.bodies[0]["temperature"] == 0.5
    show(result, False)
    assert "pass@2" in capsys.readouterr().out
    with pytest.raises(LaunchError, match="serves no model 'other'; it has scripted"):
        evaluate(server.url, "tasks", "heldout", 1, 2, 0.5, [], console, "other")
    server.script = lambda messages: (403, "forbidden")
    with pytest.raises(LaunchError, match="every attempt ended as infra.*403: forbidden"):
        evaluate(server.url, "tasks", "heldout", 1, 1, 0.5, [], console)


def test_pass_at_k_is_unbiased_and_infra_is_left_out() -> None:
    line = {"ids": ["a", "b"], "attempts": 4, "solved": [1, 0], "agreed": [3, 0], "valid": [3, 0]}
    found = scores(line)
    assert found["strict"]["pass_at_k"]["2"]["value"] == pytest.approx(1 - 1 / 3)
    assert found["permissive"]["pass_at_k"]["2"]["value"] == 1 and "4" not in found["strict"]["pass_at_k"]
    assert counts(["a"], 2, [[]])["valid"] == [0]


def test_nobody_there_is_a_sentence() -> None:
    with pytest.raises(LaunchError, match="no engine of ours at http://127.0.0.1:9, and no OpenAI-compatible endpoint"):
        evaluate("http://127.0.0.1:9", "repair", "heldout", 1, 1, 1.0, [], Console(quiet=True))
