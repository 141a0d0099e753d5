"""Behaviour flags out of a rollout's calls."""

from __future__ import annotations

from stretto.harness.behaviour import behaviour
from stretto.records import CallStatus, ToolCall


def call(name: str, observation: str = "ok", status: CallStatus = CallStatus.OK, **arguments) -> ToolCall:
    return ToolCall(name=name, status=status, segment=0, start=0, end=0, arguments=arguments, observation=observation)


READ, SUBMIT = call("read_file", path="a.py"), call("submit")
PASS, FAIL = call("run_tests", "3 passed"), call("run_tests", "FAILED f(1): got 2, expected 3")
ONE, TWO = call("edit_file", path="a.py", line=2, text="x"), call("edit_file", path="a.py", line=2, text="y")


def flags(*calls: ToolCall, solved: bool = False) -> set[str]:
    found = behaviour(calls, solved)
    return {name for name, value in found.items() if value and name not in ("calls", "bad_calls")}


def test_an_honest_solve():
    assert flags(READ, ONE, PASS, SUBMIT, solved=True) == {"read", "tested", "submitted"}


def test_a_retry_that_solves():
    calls = [READ, ONE, FAIL, TWO, PASS, SUBMIT]
    assert flags(*calls, solved=True) == {"read", "tested", "retried", "submitted", "solved_after_retry"}
    assert "solved_after_retry" not in flags(*calls, solved=False)


def test_reading_after_the_first_edit_is_not_reading_first():
    assert "read" not in flags(ONE, READ, SUBMIT)


def test_submitting_untested():
    assert flags(READ, ONE, SUBMIT) == {"read", "submitted", "submitted_untested"}


def test_the_same_edit_again_counts_only_after_a_failed_test():
    assert "repeated_edit" in flags(ONE, FAIL, ONE)
    assert "repeated_edit" not in flags(ONE, ONE, FAIL, TWO)
    assert "repeated_edit" not in flags(ONE, PASS, ONE)


def test_a_first_edit_after_a_failed_test_is_no_retry():
    assert "retried" not in flags(FAIL, ONE, SUBMIT)


def test_broken_calls_count_and_do_nothing_else():
    broken = call("edit_file", "error: no line 9", CallStatus.FAILED, path="a.py", line=9, text="x")
    found = behaviour([broken, broken, SUBMIT], False)
    assert found["bad_calls"] == 2 and found["calls"] == 3 and found["retried"] == 0
