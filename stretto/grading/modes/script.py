"""Mode `script`: a submission is right when the task's own `tests/test.sh` gives it a reward of 1.

The script runs over the graded tree in a fresh box, in which nothing the agent started is alive and nothing it wrote
but the tree exists; the reward is read when the script has ended and no process but the reader is left. What the script
starts of the tree could still write that file or fool the script, so that a passing run is repeated in random order,
twice as it was and twice with every Python test of the task turned into a twin that can't pass (twins.py): who is paid
for a twin is `void`, and who is not paid each time for the original is wrong. Tests have the layout of twins in every
run, so that no run can be told from another by it.

A script that has no Python tests, that pays the reference for twins too, or not in another layout, can't be guarded in
this way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import msgspec

from stretto.grading import twins
from stretto.grading.modes.fresh import TreeRefused, run_fresh
from stretto.grading.modes.spec import ScriptSpec, TaskBroken, read_script
from stretto.grading.oracle import last_line, plain
from stretto.grading.outcome import Grade
from stretto.grading.submission import TREE, fingerprint, has_reference, reference_tree, restored
from stretto.records import Outcome, Task
from stretto.sandbox.box import BoxBroken, BoxLost
from stretto.sandbox.pool import BoxPool

DRIVER = (resources.files("stretto.grading") / "script_driver.py").read_text()
TWIN = "twin-passed"
UNGUARDED = "no Python test of the task can be turned into a twin, so that the script's word is all there is"
VARIANTS = 4
REMEMBERED = 64


@dataclass(frozen=True)
class Paid:
    """What one run of the script was worth: finite, from 0 to 1."""

    reward: float
    reason: str = ""
    survivors: int = 0  # processes that outlived the script

    @property
    def full(self) -> bool:
        return self.reward == 1


@dataclass(frozen=True)
class Trial:
    """What submissions to a task are run with."""

    original: Task
    twinned: Task
    guarded: bool  # whether twins tell
    lingers: bool  # whether the reference has processes that outlive the script, too


class ScriptMode:
    """The grader of script tasks; remembers what references are paid."""

    def __init__(self, pool: BoxPool):
        self.pool = pool
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)
        self._references: OrderedDict[tuple[str, int], bool] = OrderedDict()
        self._lingers: dict[str, bool] = {}
        self._turn = asyncio.Lock()

    async def grade(
        self, task: Task, submissions: list[dict[str, bytes]], seed: int, most: float = math.inf
    ) -> list[Grade]:
        """One grade per submission, in order. Raises TaskBroken, and BoxLost for the reference's box."""
        spec = read_script(task)
        index = random.Random(f"{task.id}/{seed}").randrange(VARIANTS)
        original, twinned = laid_out(task), turned(task, random.Random(f"{task.id}/{index}"))
        async with self._turn:
            guarded = await self._guarded(task, spec, original, twinned, index)
        lingers = self._lingers.get(fingerprint(task), True)
        trial = Trial(original if guarded else task, twinned, guarded, lingers)
        return await asyncio.gather(*(self._judge(trial, spec, files, most) for files in submissions))

    def counted(self, task: Task, files: dict[str, bytes]) -> dict[str, bytes]:
        """What of a submission is graded. Raises TaskBroken."""
        spec = read_script(task)
        return restored(task, files, spec.protected, spec.remove, spec.unprotected)

    async def _guarded(self, task: Task, spec: ScriptSpec, original: Task, twinned: Task, index: int) -> bool:
        """Whether twins tell: the reference is paid for the originals, in the layout of twins, and not for these.

        Raises TaskBroken, BoxLost.
        """
        key = (fingerprint(task), index)
        if key not in self._references:
            guarded = twinned.grading != original.grading
            if has_reference(task):
                try:
                    tree = await reference_tree(task, self.pool)
                    paid = await self.run(task, spec, tree)
                    guarded = guarded and (await self.run(original, spec, tree)).full
                    guarded = guarded and not (await self.run(twinned, spec, tree)).full
                except (BoxBroken, TreeRefused) as error:
                    raise TaskBroken(f"the reference of task {task.id} can't be run: {error}") from None
                self._lingers[key[0]] = paid.survivors > 0
                if not paid.full:
                    raise TaskBroken(f"the reference of task {task.id} gets {paid.reward:g}: {paid.reason}")
            self._references[key] = guarded
            if len(self._references) > REMEMBERED:
                self._references.popitem(last=False)
        return self._references[key]

    async def _judge(self, trial: Trial, spec: ScriptSpec, files: dict[str, bytes], most: float) -> Grade:
        try:
            first = await self.run(trial.original, spec, files, most)
            if first.survivors and not trial.lingers:
                return Grade(False, Outcome.SCORED, 0, 1, f"{first.survivors} processes outlived the script")
            if not first.full:
                return Grade(False, Outcome.SCORED, 0, 1, first.reason or f"the script's reward is {first.reward:g}")
            again = 2 * [(trial.original, True), (trial.twinned, False)] if trial.guarded else []
            for which, pays in secrets.SystemRandom().sample(again, len(again)):
                paid = await self.run(which, spec, files, most)
                if paid.full and not pays:
                    reason = "the script paid although its tests were turned into tests that can't pass"
                    return Grade(False, Outcome.VOID, 1, 1, reason, [TWIN])
                if pays and not paid.full:
                    return Grade(False, Outcome.SCORED, 0, 1, f"paid once and not again: {paid.reason}")
        except TreeRefused as error:
            return Grade(False, Outcome.FAULT, 0, 1, f"the submission can't be graded: {error}")
        except BoxBroken:
            return Grade(False, Outcome.FAULT, 0, 1, "the submission broke the box it ran in, twice")
        except BoxLost as error:
            return Grade(False, Outcome.INFRA, 0, 1, str(error))
        return Grade(True, Outcome.SCORED, 1, 1, "" if trial.guarded else UNGUARDED)

    async def run(self, task: Task, spec: ScriptSpec, files: dict[str, bytes], most: float = math.inf) -> Paid:
        """The script over a submission. Raises TreeRefused, BoxBroken, BoxLost."""
        tree = self.counted(task, files)
        mark = secrets.token_hex(16)
        tests = {
            path.removeprefix("tests/"): text
            for path, text in task.grading.items()
            if path.startswith("tests/") and not path.startswith(TREE)
        }
        order = {"mark": mark, "files": tests, "libraries": bool(task.libraries)}
        async with self._slots:
            question, seconds = json.dumps(order).encode(), min(task.limits.get("seconds", spec.seconds), most)
            result = await run_fresh(self.pool, task, tree, DRIVER, question, seconds, task.libraries)
        if result.timed_out:
            return Paid(0.0, "the script ran out of time")
        if result.oom:
            return Paid(0.0, "the script ran out of memory")
        return read_reward(result.stdout, mark, last_line(result.stderr))


def turned(task: Task, rng: random.Random) -> Task:
    """The task with every test of its Python files turned into its twin."""
    return rewritten(task, lambda text, names: twins.turned(text, names, rng))


def laid_out(task: Task) -> Task:
    """The task with the files that `turned` changes in the layout which it gives them."""
    return rewritten(task, lambda text, names: twins.laid_out(text))


def rewritten(task: Task, rewrite: Callable[[str, set[str]], str]) -> Task:
    """The task with its Python files that hold tests rewritten; those that can't be are left as they are."""
    grading = dict(task.grading)
    for path, text in task.grading.items():
        names = twins.tests(text) if path.startswith("tests/") and path.endswith(".py") else []
        if names:
            with contextlib.suppress(ValueError, RecursionError):
                grading[path] = rewrite(text, set(names))
    return msgspec.structs.replace(task, grading=grading)


def read_reward(data: bytes, mark: str, said: str) -> Paid:
    """What the driver told of the reward file, trusting nothing."""
    ended = f"; its last words: {said}" if said else ""
    try:
        start = data.index(mark.encode()) + len(mark)
        code, text, kind, survivors = msgspec.json.decode(data[start:], type=tuple[int, str | None, str | None, int])
    except (ValueError, msgspec.DecodeError):
        return Paid(0.0, f"the script did not come to its end{ended}")
    if text is None:
        return Paid(0.0, f"the script wrote no reward and ended with {code}{ended}")
    try:
        value = msgspec.json.decode(text) if kind == "reward.json" else float(text)
    except (ValueError, msgspec.DecodeError):
        value = None
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values()), None) if len(value) == 1 else None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Paid(0.0, f"the script's reward is not a number: {plain(text[:60])}")
    if not math.isfinite(value) or not 0 <= value <= 1:
        return Paid(0.0, f"the script's reward {plain(text[:60].strip())} is not between 0 and 1")
    return Paid(float(value), said, survivors)
