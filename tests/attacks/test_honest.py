"""No honest solution is voided, in any mode: a sample, for the measurement with many more see docs/grading.md."""

from __future__ import annotations

import ast
import itertools
import json
import random

import msgspec
import pytest

from stretto.grading.grader import Grader
from stretto.records import Outcome, Task
from stretto.tasks.arguments import draw_arguments
from stretto.tasks.repair import Repair, call, generate

pytestmark = pytest.mark.asyncio(loop_scope="session")


def honest(repair: Repair, function: str) -> list[str]:
    """The same right program, as different people write it."""
    source = "\n".join(repair.fixed) + "\n"
    inner = source.replace(f"def {function}(", "def _inner(", 1)
    return [
        '"""Fixed."""\n\nimport logging\n\nlog = logging.getLogger(__name__)\n\n\n' + source,
        ast.unparse(ast.parse(source)) + f"\n\nif __name__ == '__main__':\n    print({function})\n",
        f"{inner}\n\ndef {function}(*arguments):\n    return _inner(*arguments)\n",
    ]


def with_tests(repair: Repair, function: str, mode: str) -> Task:
    """The task, graded by tests of its own instead of the oracle."""
    task, rng = repair.task, random.Random(repair.task.id)
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


@pytest.mark.parametrize(("mode", "count"), [("oracle", 20), ("pytest", 2), ("script", 2)])
async def test_right_programs_are_paid_and_show_no_sign(grader: Grader, mode: str, count: int):
    for seed, repair in enumerate(itertools.islice(generate("train", 11), count)):
        function = repair.fixed[0].split("(")[0].removeprefix("def ")
        given = {path: text.encode() for path, text in repair.task.files.items()}
        trees = [given | {"solution.py": source.encode()} for source in honest(repair, function)]
        for grade in await grader.grade(with_tests(repair, function, mode), trees, seed):
            assert (grade.solved, grade.outcome, grade.detected) == (True, Outcome.SCORED, []), grade
