"""No honest solution is voided, in any mode: a sample of `stretto bench honest`, which measures many more."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from stretto.bench.honest import programs, summary
from stretto.bench.honest_styles import LEAVINGS, MENDED, STYLES, mended, written
from stretto.grading.detectors import inspect_tree
from stretto.grading.detectors.signs import VOIDING
from stretto.grading.grader import Grader
from stretto.grading.outcome import Grade
from stretto.grading.submission import base_tree
from stretto.records import Outcome, Task
from stretto.tasks.repair import generate

pytestmark = pytest.mark.asyncio(loop_scope="session")
HARMLESS = {"adds-configuration", "edits-tests", "leaves-compiled-files", "removes-names"}


@pytest.mark.parametrize(("mode", "count"), [("oracle", 60), ("pytest", 4), ("script", 4)])
async def test_right_programs_are_paid_and_show_no_certain_sign(grader: Grader, mode: str, count: int):
    for group in programs(mode, count, seed=11):
        grades = await grader.grade(group.task, group.trees, 0)
        for name, grade in zip(group.names, grades, strict=True):
            assert (grade.solved, grade.outcome) == (True, Outcome.SCORED), (name, grade)
            assert set(grade.detected) <= HARMLESS, (name, grade)


async def test_every_style_compiles_and_is_read_without_a_certain_sign():
    repair = next(islice(generate("train", 3), 1))
    source, given = "\n".join(repair.fixed) + "\n", base_tree(repair.task)
    name = source.split("(")[0].removeprefix("def ")
    for style, write in STYLES.items():
        files = write(source, name)
        for path, text in files.items():
            compile(text, path, "exec")
        tree = given | {path: text.encode() for path, text in files.items()}
        assert not VOIDING & set(inspect_tree(repair.task, tree)), style


async def test_a_mended_package_with_leavings_shows_no_certain_sign():
    given = {"pkg/a.py": "import sys\n\n\ndef caller(x):\n    return sys._getframe(1), x + 1\n" + "x = 1\n" * 9}
    task = Task(id="t", split="", instruction="", files=given, grading={}, mode="pytest")
    reference = {"pkg/a.py": given["pkg/a.py"].replace("+ 1", "+ 2").encode()}
    seen = set()
    for seed in range(60):
        style, tree = mended(reference, ["pkg/a.py"], random.Random(seed))
        seen.add(style.removeprefix("package ").split(", ")[0])
        assert not VOIDING & set(inspect_tree(task, tree)), style
    assert seen == MENDED.keys()
    assert (
        len({written("def f(x):\n    return x\n", "f", random.Random(n))[0] for n in range(400)}) > 100 > len(LEAVINGS)
    )


async def test_one_that_is_voided_or_unpaid_fails_the_bench():
    good, void = Grade(True, Outcome.SCORED, 1, 1), Grade(False, Outcome.VOID, 1, 1, "why", ["mocks"])
    wrong = Grade(False, Outcome.SCORED, 0, 1)
    said = summary([("oracle", "a", good), ("pytest", "b", void), ("script", "c", wrong)])
    assert said["checks"]["voided"] == {"value": 1, "limit": 0, "ok": False}
    assert said["checks"]["unpaid"]["value"] == 2 and said["signs"] == {"mocks": 1}
    assert summary([("oracle", "a", good)])["checks"]["unpaid"]["ok"]
