"""Pins: a commit becomes a task with its parent's tree, and nothing of the commit in what the agent gets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from stretto.grading.grader import Grader
from stretto.grading.submission import reference_tree
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder
from stretto.tasks.admission import GRADING, Checker
from stretto.tasks.factories import history, swebench
from stretto.tasks.factories.package import SourceError
from stretto.tasks.purge import keys

STEPS = [
    ("start", {"shop/__init__.py": "", "shop/a.py": "def add(a, b):\n    return a + b\n", "old.py": "",
               "tests/test_a.py": "from shop.a import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"}),
    ("docs only", {"README.md": "a shop"}),
    ("Multiply, too\n\nPrices are multiplied.\n\nSigned-off-by: A <a@b>", {
        "shop/a.py": "def add(a, b):\n    return a + b\n\n\ndef times(a, b=2):\n    return a * b\n", "old.py": None,
        "tests/test_a.py": "from shop.a import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
                           "def test_times():\n    from shop.a import times\n    assert times(4) == 8\n"}),
    ("tests that pass anyway", {"shop/a.py": "# a\n", "tests/test_b.py": "def test_b():\n    assert 1\n"}),
]  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "shop"
    root.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q", "-b", "main"], cwd=root, check=True)
    for message, files in STEPS:
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                (root / path).unlink()
            else:
                (root / path).write_text(text)
        subprocess.run([*git, "add", "-A"], cwd=root, check=True)
        subprocess.run([*git, "commit", "-qm", message], cwd=root, check=True)
    return root


async def test_HCK_7_a_commit_is_a_task_and_the_agent_gets_nothing_of_it(
    repository: Path, tmp_path: Path, pool: BoxPool
) -> None:
    said: list[str] = []
    supply = history.tasks(repository, pool, 5, [], "ancestors", tmp_path / "scratch", said.append)
    made = [folder.read(folder.write(task, tmp_path / "out")) async for task in supply]
    assert len(made) == 1, said
    (task,) = made
    assert (
        task.instruction.startswith("Multiply, too\n\nPrices are multiplied.") and "Signed-off" not in task.instruction
    )
    assert "`shop/a.py`: `times(a, b=2)`" in task.instruction
    assert '"tests/test_a.py::test_times"' in task.grading["tests/pytest.json"].split("pass_to_pass")[0]
    assert '"tests/test_a.py::test_add"' in task.grading["tests/pytest.json"].split("pass_to_pass")[1]
    workspace = Path(task.environment)
    texts = {path.name: path.read_text() for path in workspace.rglob("*.py")}
    assert "times" not in "".join(texts.values()) and "old.py" in texts
    log = subprocess.run(
        ["git", "log", "--all", "--format=%s"], cwd=workspace, capture_output=True, text=True, check=True
    )
    assert log.stdout.splitlines() == ["docs only", "start"] and keys(workspace) == []
    assert "old.py" not in await reference_tree(task, pool)
    checker = Checker(pool, times=1)
    assert (await checker.check(task)).reason == ""  # the reference passes, what is given fails
    await checker.close()


def test_what_is_no_repository_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no git repository"):
        history.candidates(tmp_path)


def test_names_that_tests_rely_on_are_told() -> None:
    before = "class A:\n    def f(self): return 1\n\ndef g(): return 1\n"
    after = "class A:\n    def f(self, x: int) -> str: return 2\n\ndef g(): return 2\n\nclass B:\n    x = 1\n"
    assert history.new_faces(before, after) == ["B", "A.f(self, x: int) -> str"]
    assert history.new_faces("def (", after) == []


async def test_rows_in_the_format_of_swe_bench_are_tasks(repository: Path, tmp_path: Path, pool: BoxPool) -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, check=True).stdout

    row = {
        "instance_id": "a__shop-1",
        "repo": "a/shop",
        "base_commit": git("rev-parse", "HEAD~2").strip(),
        "problem_statement": "Multiply.",
        "patch": git("diff", "HEAD~2", "HEAD~1", "--", "shop", "old.py"),
        "test_patch": git("diff", "HEAD~2", "HEAD~1", "--", "tests"),
        "FAIL_TO_PASS": '["tests/test_a.py::test_times"]',
        "PASS_TO_PASS": ["tests/test_a.py::test_add"],
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, [row, row | {"repo": "a/absent"}, row | {"patch": "no patch"}, {}])))
    said: list[str] = []
    supply = swebench.tasks([rows, tmp_path], 9, [], "ancestors", tmp_path / "scratch", said.append)
    made = [folder.read(folder.write(task, tmp_path / "out")) async for task in supply]
    assert [task.id for task in made] == ["a__shop-1"] and len(said) == 3
    assert "no checkout of a/absent" in said[0] and "apply failed" in said[1] and "lacks instance_id" in said[2]
    assert {"tests/tree/tests/test_a.py", "solution/shop/a.py", "solution/solve.sh"} < set(made[0].grading)
    grader = Grader(GRADING, pool)
    (grade,) = await grader.grade(made[0], [await reference_tree(made[0], pool)], 0)
    assert grade.solved and "times" not in (Path(made[0].environment) / "shop" / "a.py").read_text()
    await grader.close()
