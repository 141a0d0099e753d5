"""Mode `oracle`: a submission is right when it answers fresh calls exactly as the reference does.

Candidates run in a sealed box (no writable path, no network, inputs only), one child process each, and every process
is killed between two of them, so that a candidate harms itself alone. Whatever it does is a wrong answer: it crashes,
hangs, exits, floods, answers with objects. Values are compared outside, so nothing that is patched inside can help.
"""

from __future__ import annotations

import contextlib
import math

from stretto.grading.compare import Foreign, Raised, Report, Returned, agrees, decode_reports, plainly
from stretto.grading.oracle import DRIVER, KEEP, Call, Oracle, OracleSpec, last_line, plain, read_spec, request, short
from stretto.grading.outcome import Grade
from stretto.records import Outcome, Task
from stretto.sandbox.box import Box, BoxBroken, BoxLost, Result
from stretto.sandbox.pool import BoxPool

MAX_SOURCE = 1 << 18
"""Bytes of source files in one submission that are not the task's own."""


class OracleMode:
    """The grader of oracle tasks; keeps the oracle's box between gradings."""

    def __init__(self, pool: BoxPool, hidden_calls: int, seconds: float):
        self.pool, self.hidden_calls, self.seconds = pool, hidden_calls, seconds
        self.oracle = Oracle(pool, seconds)

    async def grade(
        self, task: Task, submissions: list[dict[str, bytes]], seed: int, most: float = math.inf
    ) -> list[Grade]:
        """One grade per submission, in order. Raises TaskBroken, and BoxLost for the oracle's box."""
        spec = read_spec(task)
        calls = await self.oracle.calls(task, spec, self.hidden_calls, seed)
        expected = await self.oracle.expected(task, spec, calls)
        async with Bench(self.pool, min(spec.seconds or self.seconds, most)) as bench:
            return [await judge(bench, sources(files), spec, calls, expected) for files in submissions]

    def counted(self, task: Task, files: dict[str, bytes]) -> dict[str, bytes]:
        """What of a submission is graded."""
        return sources(files)

    async def close(self) -> None:
        await self.oracle.close()


class Bench:
    """The sealed box of one group, made when first needed and replaced when a candidate broke it."""

    def __init__(self, pool: BoxPool, seconds: float):
        self.pool, self.seconds = pool, seconds
        self._box: Box | None = None

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._drop()

    async def run(self, question: bytes) -> Result:
        """One candidate, tried in two boxes at most. Raises BoxBroken or BoxLost, whichever the second box met."""
        try:
            return await self._try(question)
        except (BoxBroken, BoxLost):
            return await self._try(question)

    async def _try(self, question: bytes) -> Result:
        try:
            if self._box is None:
                self._box = await self.pool.box(sealed=True)
            return await self._box.python(DRIVER, question, self.seconds, KEEP)
        except (BoxBroken, BoxLost):
            await self._drop()
            raise

    async def _drop(self) -> None:
        if self._box:
            box, self._box = self._box, None
            with contextlib.suppress(BoxLost):
                await box.stop()


def sources(files: dict[str, bytes]) -> dict[str, bytes]:
    """What of a submission counts: its Python files."""
    return {path: data for path, data in files.items() if path.endswith(".py")}


async def judge(
    bench: Bench, files: dict[str, bytes], spec: OracleSpec, calls: list[Call], expected: list[Report]
) -> Grade:
    """The grade of one submission."""
    total = len(calls)
    for target in spec.targets:
        path = target.module.replace(".", "/")
        if f"{path}.py" not in files and f"{path}/__init__.py" not in files:
            return Grade(False, Outcome.SCORED, 0, total, f"there is no {path}.py")
    if sum(map(len, files.values())) > MAX_SOURCE:
        return Grade(False, Outcome.SCORED, 0, total, f"the sources are larger than {MAX_SOURCE} bytes")
    try:
        result = await bench.run(request(files, calls))
    except BoxBroken:
        return Grade(False, Outcome.FAULT, 0, total, "the submission broke the box it ran in, twice")
    except BoxLost as error:
        return Grade(False, Outcome.INFRA, 0, total, str(error))
    reports = decode_reports(result.stdout, total)
    right = [agrees(*pair, spec.tolerance) for pair in zip(expected, reports, strict=False)]
    passed = sum(right)
    if passed == total:
        return Grade(True, Outcome.SCORED, passed, total)
    if False in right:
        wrong = right.index(False)
        told, wanted = tell(reports[wrong]), tell(expected[wrong])
        if told == wanted:  # the values agree, so the effects don't
            told, wanted = tell_effect(reports[wrong]), tell_effect(expected[wrong])
        reason = f"{calls[wrong]} {told}; the reference {wanted}"
    else:
        reason = f"it answered {len(reports)} of {total} calls, then {how_it_ended(result)}"
    return Grade(False, Outcome.SCORED, passed, total, reason)


def how_it_ended(result: Result) -> str:
    if result.timed_out:
        return "ran out of time"
    if result.oom:
        return "ran out of memory"
    if result.truncated:
        return "wrote too much"
    return last_line(result.stderr) or f"ended with exit code {result.exit_code}"


def tell(report: Report) -> str:
    """A report as a clause for people."""
    match report:
        case Returned(value, _):
            return f"returned {short(plainly(value))}"
        case Raised(name):
            return f"raised {plain(name[:80])}"
        case Foreign(kind):
            return f"returned a {plain(kind[:80])}, not a primitive"


def tell_effect(report: Report) -> str:
    return f"left its arguments as {short(plainly(report.arguments))}" if isinstance(report, Returned) else tell(report)
