"""Rows of a verifiers environment become tasks that only the answer solves; what has no answer is left out."""

from __future__ import annotations

import pytest

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.grader import Grader
from stretto.grading.oracle import read_spec
from stretto.sandbox.pool import BoxPool
from stretto.tasks.factories import questions
from stretto.tasks.factories.package import SourceError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("4", 4),
        ("-1,234", -1234),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("x = 2", "x = 2"),
        ("1.2.3", "1.2.3"),
        ("nan", "nan"),
    ],
)
def test_an_answer_is_the_number_that_it_spells_or_text(answer: str, value: object) -> None:
    found = questions.number_of(answer)
    assert found == value and type(found) is type(value)


def test_rows_without_question_or_answer_are_left_out() -> None:
    rows = [{"prompt": CHAT}, {"answer": "4"}, {"prompt": CHAT, "answer": " "}, {"prompt": CHAT, "answer": 4}]
    assert [questions.task_of("env", number, row) for number, row in enumerate(rows)] == [None] * 4
    task = questions.task_of("org/env", 0, {"question": "Why?", "answer": "because"})
    assert (
        task is not None and task.id == "verifiers/org-env/0" and task.instruction.startswith("Why?\n\nWrite answer()")
    )


async def test_only_the_answer_is_paid() -> None:
    task = questions.task_of("env", 0, {"prompt": CHAT, "answer": "4"})
    assert task is not None and "What is 2 + 2?" in task.instruction and read_spec(task).function == "answer"
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    grader = Grader(GradingConfig(), pool)
    try:
        tries = ["return 4", "return 5", "return '4'", "return None", "return 4.0"]
        trees = [{"solution.py": f"def answer():\n    {line}\n".encode()} for line in tries]
        grades = await grader.grade(task, trees, seed=0)
        assert [grade.solved for grade in grades] == [True, False, False, False, False]
    finally:
        await grader.close()
        await pool.close()


def test_a_missing_library_is_a_sentence() -> None:
    try:
        import verifiers as library  # noqa: F401  # pyright: ignore
    except ImportError:
        with pytest.raises(SourceError, match=r"pip install 'stretto\[verifiers\]'"):
            questions.rows("env", 0)
