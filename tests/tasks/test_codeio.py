"""Pins: of functions that a model wrote only those become tasks that are sound, and no constant passes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder
from stretto.tasks.factories import codeio
from stretto.tasks.factories.package import SourceError

GENERATOR = "def generate_input(rng: Random) -> dict:\n    return {'n': rng.randint(0, 999)}\n"


def row(code: str, generator: str = GENERATOR) -> dict[str, object]:
    return {"task_description": "Do it.", "input_output_spec": "`n` (int)", "code_sample": code,
            "input_generator": generator, "difficulty": 3}  # fmt: skip


ROWS = {
    "good": row("def main_solution(n):\n    return {'half': n / 2, 'parts': [n, (n, str(n))]}\n"),
    "also good": row(
        "import math\n\ndef helper(n):\n    return math.isqrt(n)\n\ndef main_solution(n):\n    return helper(n)\n"
    ),
    "constant": row("def main_solution(n):\n    return n >= 0\n"),
    "raises": row("def main_solution(n):\n    return 1 // (n % 2)\n"),
    "object": row("def main_solution(n):\n    return {n}\n"),
    "random": row("import random\n\ndef main_solution(n):\n    return random.random()\n"),
    "identity": row("def main_solution(n):\n    return id(object()) + n\n"),
    "slow": row("def main_solution(n):\n    while True:\n        pass\n"),
    "foreign": row("import numpy\n\ndef main_solution(n):\n    return n\n"),
    "no function": row("def other(n):\n    return n\n"),
    "no python": row("def main_solution(n) return n"),
    "bad generator": row("def main_solution(n):\n    return n\n", "def generate_input(rng):\n    return {}\n"),
    "echo": row("def main_solution(n):\n    return n\n"),
}


def package(path: Path) -> Path:
    with gzip.open(path / "rows.gz", "wt") as file:
        json.dump(list(ROWS.values()), file)
    return path / "rows.gz"


async def test_only_sound_functions_become_tasks_that_only_the_reference_passes(tmp_path: Path, pool: BoxPool) -> None:
    made = [task async for task in codeio.tasks(pool, 50, 0, package(tmp_path))]
    kept = {task.grading["solution/solution.py"] for task in made}
    assert kept == {str(ROWS[name]["code_sample"]) for name in ("good", "also good")}
    task = folder.read(folder.write(made[0], tmp_path / "out"))
    assert task == made[0] and "raise NotImplementedError" in task.files["solution.py"]
    scope: dict[str, object] = {}
    exec(task.grading["solution/solution.py"], scope)
    for line in task.files["test_solution.py"].splitlines()[2:]:
        exec(line, scope)


async def test_the_same_seed_gives_the_same_tasks(tmp_path: Path, pool: BoxPool) -> None:
    rows = package(tmp_path)
    first = [task async for task in codeio.tasks(pool, 1, 4, rows)]
    again = [task async for task in codeio.tasks(pool, 1, 4, rows)]
    assert first == again and len(first) == 1


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match="pip install 'stretto"):
        codeio.rows()
    (tmp_path / "rows.gz").write_bytes(b"not gzip")
    with pytest.raises(SourceError, match="cannot be read"):
        codeio.rows(tmp_path / "rows.gz")
