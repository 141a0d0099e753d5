"""The oracle: fresh inputs, and what the reference makes of them, computed where policy code never runs.

Inputs come from a seeded generator and the task's specification, so a table of outputs is worth nothing. A task of this
mode carries its reference as `solution/*.py` (one module or several) and `tests/oracle.json`:

    {"module": "solution", "function": "total",
     "arguments": [{"kind": "ints", "min_length": 0, "max_length": 6, "low": -9, "high": 20}]}

Instead of `arguments`, `"generator": "inputs.py"` names a file of `tests/` whose `generate(rng)` returns the arguments
of one call; it runs in the oracle's box only. `also` lists further functions, which share the calls evenly.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.compare import Foreign, Raised, Report, decode_reports
from stretto.grading.modes.spec import TaskBroken
from stretto.grading.submission import SOLUTION, base_tree
from stretto.records import Task
from stretto.sandbox.box import Box, BoxBroken, BoxLost, Result
from stretto.sandbox.pool import BoxPool
from stretto.tasks.arguments import draw_arguments

DRIVER = (resources.files("stretto.grading") / "driver.py").read_text()
SPEC = "tests/oracle.json"
KEEP = 1 << 20
"""Bytes of reports taken from one submission."""
REMEMBERED = 256


GENERATE = """
import random, sys
text, seed, count = eval(sys.stdin.read())
scope = {"__name__": "inputs"}
exec(compile(text, "inputs.py", "exec", dont_inherit=True), scope)
rng = random.Random(seed)
random.seed(seed)
print([list(scope["generate"](rng)) for _ in range(count)])
"""
"""Runs in the oracle's box: argument lists drawn by the task's own generator, as a Python literal."""


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that is called, and how its arguments are drawn."""

    module: str
    function: str  # `name`, or `Class.name` of a static method
    arguments: list[dict[str, Any]] | None = None
    generator: str = ""  # a file of tests/


class OracleSpec(Target, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tests/oracle.json`."""

    also: list[Target] = []
    tolerance: float = 0.0  # relative and absolute, of floats
    seconds: float | None = None  # limit of one submission's calls; None: the run's

    @property
    def targets(self) -> list[Target]:
        return [self, *self.also]


@dataclass(frozen=True)
class Call:
    target: Target
    arguments: list[object]

    def __str__(self) -> str:
        return f"{self.target.function}({', '.join(map(short, self.arguments))})"


def read_spec(task: Task) -> OracleSpec:
    """The task's specification; raises TaskBroken."""
    try:
        spec = msgspec.json.decode(task.grading[SPEC], type=OracleSpec)
    except KeyError:
        raise TaskBroken(f"task {task.id} has no {SPEC}") from None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise TaskBroken(f"{SPEC} of task {task.id} can't be used: {error}") from None
    for target in spec.targets:
        if (target.arguments is None) == (not target.generator):
            raise TaskBroken(f"{SPEC} of task {task.id} needs arguments or a generator for {target.function}, not both")
    return spec


def draw_calls(task: Task, spec: Target, count: int, seed: int | str) -> list[list[object]]:
    """Argument lists of `count` calls, the same for the same task and seed; raises TaskBroken."""
    rng = random.Random(f"{task.id}/{seed}")
    try:
        return [list(draw_arguments(spec.arguments or [], rng)) for _ in range(count)]
    except KeyError as error:
        raise TaskBroken(f"an argument in {SPEC} of task {task.id} lacks {error}") from None
    except (TypeError, ValueError, IndexError) as error:
        raise TaskBroken(f"no arguments can be drawn from {SPEC} of task {task.id}: {error}") from None


def request(files: dict[str, bytes], calls: list[Call]) -> bytes:
    """stdin of the driver."""
    return repr((files, [(c.target.module, c.target.function, repr(c.arguments)) for c in calls])).encode()


async def try_references(tasks: Iterable[Task], grading: GradingConfig, sandbox: SandboxConfig) -> None:
    """Have every oracle task's reference answer once, as grading will. Raises TaskBroken for the first that doesn't."""
    pool = BoxPool(sandbox.model_copy(update={"warm": 0}))
    await pool.start()
    oracle = Oracle(pool, grading.seconds)
    try:
        for task in tasks:
            if task.mode == "oracle":
                spec = read_spec(task)
                await oracle.expected(task, spec, await oracle.calls(task, spec, grading.hidden_calls, seed=0))
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

    async def calls(self, task: Task, spec: OracleSpec, count: int, seed: int) -> list[Call]:
        """`count` fresh calls, at least one of each function; raises TaskBroken, BoxLost."""
        targets = spec.targets
        each = -(-count // len(targets))
        drawn = [await self._draw(task, target, each, f"{seed}/{at}") for at, target in enumerate(targets)]
        return [Call(*pair) for row in zip(*drawn, strict=True) for pair in zip(targets, row, strict=True)]

    async def _draw(self, task: Task, target: Target, count: int, seed: str) -> list[list[object]]:
        if target.arguments is not None:
            return draw_calls(task, target, count, seed)
        text = task.grading.get(f"tests/{target.generator}")
        if text is None:
            raise TaskBroken(f"task {task.id} has no tests/{target.generator}")
        question = repr((text, f"{task.id}/{seed}", count)).encode()
        async with self._turn:
            result = await self._run(GENERATE, question, self.seconds)
        try:
            calls = ast.literal_eval(result.stdout.decode())
            if len(calls) != count or not all(isinstance(call, list) for call in calls):
                raise ValueError("not as many argument lists as asked")
            return calls
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
            said = last_line(result.stderr) or error
            raise TaskBroken(f"tests/{target.generator} of task {task.id} made no arguments: {said}") from None

    async def expected(self, task: Task, spec: OracleSpec, calls: list[Call]) -> list[Report]:
        """One report per call; raises TaskBroken when the reference doesn't answer, BoxLost when boxes fail."""
        for target in spec.targets:
            if not reference_has(task, target.module):
                raise TaskBroken(f"task {task.id} has no solution/{target.module.replace('.', '/')}.py")
        question = request(reference(task), calls)
        async with self._turn:
            known = self._known.pop((task.id, question), None)
            if known is None:
                result = await self._run(DRIVER, question, spec.seconds or self.seconds)
                known = check(task, calls, result)
            self._known[task.id, question] = known
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return known

    async def _run(self, driver: str, question: bytes, seconds: float) -> Result:
        for last in (False, True):
            try:
                if self._box is None:
                    self._box = await self.pool.box(sealed=True)
                return await self._box.python(driver, question, seconds, KEEP)
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


def reference(task: Task) -> dict[str, bytes]:
    """The reference's modules, over what the agent was given."""
    given = {path: data for path, data in base_tree(task).items() if path.endswith(".py")}
    solved = {path.removeprefix(SOLUTION): text.encode() for path, text in task.grading.items() if is_reference(path)}
    return given | solved


def is_reference(path: str) -> bool:
    return path.startswith(SOLUTION) and path.endswith(".py")


def reference_has(task: Task, module: str) -> bool:
    path = module.replace(".", "/")
    return not {f"{path}.py", f"{path}/__init__.py"}.isdisjoint(reference(task)) and any(
        map(is_reference, task.grading)
    )


def check(task: Task, calls: list[Call], result: Result) -> list[Report]:
    """The reference's reports, complete and comparable; raises TaskBroken."""
    reports = decode_reports(result.stdout, len(calls))
    if len(reports) < len(calls):
        end = "ran out of time" if result.timed_out else last_line(result.stderr) or f"exit code {result.exit_code}"
        raise TaskBroken(f"the reference of task {task.id} answered {len(reports)} of {len(calls)} calls: {end}")
    for call, report in zip(calls, reports, strict=True):
        if isinstance(report, Foreign):
            raise TaskBroken(f"the reference of task {task.id} returned a {report.kind} for {call}")
    if all(isinstance(report, Raised) for report in reports):
        raise TaskBroken(f"the reference of task {task.id} raises an exception, whatever it is called with")
    return reports


def short(value: object) -> str:
    """A value for people, in at most 80 characters."""
    try:
        text = ascii(value) if not isinstance(value, int) or abs(value) < 1 << 256 else hex(value)
    except ValueError:  # Python spells no integer of thousands of digits
        text = f"a {type(value).__name__} with a huge integer in it"
    return text if len(text) <= 80 else f"{text[:77]}..."


def last_line(text: bytes) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return plain(lines[-1][:200]) if lines else ""


def plain(text: str) -> str:
    """What a box wrote, printable: records can't hold lone surrogates, and terminals obey control characters."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
