"""Pins: the four tools in a real box, and that every wrong call is answered with a sentence and a status."""

import pytest

from stretto.config import SandboxConfig
from stretto.harness.parse import Attempt
from stretto.harness.toolbox.workspace import Workspace
from stretto.harness.tools import NANO, run_call
from stretto.records import CallStatus
from stretto.sandbox.pool import BoxPool

FILES = {
    "solution.py": "def double(x):\n    return x + x + 1\n",
    "test_solution.py": "from solution import double\n\nassert double(2) == 4\nassert double(0) == 0\n",
}


@pytest.fixture
async def work():
    pool = BoxPool(SandboxConfig(seconds=1.0))
    await pool.start()
    try:
        box = await pool.box(FILES)
        yield Workspace(box, FILES)
        await box.stop()
    finally:
        await pool.close()


async def ask(work: Workspace, name: str, **arguments) -> tuple[str, CallStatus]:
    return await run_call(Attempt(CallStatus.OK, name, arguments), work)


async def test_a_repair(work: Workspace) -> None:
    assert await ask(work, "read_file", path="solution.py") == (
        "1\tdef double(x):\n2\t    return x + x + 1",
        CallStatus.OK,
    )
    assert await ask(work, "run_tests") == ("FAILED double(2): got 5, expected 4", CallStatus.OK)
    assert await ask(work, "edit_file", path="solution.py", line=2, text="    return x + x") == ("ok", CallStatus.OK)
    assert await ask(work, "run_tests") == ("2 passed", CallStatus.OK)
    assert await ask(work, "submit") == ("submitted", CallStatus.OK)


async def test_a_new_patch_takes_the_place_of_the_last_one(work: Workspace) -> None:
    await ask(work, "edit_file", path="solution.py", line=1, text="def broken(:")
    await ask(work, "edit_file", path="solution.py", line=2, text="    y = x + x\n    return y")
    assert (await work.box.read("solution.py")).decode() == "def double(x):\n    y = x + x\n    return y\n"


@pytest.mark.parametrize(
    ("line", "observation"),
    [
        ("    return x / 0", "FAILED double(2): ZeroDivisionError"),
        ("    return (", "FAILED test_solution.py: SyntaxError"),
        ("    while True: pass", "FAILED timed out"),
        ("    import os; os._exit(3)", "FAILED the tests died (exit code 3)"),
        ("    raise SystemExit", "FAILED double(2): SystemExit"),
    ],
)
async def test_what_run_tests_says_of_bad_code(work: Workspace, line: str, observation: str) -> None:
    await ask(work, "edit_file", path="solution.py", line=2, text=line)
    assert await ask(work, "run_tests") == (observation, CallStatus.OK)


@pytest.mark.parametrize(
    ("name", "arguments", "status", "words"),
    [
        ("rm", {}, CallStatus.UNKNOWN_TOOL, "there are read_file, edit_file, run_tests, submit"),
        ("read_file", {}, CallStatus.BAD_ARGUMENTS, "needs path"),
        ("read_file", {"path": 3}, CallStatus.BAD_ARGUMENTS, "path must be of type string"),
        ("read_file", {"path": "a", "mode": "r"}, CallStatus.BAD_ARGUMENTS, "takes no 'mode'"),
        ("edit_file", {"path": "solution.py", "line": True, "text": ""}, CallStatus.BAD_ARGUMENTS, "type integer"),
        ("edit_file", {"path": "solution.py", "line": 9, "text": ""}, CallStatus.FAILED, "has no line 9"),
        ("edit_file", {"path": "other.py", "line": 1, "text": ""}, CallStatus.FAILED, "no 'other.py' to edit"),
        ("read_file", {"path": "absent.py"}, CallStatus.FAILED, "absent.py"),
        ("read_file", {"path": "../etc/passwd"}, CallStatus.FAILED, "error"),
    ],
)
async def test_wrong_calls_are_answered(work: Workspace, name, arguments, status, words) -> None:
    observation, got = await ask(work, name, **arguments)
    assert got is status
    assert observation.startswith("error: ") and words in observation


async def test_long_and_binary_files(work: Workspace) -> None:
    await work.box.write("long.txt", b"x" * 9000)
    await work.box.write("binary", b"\xff\xfe\x00")
    observation, _ = await ask(work, "read_file", path="long.txt")
    assert observation.endswith("characters more]") and len(observation) < NANO.limits.observation + 50
    assert await ask(work, "read_file", path="binary") == ("error: binary is not UTF-8 text", CallStatus.FAILED)


def test_schemas_are_openai_tools() -> None:
    for name, tool in NANO.tools.items():
        function = tool.schema["function"]
        assert function["name"] == name
        assert set(function["parameters"]["required"]) == set(function["parameters"]["properties"])
