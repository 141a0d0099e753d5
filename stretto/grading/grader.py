"""Grades the submissions of one group, each task in its mode.

Whatever a submission does is its own: a grade, never an exception. Only what is proven from outside to be ours is
`infra`: a task that its own reference does not pass, boxes that can't be started. Equal submissions are run once.

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


def more_seconds(task: Task, submissions: int) -> float:
    """How long the tests of a task may take to grade so many submissions, beyond what an oracle would need. Whoever
    waits for a grade adds it to his patience: a hanging test is the policy's doing, and must not look like ours."""
    try:
        if task.mode == "pytest":
            seconds, runs = read_pytest(task).seconds, MOST_RERUNS + 1
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

    def __init__(self, config: GradingConfig, pool: BoxPool):
        self.config, self.pool = config, pool
        self.oracle = OracleMode(pool, config.hidden_calls, config.seconds)
        self.modes = {"oracle": self.oracle, "pytest": PytestMode(pool), "script": ScriptMode(pool)}

    async def grade(
        self, task: Task, submissions: list[dict[str, bytes]], seed: int, most: float = math.inf
    ) -> list[Grade]:
        """One grade per submission, in order. Never raises for what a submission does. `most`: seconds that one run of
        these submissions may take, where the task allows more."""
        keys = [frozenset(files.items()) for files in submissions]
        distinct = list(dict.fromkeys(keys))
        try:
            if (mode := self.modes.get(task.mode)) is None:
                raise TaskBroken(f"task {task.id} has mode {task.mode!r}; there are {', '.join(self.modes)}")
            grades = await mode.grade(task, [dict(key) for key in distinct], seed, most)
        except (TaskBroken, BoxLost) as error:
            grades = [Grade(False, Outcome.INFRA, 0, 0, str(error))] * len(distinct)
        found = {
            key: weighed(task.mode, grade, inspect_tree(task, dict(key)))
            for key, grade in zip(distinct, grades, strict=True)
        }
        return [found[key] for key in keys]

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
