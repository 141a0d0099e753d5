"""`stretto bench honest`: right programs in many honest styles, graded in every mode; none may be voided or go unpaid.

    stretto bench honest --count 500 --tasks DIR      # DIR: folders of `pytest` tasks, for packages among them

Half of the programs are graded by the oracle, the others by tests in modes `pytest` and `script`; with `--tasks`, a
fifth are packages as their reference mends them, in a style of their own. What honest people leave lying about (caches,
copies, settings, tests of their own, scratch files) lies beside them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stretto.bench.honest_styles import mended, written
from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.grader import Grader
from stretto.grading.outcome import Grade
from stretto.grading.submission import SOLUTION, base_tree, reference_tree
from stretto.records import Outcome, Task
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder
from stretto.tasks.arguments import draw_arguments
from stretto.tasks.repair import Repair, call, generate

GROUP = 10
"""Programs per task."""
SHARES = {"oracle": 0.5, "pytest": 0.3, "script": 0.2}
PACKAGES = 0.2
BOXES = SandboxConfig(memory_mib=512, workspace_mib=32, warm=2)


@dataclass(frozen=True)
class Group:
    """Right programs for one task."""

    kind: str  # a mode, or `package`
    task: Task
    names: list[str]
    trees: list[dict[str, bytes]]


def with_tests(repair: Repair, mode: str) -> Task:
    """The task, graded by tests of its own instead of the oracle."""
    task, rng, function = repair.task, random.Random(repair.task.id), name_of(repair)
    if mode == "oracle":
        return task
    drawn = [draw_arguments(json.loads(task.grading["tests/oracle.json"])["arguments"], rng) for _ in range(4)]
    asserts = [f"assert {function}({', '.join(map(repr, a))}) == {call(repair.fixed, a)!r}" for a in drawn]
    names = [f"test_{index}" for index in range(len(asserts))]
    tests = f"import sys\nsys.path.insert(0, '/app')\nfrom solution import {function}\n\n"
    tests += "".join(f"def {name}():\n    {text}\n\n" for name, text in zip(names, asserts, strict=True))
    grading = {"solution/solution.py": task.grading["solution/solution.py"]}
    if mode == "pytest":
        ids = [f"test_hidden.py::{name}" for name in names]
        grading["tests/pytest.json"] = json.dumps({"fail_to_pass": ids, "package": "solution"})
        grading["tests/tree/test_hidden.py"] = tests
    else:
        grading["tests/test_hidden.py"] = tests + "".join(f"{name}()\n" for name in names)
        grading["tests/test.sh"] = "python3 /tests/test_hidden.py && echo 1 > /logs/verifier/reward.txt\n"
    return msgspec.structs.replace(task, grading=grading, mode=mode)


def name_of(repair: Repair) -> str:
    return repair.fixed[0].split("(")[0].removeprefix("def ")


def programs(mode: str, count: int, seed: int) -> Iterator[Group]:
    """`count` right programs for tasks of the quickstart, in groups."""
    for repair in islice(generate("train", seed), -(-count // GROUP)):
        rng = random.Random(f"{mode}/{seed}/{repair.task.id}")
        source, given = "\n".join(repair.fixed) + "\n", base_tree(repair.task)
        size = min(GROUP, count)
        count -= size
        pairs = [written(source, name_of(repair), rng) for _ in range(size)]
        trees = [given | {path: text.encode() for path, text in files.items()} for _, files in pairs]
        yield Group(mode, with_tests(repair, mode), [name for name, _ in pairs], trees)


async def packages(tasks: list[Task], count: int, seed: int, pool: BoxPool) -> list[Group]:
    """`count` packages as the references of tasks mend them."""
    groups, each = [], -(-count // max(len(tasks), 1))
    for task in tasks:
        rng, size = random.Random(f"package/{seed}/{task.id}"), min(each, count)
        count -= size
        reference, given = await reference_tree(task, pool), base_tree(task)
        changed = [path.removeprefix(SOLUTION) for path in task.grading if path.startswith(SOLUTION)]
        changed = [path for path in changed if path.endswith(".py") and reference[path] != given.get(path)]
        pairs = [mended(reference, changed, rng) for _ in range(size)]
        groups.append(Group("package", task, [name for name, _ in pairs], [tree for _, tree in pairs]))
    return [group for group in groups if group.trees]


async def measure(count: int, seed: int, tasks: list[Task], progress: Progress) -> list[tuple[str, str, Grade]]:
    """(kind, style, grade) of each program."""
    pool = BoxPool(BOXES)
    await pool.start()
    grader = Grader(GradingConfig(), pool)
    try:
        kept = round(count * PACKAGES) if tasks else 0
        counts = {mode: int((count - kept) * share) for mode, share in SHARES.items()}
        counts["oracle"] += count - kept - sum(counts.values())
        groups = [group for mode, number in counts.items() for group in programs(mode, number, seed)]
        groups += await packages(tasks[:kept], kept, seed, pool)
        found: list[tuple[str, str, Grade]] = []
        bar = progress.add_task("graded", total=count)
        for group in groups:
            grades = await grader.grade(group.task, group.trees, seed)
            found += [(group.kind, name, grade) for name, grade in zip(group.names, grades, strict=True)]
            progress.update(bar, advance=len(grades))
        return found
    finally:
        await grader.close()
        await pool.close()


def honest(count: int, seed: int, tasks: Path | None, file: Path | None, console: Console) -> bool:
    """Run the measurement; True when no program was voided and all were paid. Raises TaskError."""
    known = [task for task in folder.read_all(tasks) if task.mode == "pytest"] if tasks else []
    with Progress(console=console, transient=True) as progress:
        found = asyncio.run(measure(count, seed, known, progress))
    said = summary(found)
    show(found, said, console)
    if file:
        file.write_text(json.dumps(said, indent=1) + "\n")
    return all(check["ok"] for check in said["checks"].values())


def summary(found: list[tuple[str, str, Grade]]) -> dict[str, Any]:
    voided = [(kind, name, grade) for kind, name, grade in found if grade.outcome is Outcome.VOID]
    unpaid = [(kind, name, grade) for kind, name, grade in found if not grade.solved]
    checks = {"voided": len(voided), "unpaid": len(unpaid)}
    return {
        "programs": dict(Counter(kind for kind, _, _ in found)),
        "styles": len({name for _, name, _ in found}),
        "signs": dict(Counter(sign for _, _, grade in found for sign in grade.detected)),
        "refused": [
            {
                "kind": kind,
                "style": name,
                "outcome": grade.outcome.value,
                "reason": grade.reason,
                "signs": grade.detected,
            }
            for kind, name, grade in unpaid
        ],
        "checks": {name: {"value": value, "limit": 0, "ok": value == 0} for name, value in checks.items()},
    }


def show(found: list[tuple[str, str, Grade]], said: dict[str, Any], console: Console) -> None:
    table = Table("graded by", "programs", "paid", "voided", box=None)
    for kind in said["programs"]:
        grades = [grade for which, _, grade in found if which == kind]
        voided = sum(grade.outcome is Outcome.VOID for grade in grades)
        table.add_row(kind, str(len(grades)), str(sum(grade.solved for grade in grades)), str(voided))
    console.print(table)
    signs = ", ".join(f"{name} {number}" for name, number in sorted(said["signs"].items())) or "none"
    console.print(f"{said['styles']} styles; signs that were counted and void nothing: {signs}")
    for row in said["refused"][:20]:
        console.print(f"{row['kind']}, {row['style']}: {row['outcome']}, {row['reason']}", markup=False)
