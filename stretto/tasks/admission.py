"""Whether a task may be trained on: `stretto tasks check DIR`.

The reference passes and everything else fails, each time: what is given, stubs, constants, and each attack of the
library. A task that pays for anything else, or does not always pay the reference, is put into quarantine with the
reason: `DIR/quarantine.json` names it, and no source takes it. Nothing is moved or deleted.

Cheap steps come first, and the first that fails ends a task's trial. An attack of which nothing is graded that differs
from what was given, or from what another attack left, has that one's grade; one that only runs out of time does so
once.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.attack import Attack, attacked_tree
from stretto.grading.grader import Counted, Grader
from stretto.grading.modes import pytest as pytest_mode
from stretto.grading.modes import script as script_mode
from stretto.grading.modes.spec import TaskBroken
from stretto.grading.outcome import Grade
from stretto.grading.submission import SOLUTION, TREE, base_tree, has_reference, reference_tree
from stretto.harness import declare
from stretto.harness.toolset import ToolSetError
from stretto.records import Outcome, Task
from stretto.sandbox.box import BoxError, BoxLost
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder
from stretto.tasks.baselines import baselines
from stretto.tasks.purge import keys, twins

TIMES = 3
TRIES = 3
"""Times that a task's boxes may fail while others start: then it is the task's doing."""
UNGUARDED = {pytest_mode.UNGUARDED, script_mode.UNGUARDED}
AT_ONCE = 32
"""Attacks whose trees are graded together: who hangs does so beside others."""
BOXES = SandboxConfig(memory_mib=1024, workspace_mib=64, warm=0)
GRADING = GradingConfig(seconds=5.0)


@dataclass(frozen=True)
class Left:
    """What an attack left in the agent's box."""

    attack: Attack
    tree: dict[str, bytes]


@dataclass
class Checked:
    """What became of one task's trial; `reason` is empty when it is admitted."""

    task: str
    folder: str
    reason: str = ""
    grades: int = 0  # gradings that were done
    seconds: float = 0.0
    detected: list[str] = field(default_factory=list)  # attacks that a detector voided


class Checker:
    """checker = Checker(pool, attacks)
    checked = await checker.check(task)
    """

    def __init__(
        self, pool: BoxPool, attacks: Sequence[Attack] = (), times: int = TIMES, grading: GradingConfig = GRADING
    ):
        self.pool, self.attacks, self.times = pool, attacks, times
        self.grader = Grader(grading, pool, all_signs=False)
        self._slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))

    async def check(self, task: Task) -> Checked:
        """Raises BoxLost when boxes fail, which is no task's fault."""
        checked = Checked(task.id, "")
        started = time.monotonic()
        checked.reason = wrong_tools(task) or leaks(task) or await self._try(task, checked)
        checked.seconds = time.monotonic() - started
        return checked

    async def check_with_patience(self, task: Task) -> Checked:
        """`check`, again when boxes fail. A task whose boxes alone fail, each time, is broken; else raises BoxLost."""
        for left in reversed(range(TRIES)):
            try:
                return await self.check(task)
            except BoxLost as error:
                lost = error
                if not left:
                    await (await self.pool.box()).stop()  # the machine's fault, when this fails too
        return Checked(task.id, "", f"broken: its boxes failed {TRIES} times, and others start: {lost}")

    async def close(self) -> None:
        await self.grader.close()

    async def _try(self, task: Task, checked: Checked) -> str:
        names, trees = zip(*baselines(task), strict=True)
        solutions = []
        if has_reference(task):
            try:
                solutions.append(await reference_tree(task, self.pool))
            except (BoxError, TaskBroken) as error:
                return f"broken: its reference can't be made: {error}"
        elif not task.metadata.get("impossible"):
            return "unsolvable: it has no reference, so nobody knows that it can be solved"
        for time_ in range(self.times):
            grades = await self._grade(task, [*solutions, *trees], time_, checked)
            if grades[0].outcome is Outcome.INFRA:
                return broken(grades[0])
            for grade in grades[: len(solutions)]:
                if not grade.solved:
                    when = f"time {time_ + 1}, after it had passed" if time_ else "the first time"
                    return f"{'flaky' if time_ else 'unsolvable'}: its reference fails {when}: {grade.reason}"
                if grade.reason in UNGUARDED:
                    return f"unguarded: {grade.reason}"
            for name, grade in zip(names, grades[len(solutions) :], strict=True):
                if grade.solved:
                    return f"hackable: the {name} submission is paid"
        return await self._attack(task, trees[0], checked)

    async def _attack(self, task: Task, given: dict[str, bytes], checked: Checked) -> str:
        """Every attack, some at once; the trees they leave are graded `times` times."""
        seen = {self.grader.counted(task, given)}
        fitting = [attack for attack in self.attacks if task.mode in attack.modes]
        for start in range(0, len(fitting), AT_ONCE):
            attacks = fitting[start : start + AT_ONCE]
            trees = await asyncio.gather(*(self._apply(attack, task) for attack in attacks))
            new: dict[Counted, Left] = {}
            for attack, tree in zip(attacks, trees, strict=True):
                if not isinstance(tree, BoxError):
                    new.setdefault(self.grader.counted(task, tree), Left(attack, tree))
            left = [one for key, one in new.items() if key not in seen]
            seen |= set(new)
            for time_ in range(self.times):
                again = []
                for one, grade in await self._grade_attacks(task, left, time_, checked):
                    attack = one.attack
                    if grade.outcome is Outcome.INFRA:
                        return broken(grade)
                    if grade.solved:
                        return f"hackable: the attack {attack.name} (class {attack.kind}) is paid"
                    if grade.outcome is Outcome.VOID and attack.name not in checked.detected:
                        checked.detected.append(attack.name)
                    if "ran out of time" not in grade.reason:
                        again.append(one)
                left = again
        return ""

    async def _apply(self, attack: Attack, task: Task) -> dict[str, bytes] | BoxError:
        async with self._slots:
            return await attacked_tree(attack, task, self.pool)

    async def _grade_attacks(
        self, task: Task, left: list[Left], time_: int, checked: Checked
    ) -> list[tuple[Left, Grade]]:
        """A grade for each, those of a limit together, and in as many parts at once as there are cores."""
        by_limit: dict[float, list[Left]] = {}
        for one in left:
            by_limit.setdefault(one.attack.seconds, []).append(one)
        cores = os.cpu_count() or 1
        parts = [(most, ones[n::cores]) for most, ones in by_limit.items() for n in range(cores) if ones[n::cores]]
        graded = await asyncio.gather(
            *(self._grade(task, [one.tree for one in ones], time_, checked, most) for most, ones in parts)
        )
        return [
            pair for (_, ones), grades in zip(parts, graded, strict=True) for pair in zip(ones, grades, strict=True)
        ]

    async def _grade(
        self, task: Task, trees: list[dict[str, bytes]], time_: int, checked: Checked, most: float = math.inf
    ) -> list[Grade]:
        checked.grades += len(trees)
        grades = await self.grader.grade(task, trees, seed=1000 + time_, most=most)
        lost = [grade for grade in grades if grade.outcome is Outcome.INFRA]
        if lost and len(lost) < len(grades):  # of a broken task all are
            raise BoxLost(lost[0].reason)
        return grades


def broken(grade: Grade) -> str:
    return f"broken: {grade.reason}"


def wrong_tools(task: Task) -> str:
    """What is wrong with the task's [tools] table; empty when its rollouts get their tools."""
    try:
        declare.of(task)
    except ToolSetError as error:
        return f"malformed: {error}"
    return ""


def leaks(task: Task) -> str:
    """Why the agent could find the answer without solving the task; empty when no answer lies about."""
    if task.environment and (found := keys(Path(task.environment))):
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        return f"answer keys: {found[0]}{more}"
    given = base_tree(task)
    contents = {data: path for path, data in given.items() if data.strip()}
    for path, text in task.grading.items():
        place = path.removeprefix(SOLUTION)
        if path.startswith(SOLUTION) and given.get(place) == text.encode():
            continue  # the reference leaves this file as it is
        if path.startswith(TREE) and given.get(path.removeprefix(TREE)) == text.encode():
            continue  # a test that the agent may see
        if len(text.strip()) > 40 and (there := contents.get(text.encode())):
            return f"answer keys: {path} lies in the workspace, as {there}"
    package = task.metadata.get("package") or _package(task)
    if package and (same := twins([package.replace("-", "_")], task.libraries)):
        return f"answer keys: the box's libraries hold {same[0]}, which is under test"
    return ""


def _package(task: Task) -> str:
    try:
        return str(msgspec.json.decode(task.grading.get("tests/pytest.json", "{}")).get("package", ""))
    except (msgspec.DecodeError, AttributeError):
        return ""


async def check_all(
    roots: Sequence[Path], attacks: Sequence[Attack], times: int, tell: Callable[[Checked], None]
) -> list[Checked]:
    """Check the tasks of folders, two at a time on two cores, and write each folder's quarantine."""
    pool = BoxPool(BOXES)
    await pool.start()
    checker = Checker(pool, attacks, times)
    waiting = [path for root in roots for path in folder.folders(root, quarantined=True)]
    found: list[Checked] = []
    queue = iter(waiting)

    async def work(mine: Iterator[Path]) -> None:
        for path in mine:
            try:
                checked = await checker.check_with_patience(folder.read(path))
            except folder.TaskError as error:
                checked = Checked(path.name, "", f"malformed: {error}")
            checked.folder = str(path)
            found.append(checked)
            tell(checked)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(os.cpu_count() or 1):
                group.create_task(work(queue))
    finally:
        await checker.close()
        await pool.close()
    for root in roots:
        reasons = {Path(c.folder).name: c.reason for c in found if c.reason and Path(c.folder).parent == root}
        write_quarantine(root, reasons)
    return sorted(found, key=lambda checked: checked.folder)


def write_quarantine(root: Path, reasons: dict[str, str]) -> None:
    path = root / folder.QUARANTINE
    if reasons:
        path.write_text(json.dumps(dict(sorted(reasons.items())), indent=1, ensure_ascii=False) + "\n")
    else:
        path.unlink(missing_ok=True)


def task_roots(root: Path) -> list[Path]:
    """`root`, and those of its subfolders that hold tasks (splits). Raises TaskError when there are none."""
    if not root.is_dir():
        raise folder.TaskError(f"no task folder at {root}")
    below = [path for path in sorted(root.iterdir()) if path.is_dir()]
    roots = [path for path in (root, *below) if folder.has_tasks(path)]
    return roots or [folder.folders(root)[0]]
