"""Functions to write from a description: `stretto tasks make codeio --out DIR`.

The package `reasoning-gym` (an extra: `pip install 'stretto[tasks]'`) ships 2,750 functions with descriptions,
references and input generators, after CodeI/O (arXiv 2502.07316). A task is one of them: the agent gets the description
and three examples, and is graded by the oracle on inputs that the generator draws anew each time. The references were
written by a model, so that each is tried first: it must need the standard library only, be fast, return plain values,
always the same ones, and not be matched by a constant.

Only the package's data file is read; nothing of the package is imported.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import hashlib
import importlib.util
import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

from stretto.grading.compare import Raised, Report, Returned, plainly
from stretto.grading.modes.spec import TaskBroken
from stretto.grading.oracle import Call, Oracle, read_spec
from stretto.records import Task
from stretto.sandbox.pool import BoxPool
from stretto.tasks.admission import Checker
from stretto.tasks.factories.edits import Source, first_line, functions
from stretto.tasks.factories.package import SourceError

FUNCTION = "main_solution"
EXAMPLES, EXAMPLE_LENGTH = 3, 240
PROBES = 96
"""Calls on which a reference is tried."""
MOST_COMMON, RAISED = 0.6, 0.2
"""Largest shares of the most common answer, and of exceptions."""
WAVE = 32
SECONDS = 2.0
TOLERANCE = 1e-9
UNSTABLE = frozenset("random time os sys threading multiprocessing socket subprocess uuid secrets tempfile".split())
"""Modules whose use makes an answer depend on more than the arguments, or that have nothing to do in a function."""


def rows(path: Path | None = None) -> list[dict[str, Any]]:
    """The package's functions. Raises SourceError when it is not installed."""
    if path is None:
        found = importlib.util.find_spec("reasoning_gym")
        places = list(found.submodule_search_locations or ()) if found else []
        if not places:
            raise SourceError("the package reasoning-gym is not installed: pip install 'stretto[tasks]'")
        path = Path(places[0], "data", "codeio-hq.jsonl.gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} cannot be read: {error}; Stretto knows reasoning-gym 0.1.25") from error


async def tasks(pool: BoxPool, count: int, seed: int, path: Path | None = None) -> AsyncGenerator[Task]:
    """Up to `count` tasks, in an order that depends on the seed. Raises SourceError."""
    candidates = [task for row in rows(path) if (task := task_of(row)) is not None]
    random.Random(f"codeio/{seed}").shuffle(candidates)
    lanes = [(Oracle(pool, SECONDS), Checker(pool, times=1)) for _ in range(os.cpu_count() or 1)]
    made = 0
    try:
        for start in range(0, len(candidates), WAVE):
            wave = candidates[start : start + WAVE]
            parts = [try_all(wave[n :: len(lanes)], *lane) for n, lane in enumerate(lanes)]
            ready = {task.id: task for part in await asyncio.gather(*parts) for task in part}
            for task in wave:
                if task.id in ready and made < count:
                    made += 1
                    yield ready[task.id]
            if made == count:
                return
    finally:
        for oracle, checker in lanes:
            await oracle.close()
            await checker.close()


async def try_all(candidates: list[Task], oracle: Oracle, checker: Checker) -> list[Task]:
    """Those that are fit: the reference is sound, and neither stubs nor constants pass for it."""
    ready = [await probe(task, oracle) for task in candidates]
    return [task for task in ready if task is not None and not (await checker.check(task)).reason]


def task_of(row: dict[str, Any]) -> Task | None:
    """The task without its examples; None when the function can't be one."""
    code, generator = str(row.get("code_sample", "")), str(row.get("input_generator", ""))
    try:
        source = Source(code.encode())
        drawn = ast.parse(generator)
    except (SyntaxError, ValueError):
        return None
    solution = next((node for name, node in functions(source.tree) if name == FUNCTION), None)
    makers = [name for name, _ in functions(drawn) if name.startswith("generate_input")]
    if solution is None or not makers or not stable(source.tree, UNSTABLE) or not stable(drawn, frozenset()):
        return None
    arguments = solution.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        return None
    names = [argument.arg for argument in arguments.args]
    digest = hashlib.sha256(code.encode()).hexdigest()[:10]
    header = source.data[source.line(first_line(solution)) : source.span(solution.body[0])[0]].decode().rstrip()
    header = header if header.endswith(":") else f"def {FUNCTION}({', '.join(names)}):"
    inputs = "\n".join(
        [
            "import random",
            "from random import Random",
            "",
            generator,
            "",
            "",
            "def generate(rng):",
            f"    drawn = {makers[-1]}(rng)",
            f"    return [drawn[name] for name in {names!r}]",
            "",
        ]
    )
    oracle = {"module": "solution", "function": FUNCTION, "generator": "inputs.py", "tolerance": TOLERANCE}
    return Task(
        id=f"codeio/{digest}",
        split="",
        instruction="\n\n".join(
            [f"Write `{FUNCTION}` in solution.py.", row["task_description"], row["input_output_spec"]]
        ),
        files={"solution.py": f"{header}\n    raise NotImplementedError\n"},
        grading={
            "solution/solution.py": code.rstrip() + "\n",
            "tests/inputs.py": inputs,
            "tests/oracle.json": json.dumps(oracle | {"seconds": SECONDS}),
        },
        metadata={"factory": "codeio", "difficulty": row.get("difficulty", 0), "license": "Apache-2.0"},
        mode="oracle",
    )


def stable(tree: ast.Module, refused: frozenset[str]) -> bool:
    """Whether only the standard library is imported, and nothing of `refused`."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names or (top in refused and used(tree, top)):
                return False
    return True


def used(tree: ast.Module, module: str) -> bool:
    """Whether anything but the import mentions it: references import what they don't use."""
    mentioned = any(isinstance(node, ast.Name) and node.id == module for node in ast.walk(tree))
    return mentioned or any(isinstance(node, ast.ImportFrom) and node.module == module for node in ast.walk(tree))


async def probe(task: Task, oracle: Oracle) -> Task | None:
    """The task with its examples; None when its reference is not fit to be one."""
    try:
        spec = read_spec(task)
        calls = await oracle.calls(task, spec, PROBES, seed=-1)
        reports = await oracle.expected(task, spec, calls)
    except (TaskBroken, msgspec.DecodeError):
        return None
    common = Counter(repr(report.value) if isinstance(report, Returned) else "" for report in reports)
    raised = sum(isinstance(report, Raised) for report in reports)
    if raised > RAISED * PROBES or common.most_common(1)[0][1] > MOST_COMMON * PROBES:
        return None
    examples = shown(calls, reports)
    if not examples:
        return None
    tests = "\n".join([f"from solution import {FUNCTION}", "", *(f"assert {text}" for text in examples), ""])
    instruction = "\n".join([task.instruction, "", "Examples:", *(f"    {text}" for text in examples)])
    return msgspec.structs.replace(task, instruction=instruction, files={**task.files, "test_solution.py": tests})


def shown(calls: list[Call], reports: list[Report]) -> list[str]:
    """Short calls with different answers, as the conditions that a test asserts."""
    texts: dict[str, str] = {}
    for call, report in zip(calls, reports, strict=True):
        if isinstance(report, Returned) and report.value == report.value:
            value = repr(plainly(report.value))
            text = f"{FUNCTION}({', '.join(map(repr, call.arguments))}) == {value}"
            if len(text) <= EXAMPLE_LENGTH and "nan" not in value and "inf" not in text:
                texts.setdefault(value, text)
    return sorted(texts.values(), key=len)[:: max(1, len(texts) // EXAMPLES)][:EXAMPLES]
