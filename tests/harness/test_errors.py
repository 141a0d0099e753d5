"""SBX-4: whatever a tool meets is an observation with a type and a sentence of its own, never an unknown error."""

from __future__ import annotations

import pytest

from stretto.config import SandboxConfig
from stretto.harness.declare import load
from stretto.harness.parse import Attempt
from stretto.harness.session import Session
from stretto.records import CallStatus, Task
from stretto.sandbox.pool import BoxPool

TASK = Task(id="errors", split="", instruction="", files={"a.py": "x = 1\n", "bytes.bin": "\x01"}, grading={})
CALLS = [
    ("nothing", {}, CallStatus.UNKNOWN_TOOL, "no tool named"),
    ("read_file", {}, CallStatus.BAD_ARGUMENTS, "needs path"),
    ("read_file", {"path": 1}, CallStatus.BAD_ARGUMENTS, "of type string"),
    ("read_file", {"path": "absent.py"}, CallStatus.FAILED, "absent.py"),
    ("edit_file", {"path": "a.py", "old": "y", "new": "z"}, CallStatus.FAILED, "a.py"),
    ("grep", {"pattern": "("}, CallStatus.FAILED, "error"),
    ("list_dir", {"path": "a.py"}, CallStatus.FAILED, "a.py"),
    ("run", {"command": "exit 3"}, CallStatus.OK, "3"),
    ("run", {"command": "kill -9 $$"}, CallStatus.OK, ""),
    ("read_file", {"path": "a.py"}, CallStatus.OK, "x = 1"),
]


async def test_SBX_4_every_tool_error_has_a_type_and_words_of_its_own() -> None:
    pool = BoxPool(SandboxConfig(seconds=5.0, warm=0))
    await pool.start()
    session = Session(TASK, pool, load("code"))
    try:
        for name, arguments, status, words in CALLS:
            called = await session.call(Attempt(CallStatus.OK, name, arguments))
            assert called.status is status and words in called.observation, (name, called)
            assert "unknown error" not in called.observation.lower() and "Traceback" not in called.observation
    finally:
        await session.close()
        await pool.close()


async def test_SBX_4_what_no_tool_knows_is_told_by_its_type_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> tuple[str, CallStatus]:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("stretto.harness.session.run_call", broken)
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    session = Session(TASK, pool, load("code"))
    try:
        called = await session.call(Attempt(CallStatus.OK, "read_file", {"path": "a.py"}))
        assert called.status is CallStatus.FAILED and "read_file failed (ZeroDivisionError)" in called.observation
        assert "in a way its tool does not know" in caplog.text
    finally:
        await session.close()
        await pool.close()
