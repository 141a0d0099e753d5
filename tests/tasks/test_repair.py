"""Pins: tasks are deterministic, solvable, really broken, disjoint between splits, and hide their answer."""

import itertools
import json
import random

import pytest

from stretto.tasks import folder
from stretto.tasks.arguments import draw_arguments
from stretto.tasks.repair import Repair, call, compile_program, evaluate, generate
from stretto.tasks.templates import NEW, TEMPLATES


def take(split: str, count: int, seed: int = 0) -> list[Repair]:
    return list(itertools.islice(generate(split, seed), count))


def test_there_are_enough_templates() -> None:
    assert len(TEMPLATES) >= 80
    assert len({t.name for t in TEMPLATES}) == len(TEMPLATES)
    assert {t.name for t in TEMPLATES} >= NEW


def test_deterministic_by_seed() -> None:
    assert [r.task for r in take("train", 30)] == [r.task for r in take("train", 30)]
    assert take("train", 30, seed=1) != take("train", 30)


@pytest.mark.parametrize("split", ["train", "dev", "heldout", "new_templates"])
def test_the_reference_passes_and_the_given_file_fails_visible_and_hidden_calls(split: str) -> None:
    rng = random.Random(0)
    survived = 0
    for repair in take(split, 150):
        broken, fixed = compile_program(repair.broken), compile_program(repair.fixed)
        assert any(evaluate(broken, c) != evaluate(fixed, c) for c in repair.calls)
        oracle = json.loads(repair.task.grading["tests/oracle.json"])
        hidden = [draw_arguments(oracle["arguments"], rng) for _ in range(24)]
        assert not any(isinstance(evaluate(fixed, c), tuple) for c in hidden)
        survived += all(evaluate(broken, c) == evaluate(fixed, c) for c in hidden)
        assert (repair.template in NEW) == (split == "new_templates")
    assert survived <= 1  # of 150, by bad luck of the inputs


def test_splits_share_no_instance() -> None:
    programs = {
        split: {(r.task.instruction.split(": ")[1].split("\n")[0], r.fixed) for r in take(split, 400)}
        for split in ("train", "dev", "heldout")
    }
    for one, other in itertools.combinations(programs.values(), 2):
        assert not one & other


def test_the_agent_sees_neither_answer_nor_oracle() -> None:
    for repair in take("train", 50):
        seen = json.dumps(repair.task.files) + repair.task.instruction
        assert "oracle" not in seen
        assert repair.fixed != tuple(repair.task.files["solution.py"].splitlines())
        assert set(repair.task.files) == {"solution.py", "test_solution.py"}


def test_visible_calls_evaluate_to_what_the_instruction_says() -> None:
    for repair in take("train", 50):
        for text, arguments in zip(repair.task.instruction.splitlines()[1:], repair.calls, strict=True):
            assert text.endswith(f"== {call(repair.fixed, arguments)!r}")


def test_folders_round_trip(tmp_path) -> None:
    tasks = [r.task for r in take("heldout", 20)]
    for task in tasks:
        folder.write(task, tmp_path)
    assert sorted(folder.read_all(tmp_path), key=lambda t: t.id) == sorted(tasks, key=lambda t: t.id)


def test_malformed_folders_are_sentences(tmp_path) -> None:
    path = folder.write(take("dev", 1)[0].task, tmp_path)
    (path / "instruction.md").unlink()
    with pytest.raises(folder.TaskError, match="lacks instruction.md"):
        folder.read(path)
    (path / "instruction.md").write_text("x")
    (path / "task.toml").write_text("[task\n")
    with pytest.raises(folder.TaskError, match="cannot be read"):
        folder.read(path)
    for head, said in (
        ("id = 7", "give it a name"),
        ("id = '..'", "give it a name"),
        ("id = 'x'\nsplit = 3", "split as text"),
    ):
        (path / "task.toml").write_text(f"[task]\n{head}\n")
        with pytest.raises(folder.TaskError, match=said):
            folder.read(path)
    (path / "task.toml").write_text("task = 3\n")
    with pytest.raises(folder.TaskError, match="cannot be read"):
        folder.read(path)
    (path / "task.toml").unlink()
    with pytest.raises(folder.TaskError, match=r"lacks task\.toml"):
        folder.read_all(tmp_path)
    with pytest.raises(folder.TaskError, match="no task folders"):
        folder.read_all(path)
    with pytest.raises(folder.TaskError, match="no task folder at"):
        folder.read_all(tmp_path / "absent")
