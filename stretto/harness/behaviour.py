"""How the agent worked, out of its calls: the shares in the report that show learning beside the solve rate."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.records import CallStatus, ToolCall


def behaviour(calls: Sequence[ToolCall], solved: bool) -> dict[str, float]:
    """One rollout's flags (0 or 1) and counts (`bad_calls`, `calls`); the mean over rollouts is a share.

    read                a file was read before the first edit
    tested              the visible tests were run before the end
    retried             another edit followed a failed test of an earlier one
    repeated_edit       after a failed test, the very edit made before was made again
    submitted, submitted_untested, solved_after_retry
    bad_calls           attempts that could not be carried out, turns without any call included
    """
    read = tested = retried = repeated = failed = submitted = False
    edits: set[tuple[object, ...]] = set()
    tried_before: set[tuple[object, ...]] = set()
    for call in calls:
        if call.status is not CallStatus.OK:
            continue
        if call.name == "submit":
            submitted = True
        elif call.name == "read_file":
            read |= not edits
        elif call.name == "run_tests":
            tested = True
            if failed_test(call) and edits:
                failed, tried_before = True, set(edits)
        elif call.name == "edit_file":
            edit = tuple(str(call.arguments.get(key)) for key in ("path", "line", "text"))
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
        "bad_calls": bad_calls(calls),
        "calls": len(calls),
    }
    return {name: float(value) for name, value in flags.items()}


def failed_test(call: ToolCall) -> bool:
    """Whether this is a carried-out run of the visible tests that they did not pass."""
    return call.name == "run_tests" and call.status is CallStatus.OK and call.observation.startswith("FAILED")


def bad_calls(calls: Sequence[ToolCall]) -> int:
    return sum(call.status is not CallStatus.OK for call in calls)
