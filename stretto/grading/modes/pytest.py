"""Mode `pytest`: a submission is right when each required test was seen and passed, and passing meant something.

The graded tree (submission.py) lies in a fresh box; `pytest_driver.py` runs the required tests in it. They share a
process with the policy's code, which could make it say anything, so that what it says is checked by reruns: in each of
them some tests are replaced by twins that can't pass (twins.py), under the same names. Whose twins pass has forced
them to: `void`. Who passes and then doesn't is not right.

    tree ─▶ run ─▶ a test missing, failed, skipped ─▶ wrong
             └───▶ all passed ─▶ rerun with twins ─▶ a twin passed ─▶ void;  an original failed ─▶ wrong;  else right

The tests that must be made to pass go first, by themselves and until one fails: most wrong submissions end there. Test
files have the layout of twins in every run, so that no run can be told from another by it.

The reference goes the same way first: what it does not pass is no required test but a broken task, a twin that it
passes is none, and files that fail in another layout keep theirs and are never turned. Who tosses a coin for each lie,
with the best of coins, gets through once in 45 times at most.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import secrets
from collections import OrderedDict
from dataclasses import dataclass, replace
from importlib import resources

import msgspec

from stretto.grading.detectors.signs import SIGNS
from stretto.grading.modes.fresh import TreeRefused, run_fresh
from stretto.grading.modes.spec import PytestSpec, TaskBroken, read_pytest
from stretto.grading.modes.variants import Function, Variant, functions_of, laid_out, turn
from stretto.grading.oracle import last_line, plain
from stretto.grading.outcome import Grade
from stretto.grading.submission import fingerprint, has_reference, reference_tree, restored
from stretto.records import Outcome, Task
from stretto.sandbox.box import BoxBroken, BoxLost
from stretto.sandbox.pool import BoxPool

DRIVER = (resources.files("stretto.grading") / "pytest_driver.py").read_text()
VARIANTS = 8
"""Different choices of twins per task."""
COINS = 6
"""Tests to be told apart from twins, at least, by who would pass them all without being right."""
MOST_RERUNS = 5
REMEMBERED = 64
PHASES = ("setup", "call", "teardown")
UNGUARDED = "none of the required tests can be turned into a twin, so that their word is all there is"
TWIN, FORGED, OPENED = "twin-passed", "forged-report", "opens-tests"
"""Names of what is detected here."""


@dataclass(frozen=True)
class Run:
    """What one run told. `passed` has the ids whose three phases passed."""

    passed: frozenset[str]
    told: dict[str, str]  # the other ids that were seen: why they did not pass
    forged: bool  # told twice of one phase of one test
    opened: bool  # code that is neither pytest's nor the tests' opened a file with required tests
    ended: str  # how the run broke off; empty when it came to its end


class PytestMode:
    """The grader of pytest tasks; remembers references' runs."""

    def __init__(self, pool: BoxPool):
        self.pool = pool
        self._references: OrderedDict[str, Reference] = OrderedDict()
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def grade(
        self, task: Task, submissions: list[dict[str, bytes]], seed: int, most: float = math.inf
    ) -> list[Grade]:
        """One grade per submission, in order. Raises TaskBroken, and BoxLost for the reference's box."""
        spec = read_pytest(task)
        key = fingerprint(task)
        reference = self._references.setdefault(key, Reference(self, task, spec))
        self._references.move_to_end(key)
        while len(self._references) > REMEMBERED:
            self._references.popitem(last=False)
        await reference.check()
        spec = msgspec.structs.replace(spec, seconds=min(spec.seconds, most))
        return await asyncio.gather(*(self._judge(task, spec, files, reference, seed) for files in submissions))

    def counted(self, task: Task, files: dict[str, bytes]) -> dict[str, bytes]:
        """What of a submission is graded. Raises TaskBroken."""
        spec = read_pytest(task)
        return restored(task, files, spec.protected, spec.remove)

    async def _judge(
        self, task: Task, spec: PytestSpec, files: dict[str, bytes], reference: Reference, seed: int
    ) -> Grade:
        required = [*spec.fail_to_pass, *spec.pass_to_pass]
        total = len(required)
        detected: list[str] = []

        async def tried(tree: dict[str, bytes], alone: bool = False) -> Run:
            run = await self.run(task, spec, tree, alone)
            for name, seen in ((FORGED, run.forged), (OPENED, run.opened and not reference.opens)):
                if seen and name not in detected:
                    detected.append(name)
            return run

        try:
            tree = self.counted(task, files) | reference.files
            if reference.alone:
                first = await tried(tree, alone=True)
                if len(first.passed) < len(spec.fail_to_pass):
                    reason = why(spec.fail_to_pass, first)
                    return Grade(False, Outcome.SCORED, len(first.passed), total, reason, detected)
            first = await tried(tree)
            passed = len(first.passed)
            if passed < total:
                return Grade(False, Outcome.SCORED, passed, total, why(required, first), detected)
            guarded = False
            async for variant in reference.variants(seed):
                guarded = True
                again = await tried(tree | variant.files)
                if lied := sorted(variant.twins & again.passed):
                    reason = f"{plain(lied[0])} passed although it was turned into a test that can't pass"
                    return Grade(False, Outcome.VOID, passed, total, reason, [*detected, TWIN])
                if unstable := sorted(variant.originals - again.passed):
                    reason = f"passed once and not again: {why(unstable, again)}"
                    return Grade(False, Outcome.SCORED, passed - len(unstable), total, reason, detected)
        except TreeRefused as error:
            return Grade(False, Outcome.FAULT, 0, total, f"the submission can't be graded: {error}")
        except BoxBroken:
            return Grade(False, Outcome.FAULT, 0, total, "the submission broke the box it ran in, twice")
        except BoxLost as error:
            return Grade(False, Outcome.INFRA, 0, total, str(error))
        if OPENED in detected:
            return Grade(False, Outcome.VOID, passed, total, f"the submission {SIGNS[OPENED].what}", detected)
        return Grade(True, Outcome.SCORED, passed, total, "" if guarded else UNGUARDED, detected)

    async def run(self, task: Task, spec: PytestSpec, tree: dict[str, bytes], alone: bool = False) -> Run:
        """The required tests over `tree`; `alone`: those that must be made to pass, until one fails.

        Raises TreeRefused, BoxBroken, BoxLost.
        """
        required = [*spec.fail_to_pass, *([] if alone else spec.pass_to_pass)]
        mark = secrets.token_hex(16)
        order = {
            "mark": mark,
            "ids": required,
            "paths": spec.paths,
            "plugins": spec.plugins,
            "package": spec.package,
            "options": spec.options,
            "stop": alone,
        }
        libraries = dict.fromkeys([*spec.libraries, *task.libraries])
        async with self._slots:
            question = json.dumps(order).encode()
            result = await run_fresh(self.pool, task, tree, DRIVER, question, spec.seconds, [*libraries])
        run = read_run(result.stdout, mark, required, spec.package)
        if run.ended:
            how = "ran out of time" if result.timed_out else "wrote too much" if result.truncated else ""
            ended = how or last_line(result.stderr) or f"ended with exit code {result.exit_code}"
            run = replace(run, ended="ran out of memory" if result.oom else ended)
        return run


class Reference:
    """What the task's own solution does in each run. A task without one is taken as it is."""

    def __init__(self, mode: PytestMode, task: Task, spec: PytestSpec):
        self.mode, self.task, self.spec = mode, task, spec
        self._lock = asyncio.Lock()
        self.files: dict[str, bytes] = {}
        """Files of tests in the layout of twins, laid over every tree."""
        self.alone = False
        """Whether the tests that must be made to pass do so by themselves, and are not all there are."""
        self.opens = False
        """Whether its own code opens the files that hold them."""
        self._tree: dict[str, bytes] | None = None
        self._broken: str | None = None
        self._checked = False
        self._defined: dict[str, Function] = {}
        self._variants: dict[int, Variant | None] = {}

    async def check(self) -> None:
        """Raises TaskBroken unless the reference passes every required test."""
        async with self._lock:
            if not self._checked:
                await self._look()
            self._checked = True
        if self._broken:
            raise TaskBroken(self._broken)

    async def _look(self) -> None:
        """Settle `files`, `alone` and which tests may be turned, by runs of the reference."""
        required = [*self.spec.fail_to_pass, *self.spec.pass_to_pass]
        if has_reference(self.task):
            self._tree = self.mode.counted(self.task, await reference_tree(self.task, self.mode.pool))
        defined = functions_of(required, self._base())
        self.files = laid_out({path for path, _ in defined.values()}, self._base())
        if self._tree is not None:
            run = await self._run(self._tree | self.files)
            if len(run.passed) < len(required) and self.files:  # tests that look at their own text, perhaps
                touched = {id.partition("::")[0] for id in required if id not in run.passed}
                touched |= {defined[id][0] for id in required if id not in run.passed and id in defined}
                self.files = {path: data for path, data in self.files.items() if path not in touched}
                run = await self._run(self._tree | self.files)
            if len(run.passed) < len(required):
                self._broken = f"the reference of task {self.task.id} fails: {why(required, run)}"
            elif self.spec.fail_to_pass and self.spec.pass_to_pass:
                by_itself = await self._run(self._tree | self.files, alone=True)
                self.alone = len(by_itself.passed) == len(self.spec.fail_to_pass)
        self._defined = {id: function for id, function in defined.items() if function[0] in self.files}

    async def variants(self, seed: int):
        """The reruns of one grading, as many as it takes to have `COINS` tests of which nobody can tell twins."""
        wanted = self.spec.fail_to_pass or self.spec.pass_to_pass
        goal = {self._defined[id] for id in wanted if id in self._defined}
        count = min(max(-(-COINS // max(len(goal), 1)), 1), MOST_RERUNS)
        rng = random.Random(f"{self.task.id}/{seed}")
        half = VARIANTS // 2  # the even ones have twins of tests that must be made to pass
        chosen = [2 * index for index in rng.sample(range(half), half)][: max(1, count // 2)]
        chosen += [2 * index + 1 for index in rng.sample(range(half), half)][: count - len(chosen)]
        rng.shuffle(chosen)
        for index in chosen:
            async with self._lock:
                if index not in self._variants:
                    self._variants[index] = await self._variant(index)
            if (variant := self._variants[index]) is not None:
                yield variant

    async def _variant(self, index: int) -> Variant | None:
        """The twins number `index`, less what the reference does not bear out; None if nothing is left."""
        rng = random.Random(f"{self.task.id}/{index}")
        variant = turn(self.spec, self._base() | self.files, self._defined, index, rng)
        if variant is None or self._tree is None:
            return variant
        run = await self._run(self._tree | self.files | variant.files)
        originals, twinned = variant.originals & run.passed, variant.twins - run.passed
        return Variant(variant.files, originals, twinned) if twinned or originals else None

    def _base(self) -> dict[str, bytes]:
        """A tree with the task's own tests."""
        return self._tree or restored(self.task, {}, self.spec.protected, self.spec.remove)

    async def _run(self, tree: dict[str, bytes], alone: bool = False) -> Run:
        try:
            run = await self.mode.run(self.task, self.spec, tree, alone)
            self.opens |= run.opened
            return run
        except (TreeRefused, BoxBroken) as error:
            raise TaskBroken(f"the reference of task {self.task.id} can't be run: {error}") from None


def read_run(data: bytes, mark: str, required: list[str], package: str = "") -> Run:
    """What a run told of the required tests, trusting nothing: unknown lines are passed over."""
    known, phases, told = set(required), {}, {}
    forged, opened, ended, where = False, False, "it broke off", ""
    for line in data.split(b"\n"):
        if not line.startswith(mark.encode()):
            continue
        try:
            name, phase, outcome = msgspec.json.decode(line[len(mark) :], type=tuple[str, str, str | int])
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if phase == "end":
            ended = ""
        elif phase == "opened":
            opened = True
        elif phase == "imported" and name == package:
            where = str(outcome)
        elif name in known:
            forged |= phase in PHASES and (name, phase) in phases
            if phases.get((name, phase), "passed") == "passed":  # of several, a failure counts
                phases[name, phase] = outcome
            if outcome != "passed":
                told.setdefault(name, f"{outcome} in its {phase}")
        elif phase == "collect":
            told.setdefault(name, str(outcome))
    complete = {id for id in known if id not in told and all((id, phase) in phases for phase in PHASES)}
    if package and not where.startswith("/workspace/"):
        complete, told[package] = set(), f"imported from {where or 'nowhere'}, not from the workspace"
    return Run(frozenset() if ended else frozenset(complete), told, forged, opened, ended)


def why(required: list[str], run: Run) -> str:
    """Why not all of them passed, as a clause."""
    if run.ended:
        return f"the tests {run.ended}"
    missing = [id for id in required if id not in run.passed]
    known = [id for id in missing if id in run.told]
    others = [f"{name}: {said}" for name, said in run.told.items() if name not in required]
    shown = f"{known[0]} {run.told[known[0]]}" if known else others[0] if others else f"{missing[0]} was not seen"
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    return plain(shown[:300]) + more
