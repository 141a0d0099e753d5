"""How the agent worked, out of its calls: the shares in the report that show learning beside the solve rate."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stretto.records import CallStatus, ToolCall

_RUNNER = re.compile(r"\b(pytest|unittest|tox|nox|jest|vitest|(?:go|cargo|npm|make)\s+test)\b")


def behaviour(calls: Sequence[ToolCall], solved: bool) -> dict[str, float]:
    """One rollout's flags (0 or 1) and counts (`bad_calls`, `calls`); the mean over rollouts is a share.

    read                a file was read before the first edit
    tested              the visible tests were run before the end
    retried             another edit followed a failed test of an earlier one
    repeated_edit       after a failed test, the very edit made before was made again
    submitted, submitted_untested, solved_after_retry
    ran                 a command was run in the terminal
    gave_up             the end was to say that the task can't be done
    questions           questions to the user, answered or not
    abandoned_todos     steps of the last plan that were not done when the work was handed in
    bad_calls           attempts that could not be carried out, turns without any call included
    """
    read = tested = retried = repeated = failed = submitted = ran = gave_up = False
    questions, plan = 0, []
    edits: set[tuple[object, ...]] = set()
    tried_before: set[tuple[object, ...]] = set()
    for call in calls:
        questions += call.does == "ask_user" and call.status in (CallStatus.OK, CallStatus.FAILED)
        if call.status is not CallStatus.OK:
            continue
        if call.does == "submit":
            submitted = True
        elif call.does == "give_up":
            gave_up = True
        elif call.does == "todo":
            plan = next(iter(call.arguments.values()), [])
        elif call.does == "read_file":
            read |= not edits
        elif is_test(call):
            tested, ran = True, ran or call.does == "run"
            if failed_test(call) and edits:
                failed, tried_before = True, set(edits)
        elif call.does == "run":
            ran = True
        elif call.does == "edit_file":
            edit = tuple(f"{key}={value}" for key, value in sorted(call.arguments.items()))
            retried |= failed
            repeated |= edit in tried_before
            edits.add(edit)
    flags = {
        "read": read,
        "tested": tested,
        "retried": retried,
        "repeated_edit": repeated,
        "submitted": submitted,
        "submitted_untested": submitted and not tested,
        "solved_after_retry": solved and retried,
        "ran": ran,
        "gave_up": gave_up,
        "questions": questions,
        "abandoned_todos": sum(step.get("status") != "done" for step in plan) if submitted else 0,
        "bad_calls": bad_calls(calls),
        "calls": len(calls),
    }
    return {name: float(value) for name, value in flags.items()}


def is_test(call: ToolCall) -> bool:
    """Whether tests were run: by the tool for it, or by a command that names a test runner."""
    return call.does == "run_tests" or (call.does == "run" and bool(_RUNNER.search(str(call.arguments))))


def failed_test(call: ToolCall) -> bool:
    """Whether this is a carried-out run of tests that they did not pass."""
    if call.status is not CallStatus.OK or not is_test(call):
        return False
    return call.observation.startswith("FAILED") or (call.does == "run" and "[exit code" in call.observation)


def bad_calls(calls: Sequence[ToolCall]) -> int:
    return sum(call.status is not CallStatus.OK for call in calls)
