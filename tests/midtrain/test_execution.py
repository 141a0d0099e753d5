"""Functions written in one go: where the hole is, where an answer ends, and what the graders make of it."""

from __future__ import annotations

import asyncio
import json

from stretto.config import SandboxConfig
from stretto.midtrain import execution
from stretto.records import Task

STUB = 'import math\n\n\ndef twice(x):\n    """Two times x."""\n    raise NotImplementedError\n\n\nLIMIT = 3\n'


def task(**files: str) -> Task:
    target = {"module": "solution", "function": "twice", "arguments": [{"kind": "int", "low": -9, "high": 9}]}
    return Task(
        id="execution/twice",
        split="",
        instruction="Double a number.",
        files=files or {"solution.py": STUB},
        grading={"solution/solution.py": "def twice(x):\n    return 2 * x\n", "tests/oracle.json": json.dumps(target)},
    )


def test_the_hole_is_the_one_unwritten_body_and_its_prompt_holds_instruction_and_docstring() -> None:
    hole = execution.hole_of(task())
    assert hole is not None and hole.indent == 4 and hole.before.endswith('"""Two times x."""\n')
    assert hole.before + "    raise NotImplementedError\n" + hole.after == STUB
    assert hole.prompt.startswith('"""Double a number.\n"""\n\nimport math')
    for body in ("pass", "...", "raise NotImplementedError('later')"):
        assert execution.hole_of(task(**{"solution.py": f"class A:\n    def f(self):\n        {body}\n"})) is not None
    for text in (
        "def f(): pass\n",
        "def f():\n    return 1\n",
        "def f():\n    pass\ndef g():\n    pass\n",
        "def f(:\n",
    ):
        assert execution.hole_of(task(**{"solution.py": text})) is None


def test_an_answer_ends_at_the_dedent() -> None:
    text = "    y = 2 * x\n\n    if y:\n        return y\n    return 0\nprint(twice(1))\n    more"
    assert execution.until_dedent(text, 4) == "    y = 2 * x\n\n    if y:\n        return y\n    return 0\n"
    assert execution.until_dedent("return 1", 4) == "\n"


def test_bodies_are_graded_in_boxes_and_only_right_ones_pass() -> None:
    hole = execution.hole_of(task())
    assert hole is not None
    bodies = ["    return x + x\n", "    return x * x\n", "    import os\n    os._exit(0)\n", "\n", "    return (\n"]
    found = asyncio.run(execution.pass_at_1([hole] * 5, bodies, SandboxConfig(), left_out=2))
    assert (found.pass_at_1, found.tasks, found.unmeasured, found.left_out) == (0.2, 5, 0, 2)
    assert found.ci95[0] < 0.2 < found.ci95[1] and sum(found.outcomes.values()) == 5
