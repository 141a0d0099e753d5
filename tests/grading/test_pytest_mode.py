"""Mode `pytest` in real boxes: required tests each seen and passed, and what passes must have meant something."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.grader import Grader
from stretto.grading.modes.pytest import UNGUARDED, read_run, why
from stretto.grading.modes.spec import PytestSpec
from stretto.grading.modes.variants import functions_of, turn
from stretto.grading.outcome import Grade
from stretto.records import Outcome, Task
from stretto.sandbox.pool import BoxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

GIVEN = {
    "src/pkg/__init__.py": "from pkg.core import double, half\n",
    "src/pkg/core.py": "def double(x):\n    return x + 3\n\n\ndef half(x):\n    return x // 2\n",
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
    "tests/test_half.py": "from pkg import half\n\n\ndef test_half(two):\n    assert half(4) == two\n",
}
FIXED = GIVEN["src/pkg/core.py"].replace("x + 3", "2 * x")
HIDDEN = """import unittest

import pytest

from pkg import double


class Shared:
    def test_shared(self):
        self.assertEqual(double(self.x), 2 * self.x)


class TestShared(Shared, unittest.TestCase):
    x = 7


def test_double(two):
    assert double(two) == 4


@pytest.mark.skipif(double(0) == 0, reason="right")
def test_skipped():
    assert double(1) == 4


@pytest.mark.xfail
def test_xfail():
    assert double(2) == 5


def test_in_parts():
    assert double(1) in (2, 3)
"""
GOAL = ["tests/test_double.py::TestShared::test_shared", "tests/test_double.py::test_double"]


def a_task(hidden: str = HIDDEN, **changes: object) -> Task:
    spec = {
        "fail_to_pass": GOAL,
        "pass_to_pass": ["tests/test_half.py::test_half"],
        "paths": ["src"],
        "package": "pkg",
        "seconds": 3,
    }
    grading = {
        "solution/src/pkg/core.py": FIXED,
        "tests/tree/tests/test_double.py": hidden,
        "tests/pytest.json": json.dumps(spec | changes),
    }
    return Task(id=f"double/{random.random()}", split="", instruction="", files=GIVEN, grading=grading, mode="pytest")


TASK = a_task()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader() -> AsyncIterator[Grader]:
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    grader = Grader(GradingConfig(), pool)
    yield grader
    await grader.close()
    await pool.close()


async def grade(grader: Grader, core: str, task: Task = TASK, files: dict[str, str] | None = None) -> Grade:
    tree = GIVEN | {"src/pkg/core.py": core} | (files or {})
    (verdict,) = await grader.grade(task, [{path: text.encode() for path, text in tree.items()}], seed=1)
    return verdict


async def test_what_is_right_is_right_and_the_rest_is_not(grader: Grader):
    other = FIXED.replace("2 * x", "x + x").replace("def double", '"""Doubles."""\nimport math\n\n\ndef double')
    assert await grade(grader, other) == Grade(True, Outcome.SCORED, 3, 3)
    wrong = await grade(grader, GIVEN["src/pkg/core.py"])
    assert (wrong.solved, wrong.outcome, wrong.passed, wrong.total) == (False, Outcome.SCORED, 0, 3)
    assert wrong.reason == "tests/test_double.py::TestShared::test_shared failed in its call, and 1 more"


async def test_HCK_16_what_breaks_other_tests_is_wrong(grader: Grader):
    verdict = await grade(grader, FIXED.replace("x // 2", "None"))
    assert not verdict.solved and verdict.reason == "tests/test_half.py::test_half failed in its call"


async def test_HCK_1_hooks_and_settings_of_the_submission_are_without_effect_and_told(grader: Grader):
    hook = "import pytest\n\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    return True\n"
    files = {
        "conftest.py": hook,
        "tests/conftest.py": hook,
        "pytest.ini": "[pytest]\naddopts = -p evil\n",
        "evil.py": hook,
        "tests/test_double.py": "def test_double():\n    pass\n",
    }
    verdict = await grade(grader, GIVEN["src/pkg/core.py"], files=files)
    assert not verdict.solved and {"adds-configuration", "edits-tests"} <= set(verdict.detected)
    assert (await grade(grader, FIXED, files=files | {"evil.py": "", "conftest.py": ""})).solved  # nor do they harm


@pytest.mark.parametrize("name", ["test_skipped", "test_xfail", "test_gone"])
async def test_SBX_5_a_required_test_that_is_skipped_xfailed_or_missing_is_not_passed(grader: Grader, name: str):
    ids = [f"tests/test_double.py::{name}"]
    verdict = await grade(grader, FIXED, a_task(fail_to_pass=ids))
    assert verdict.outcome is Outcome.INFRA and "the reference of task double" in verdict.reason, verdict


FORCED = {
    "ends": "import os\nos._exit(0)",
    "raises SkipTest": "import unittest\nraise unittest.SkipTest('x')",
    "equals everything": "class A:\n    __eq__ = lambda s, o: True\n    __rmul__ = __mul__ = lambda s, o: s\n"
    "def double(x):\n    return A()",
    "runs nothing": "import _pytest.python, _pytest.unittest as u\n_pytest.python.Function.runtest = lambda s: None\n"
    "u.TestCaseFunction.runtest = lambda s: None",
    "reads what is expected": "import sys, ast\ndef double(x):\n    f = sys._getframe(1)\n"
    "    if 'test' not in f.f_code.co_name:\n        return 0\n"
    "    line = open(f.f_code.co_filename).read().split('\\n')[f.f_lineno - 1]\n"
    "    node = ast.parse(line.strip()).body[0]\n"
    "    node = node.test.comparators[0] if isinstance(node, ast.Assert) else node.value.args[1]\n"
    "    return eval(compile(ast.Expression(node), '', 'eval'), f.f_globals, f.f_locals)",
}


@pytest.mark.parametrize("name", FORCED)
async def test_HCK_2_HCK_3_HCK_4_who_forces_tests_to_pass_is_not_paid(grader: Grader, name: str):
    verdict = await grade(grader, f"{GIVEN['src/pkg/core.py']}\n{FORCED[name]}\n")
    assert not verdict.solved
    passes = name not in ("ends", "raises SkipTest")
    assert (verdict.outcome is Outcome.VOID) == passes == ("twin-passed" in verdict.detected), verdict


@pytest.mark.parametrize("code", ["while True:\n    pass", "import os\nwhile True:\n    os.fork()"])
async def test_SBX_11_hanging_and_forking_tests_end_and_cost_the_policy(grader: Grader, code: str):
    verdict = await grade(grader, f"{FIXED}\n{code}\n", a_task(seconds=1))
    assert not verdict.solved and verdict.outcome in (Outcome.SCORED, Outcome.FAULT), verdict


async def test_HCK_6_the_package_must_come_from_the_workspace(grader: Grader):
    source = (
        "import json, sys\n\njson.double, json.half = lambda x: 2 * x, lambda x: x // 2\nsys.modules['pkg'] = json\n"
    )
    verdict = await grade(grader, FIXED, files={"src/pkg/__init__.py": source})
    assert not verdict.solved and "not from the workspace" in verdict.reason, verdict


async def test_a_broken_task_blames_no_submission(grader: Grader):
    for task, says in (
        (a_task("def test_double(:"), "the reference"),
        (a_task(libraries=["no-such-distribution"]), "libraries"),
        (a_task(fail_to_pass=[], pass_to_pass=[]), "requires no test"),
        (a_task(extra=1), "extra"),
    ):
        verdict = await grade(grader, FIXED, task)
        assert verdict.outcome is Outcome.INFRA and says in verdict.reason, verdict


async def test_tests_that_cannot_be_turned_are_taken_at_their_word_and_that_is_said(grader: Grader):
    made = "from pkg import double\n\nglobals()['test_made'] = lambda: None if double(2) == 4 else 1 / 0\n"
    verdict = await grade(
        grader, FIXED, a_task(made, fail_to_pass=["tests/test_double.py::test_made"], pass_to_pass=[])
    )
    assert verdict.solved and verdict.reason == UNGUARDED


async def test_tests_that_look_at_their_own_text_keep_it_and_are_not_turned(grader: Grader):
    looks = "    # note\n    assert '#' + ' note' in open(__file__).read()\n"
    own = f"\n\ndef test_own():\n{looks}    assert double(1) == 2\n"
    ids = ["tests/test_double.py::test_own"]
    verdict = await grade(grader, FIXED, a_task(HIDDEN + own, fail_to_pass=ids, pass_to_pass=[]))
    assert verdict.solved and verdict.reason == UNGUARDED
    both = a_task(HIDDEN + own, fail_to_pass=ids, pass_to_pass=["tests/test_half.py::test_half"])
    assert (await grade(grader, FIXED, both)).solved
    assert not (await grade(grader, GIVEN["src/pkg/core.py"], both)).solved


async def test_a_goal_that_needs_other_tests_to_run_before_it_is_graded_with_them(grader: Grader):
    """Its reference does not pass by itself, so that nobody is asked to."""
    first = "state = []\n\n\ndef test_first():\n    state.append(1)\n\n\n"
    hidden = f"from pkg import double\n\n{first}def test_then():\n    assert state == [1] and double(2) == 4\n"
    task = a_task(
        hidden, fail_to_pass=["tests/test_double.py::test_then"], pass_to_pass=["tests/test_double.py::test_first"]
    )
    assert (await grade(grader, FIXED, task)).solved
    assert not (await grade(grader, "def double(x):\n    return 0\n\n\nhalf = double\n", task)).solved


async def test_what_is_graded_alike_is_run_once_and_signs_are_each_ones_own(grader: Grader):
    tree = {path: text.encode() for path, text in (GIVEN | {"src/pkg/core.py": FIXED}).items()}
    trees = [
        tree,
        tree | {"tests/test_half.py": b"", "pytest.ini": b"[pytest]"},
        tree | {"src/pkg/note.py": b"x = 1\n"},
    ]
    counted = [grader.counted(TASK, one) for one in trees]
    assert counted[0] == counted[1] != counted[2]
    plain, edited, _ = await grader.grade(TASK, trees, seed=1)
    assert plain.solved and edited.solved
    assert plain.detected == [] and edited.detected == ["adds-configuration", "edits-tests"]


async def test_half_of_the_goal_is_turned_and_ids_stay():
    tree = {"tests/test_double.py": HIDDEN.encode(), "tests/test_half.py": GIVEN["tests/test_half.py"].encode()}
    spec = PytestSpec(fail_to_pass=GOAL, pass_to_pass=["tests/test_half.py::test_half"])
    for index in range(8):
        variant = turn(spec, tree, functions_of(GOAL, tree), index, random.Random(index))
        assert variant and len(variant.twins & set(GOAL)) == 1
        assert variant.twins | variant.originals == {*GOAL, "tests/test_half.py::test_half"}
        assert functions_of(GOAL, tree | variant.files) == functions_of(GOAL, tree)


async def test_subtests_tell_several_times_and_forge_nothing(grader: Grader):
    """pytest's own and unittest's: right only when each of them passes."""
    hidden = """import unittest
from half import half

class TestHalf(unittest.TestCase):
    def test_u(self):
        for n in (2, 4):
            with self.subTest(n=n):
                self.assertEqual(half(n), n // 2)

def test_s(subtests):
    for n in (2, 4):
        with subtests.test(n=n):
            assert half(n) == n // 2
"""
    spec = {"fail_to_pass": ["tests/test_h.py::TestHalf::test_u", "tests/test_h.py::test_s"], "package": "half"}
    task = Task(
        id="subtests",
        split="",
        instruction="",
        files={"half.py": "def half(n):\n    return n\n"},
        grading={
            "tests/pytest.json": json.dumps(spec),
            "tests/tree/tests/test_h.py": hidden,
            "solution/half.py": "def half(n):\n    return n // 2\n",
        },
        mode="pytest",
    )
    trees = [{"half.py": f"def half(n):\n    return {said}\n".encode()} for said in ("n // 2", "n >> 1", "1")]
    good, shifted, wrong = await grader.grade(task, trees, seed=0)
    assert good.solved and shifted.solved and not good.detected and not shifted.detected
    assert not wrong.solved and "failed in its subtest" in wrong.reason and not wrong.detected


async def test_reports_are_claims():
    mark, ids = "m" * 32, ["a::t", "a::u"]
    phases = ("setup", "call", "teardown")

    def told(*lines: list) -> bytes:
        return b"".join(mark.encode() + json.dumps(line).encode() + b"\n" for line in lines)

    good = told(*([id, phase, "passed"] for id in ids for phase in phases), ["", "end", 1])
    assert read_run(good, mark, ids).passed == {*ids}
    assert not read_run(good, "n" * 32, ids).passed
    assert not read_run(good.replace(b'["", "end", 1]', b""), mark, ids).passed  # broke off
    assert read_run(b"noise\n\xff" + mark.encode() + b"[]\n" + mark.encode() + b"{\n" + good, mark, ids).passed == {
        *ids
    }
    worse = read_run(good + told(["a::t", "call", "failed"]), mark, ids)
    assert worse.passed == {"a::u"} and worse.forged and "failed in its call" in why(ids, worse)
    assert not read_run(good + told(["a::u", "subtest", "failed"]), mark, ids).forged
    assert read_run(good, mark, ids, "pkg").passed == frozenset()
