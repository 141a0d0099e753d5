"""Pins: an exported pytest task runs as a Harbor task too, by its test.sh alone, and comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from stretto.config import GradingConfig
from stretto.grading.grader import Grader
from stretto.records import Task
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder, portable

HIDDEN = """import pytest
from a import f


@pytest.mark.parametrize("n", [1, 2])
def test_f(n):
    assert f(n) == 7 * n
"""
SPEC = {"fail_to_pass": ["tests/test_a.py::test_f[1]", "tests/test_a.py::test_f[2]"], "package": "a"}
TASK = Task(
    id="portable",
    split="",
    instruction="Seven times.",
    files={"a.py": "def f(n):\n    return n\n"},
    grading={
        "tests/pytest.json": json.dumps(SPEC),
        "tests/tree/tests/test_a.py": HIDDEN,
        "solution/a.py": "def f(n):\n    return 7 * n\n",
    },
    mode="pytest",
)


def test_an_export_has_what_harbor_needs_and_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = folder.write(TASK, tmp_path)
    assert (path / "tests" / "test.sh").stat().st_mode & 0o111
    assert "COPY . /app/" in (path / "environment" / "Dockerfile").read_text()
    assert folder.read(path) == TASK


def test_a_script_of_the_tasks_own_and_other_modes_are_left_alone(tmp_path: Path) -> None:
    own = msgspec.structs.replace(TASK, grading={**TASK.grading, "tests/test.sh": "true\n"})
    assert folder.read(folder.write(own, tmp_path)) == own
    assert portable.files(msgspec.structs.replace(TASK, mode="oracle")) == {}


async def test_the_script_pays_the_reference_and_nobody_who_leaves_early(tmp_path: Path, pool: BoxPool) -> None:
    path = folder.write(TASK, tmp_path)
    toml = (path / "task.toml").read_text()
    (path / "task.toml").write_text(toml.replace('"pytest"', '"script"'))
    task = msgspec.structs.replace(folder.read(path), libraries=["pytest"])
    assert task.mode == "script"
    grader = Grader(GradingConfig(), pool)
    bodies = ("return n * 7", "return n", "return 7 if n == 1 else 0", "__import__('os')._exit(0)")
    trees = [{"a.py": f"def f(n):\n    {body}\n".encode()} for body in bodies]
    grades = await grader.grade(task, trees, seed=0)
    assert [grade.solved for grade in grades] == [True, False, False, False], grades
    await grader.close()
