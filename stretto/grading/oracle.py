"""The oracle: fresh inputs, and what the reference makes of them, computed where policy code never runs.

Inputs come from a seeded generator and the task's argument specification, so a table of outputs is worth nothing.
A task of this mode carries `solution/<module>.py` (the reference) and `tests/oracle.json`:

    {"module": "solution", "function": "total",
     "arguments": [{"kind": "ints", "min_length": 0, "max_length": 6, "low": -9, "high": 20}]}
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Iterable
from importlib import resources
from typing import Any

import msgspec

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.compare import Foreign, Report, decode_reports
from stretto.records import Task
from stretto.sandbox.box import Box, BoxBroken, BoxLost, Result
from stretto.sandbox.pool import BoxPool
from stretto.tasks.arguments import draw_arguments

DRIVER = (resources.files("stretto.grading") / "driver.py").read_text()
SPEC = "tests/oracle.json"
KEEP = 1 << 20
"""Bytes of reports taken from one submission."""
REMEMBERED = 256


class TaskBroken(ValueError):
    """The task itself can't be graded: no attempt at it may be judged. The message names the task."""


class OracleSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tests/oracle.json`."""

    module: str
    function: str
    arguments: list[dict[str, Any]]


def read_spec(task: Task) -> OracleSpec:
    """The task's specification; raises TaskBroken."""
    try:
        return msgspec.json.decode(task.grading[SPEC], type=OracleSpec)
    except KeyError:
        raise TaskBroken(f"task {task.id} has no {SPEC}") from None
    except msgspec.DecodeError as error:
        raise TaskBroken(f"{SPEC} of task {task.id} can't be used: {error}") from None


def draw_calls(task: Task, spec: OracleSpec, count: int, seed: int) -> list[list[object]]:
    """Argument lists of `count` calls, the same for the same task and seed; raises TaskBroken."""
    rng = random.Random(f"{task.id}/{seed}")
    try:
        return [list(draw_arguments(spec.arguments, rng)) for _ in range(count)]
    except KeyError as error:
        raise TaskBroken(f"an argument in {SPEC} of task {task.id} lacks {error}") from None
    except (TypeError, ValueError, IndexError) as error:
        raise TaskBroken(f"no arguments can be drawn from {SPEC} of task {task.id}: {error}") from None


def request(files: dict[str, bytes], spec: OracleSpec, calls: list[list[object]]) -> bytes:
    """stdin of the driver."""
    return repr((files, spec.module, spec.function, [repr(call) for call in calls])).encode()


async def try_references(tasks: Iterable[Task], grading: GradingConfig, sandbox: SandboxConfig) -> None:
    """Have every task's reference answer once, as grading will. Raises TaskBroken for the first that doesn't."""
    pool = BoxPool(sandbox.model_copy(update={"warm": 0}))
    await pool.start()
    oracle = Oracle(pool, grading.seconds)
    try:
        for task in tasks:
            spec = read_spec(task)
            await oracle.expected(task, spec, draw_calls(task, spec, grading.hidden_calls, seed=0))
    except BoxLost as error:
        raise RuntimeError(f"the tasks' references could not be tried: {error}") from error
    finally:
        await oracle.close()
        await pool.close()


class Oracle:
    """Computes expected reports in one long-lived box that runs references only; replaced when it fails."""

    def __init__(self, pool: BoxPool, seconds: float):
        self.pool, self.seconds = pool, seconds
        self._box: Box | None = None
        self._turn = asyncio.Lock()
        self._known: OrderedDict[tuple[str, bytes], list[Report]] = OrderedDict()

    async def expected(self, task: Task, spec: OracleSpec, calls: list[list[object]]) -> list[Report]:
        """One report per call; raises TaskBroken when the reference doesn't answer, BoxLost when boxes fail."""
        reference = task.grading.get(f"solution/{spec.module}.py")
        if reference is None:
            raise TaskBroken(f"task {task.id} has no solution/{spec.module}.py")
        question = request({f"{spec.module}.py": reference.encode()}, spec, calls)
        async with self._turn:
            known = self._known.pop((task.id, question), None)
            if known is None:
                known = check(task, spec, calls, await self._run(question))
            self._known[task.id, question] = known
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return known

    async def _run(self, question: bytes) -> Result:
        for last in (False, True):
            try:
                if self._box is None:
                    self._box = await self.pool.box(sealed=True)
                return await self._box.python(DRIVER, question, self.seconds, KEEP)
            except (BoxLost, BoxBroken) as error:
                await self.close()
                if last:
                    raise BoxLost(f"the oracle's box failed twice: {error}") from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._box:
            box, self._box = self._box, None
            with contextlib.suppress(BoxLost):
                await box.stop()


def check(task: Task, spec: OracleSpec, calls: list[list[object]], result: Result) -> list[Report]:
    """The reference's reports, complete and comparable; raises TaskBroken."""
    reports = decode_reports(result.stdout, len(calls))
    if len(reports) < len(calls):
        end = "ran out of time" if result.timed_out else last_line(result.stderr) or f"exit code {result.exit_code}"
        raise TaskBroken(f"the reference of task {task.id} answered {len(reports)} of {len(calls)} calls: {end}")
    for call, report in zip(calls, reports, strict=True):
        if isinstance(report, Foreign):
            raise TaskBroken(f"the reference of task {task.id} returned a {report.kind} for {spec.function}{call!r}")
    return reports


def last_line(text: bytes) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return plain(lines[-1][:200]) if lines else ""


def plain(text: str) -> str:
    """What a box wrote, printable: records can't hold lone surrogates, and terminals obey control characters."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
