"""Grades the submissions of one group, each task in its mode.

Whatever a submission does is its own: a grade, never an exception. Only what is proven from outside to be ours is
`infra`: a task that its own reference does not pass, boxes that can't be started. Submissions are run once that are
equal in all that is graded of them.

Signs of cheating (detectors/) are in `Grade.detected`. The certain ones void a grade that would have been paid, where
the policy's code shares a process with tests; the others change nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os

from stretto.config import GradingConfig
from stretto.grading.detectors import inspect_tree
from stretto.grading.detectors.signs import SIGNS, VOIDING
from stretto.grading.modes.oracle import OracleMode
from stretto.grading.modes.pytest import MOST_RERUNS, PytestMode
from stretto.grading.modes.script import ScriptMode
from stretto.grading.modes.spec import TaskBroken, read_pytest, read_script
from stretto.grading.outcome import Grade
from stretto.records import Outcome, Task
from stretto.sandbox.box import BoxLost
from stretto.sandbox.inside.wire import PATIENCE
from stretto.sandbox.pool import BoxPool

Counted = frozenset[tuple[str, bytes]]


def more_seconds(task: Task, submissions: int) -> float:
    """How long the tests of a task may take to grade so many submissions, beyond what an oracle would need. Whoever
    waits for a grade adds it to his patience: a hanging test is the policy's doing, and must not look like ours."""
    try:
        if task.mode == "pytest":
            seconds, runs = read_pytest(task).seconds, MOST_RERUNS + 2
        elif task.mode == "script":
            seconds, runs = task.limits.get("seconds", read_script(task).seconds), 5
        else:
            return 0.0
    except TaskBroken:
        return 0.0
    at_once = os.cpu_count() or 1
    return PATIENCE * seconds * runs * (1 + -(-submissions // at_once))


class Grader:
    """grader = Grader(config.grading, pool)
    grades = await grader.grade(task, [{"solution.py": b"..."}, ...], seed=7)
    """

    def __init__(self, config: GradingConfig, pool: BoxPool, all_signs: bool = True):
        """`all_signs`: look for signs in every submission, or only in one that would be paid without them."""
        self.config, self.pool, self.all_signs = config, pool, all_signs
        self.oracle = OracleMode(pool, config.hidden_calls, config.seconds)
        self.modes = {"oracle": self.oracle, "pytest": PytestMode(pool), "script": ScriptMode(pool)}

    async def grade(
        self, task: Task, submissions: list[dict[str, bytes]], seed: int, most: float = math.inf
    ) -> list[Grade]:
        """One grade per submission, in order. Never raises for what a submission does. `most`: seconds that one run of
        these submissions may take, where the task allows more."""
        try:
            keys = [self.counted(task, files) for files in submissions]
            distinct = dict(zip(keys, submissions, strict=True))
            graded = await self.modes[task.mode].grade(task, list(distinct.values()), seed, most)
            found = dict(zip(distinct, graded, strict=True))
            grades = [found[key] for key in keys]
        except (TaskBroken, BoxLost) as error:
            grades = [Grade(False, Outcome.INFRA, 0, 0, str(error))] * len(submissions)
        trees = [frozenset(files.items()) for files in submissions]
        looked = {tree for tree, grade in zip(trees, grades, strict=True) if self.all_signs or grade.solved}
        signs = {tree: inspect_tree(task, dict(tree)) for tree in looked}
        return [weighed(task.mode, grade, signs.get(tree, [])) for grade, tree in zip(grades, trees, strict=True)]

    def counted(self, task: Task, files: dict[str, bytes]) -> Counted:
        """What of a submission decides its grade, signs aside. Raises TaskBroken."""
        if task.mode not in self.modes:
            raise TaskBroken(f"task {task.id} has mode {task.mode!r}; there are {', '.join(self.modes)}")
        return frozenset(self.modes[task.mode].counted(task, files).items())

    async def close(self) -> None:
        await self.oracle.close()


def weighed(mode: str, grade: Grade, signs: list[str]) -> Grade:
    """The grade with the signs found in its submission, void if one of them is certain and could have helped."""
    detected = [*grade.detected, *signs]
    certain = [name for name in signs if name in VOIDING]
    if grade.solved and certain and mode != "oracle":
        reason = f"the submission {SIGNS[certain[0]].what}"
        return dataclasses.replace(grade, solved=False, outcome=Outcome.VOID, reason=reason, detected=detected)
    return dataclasses.replace(grade, detected=detected)
