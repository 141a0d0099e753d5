"""Three tasks over the same files, one for each way of grading."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.grader import Grader
from stretto.records import Task
from stretto.sandbox.pool import BoxPool

GIVEN = """def double(x):
    return x + 3


def table(word):
    return {}
"""
REFERENCE = """def double(x):
    return 2 * x


def table(word):
    counts = {}
    for letter in word:
        counts[letter] = counts.get(letter, 0) + 1
    return counts
"""
VISIBLE = """from double import double


def test_double():
    assert double(2) == 4
    assert double(3) == 6
"""
HIDDEN = """import unittest

import pytest

from double import double, table


def test_double():
    assert double(7) == 14
    assert double(-4) == -8


@pytest.mark.parametrize("x, e", [(5, 10), (0, 0)])
def test_table(x, e):
    assert double(x) == e


class TestTable(unittest.TestCase):
    def test_counts(self):
        self.assertEqual(table("aab"), {"a": 2, "b": 1})
"""
NAMES = ("test_double", "test_table[5-10]", "test_table[0-0]", "TestTable::test_counts")
PLAIN = """import sys

sys.path.insert(0, "/app")
from double import double, table

def test_double():
    assert double(7) == 14
    assert double(-4) == -8

def test_table():
    assert table("aab") == {"a": 2, "b": 1}

if __name__ == "__main__":
    test_double()
    test_table()
"""
SCRIPT = """#!/bin/bash
mkdir -p /logs/verifier
if python3 /tests/test_outputs.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
GRADINGS = {
    "oracle": {
        "tests/oracle.json": json.dumps(
            {
                "module": "double",
                "function": "double",
                "arguments": [{"kind": "int", "low": -(10**6), "high": 10**6}],
                "also": [
                    {
                        "module": "double",
                        "function": "table",
                        "arguments": [{"kind": "text", "alphabet": "abcd", "min_length": 1, "max_length": 9}],
                    }
                ],
            }
        )
    },
    "pytest": {
        "tests/pytest.json": json.dumps(
            {"fail_to_pass": [f"tests/test_double.py::{name}" for name in NAMES], "package": "double", "seconds": 2}
        ),
        "tests/tree/tests/test_double.py": HIDDEN,
    },
    "script": {
        "tests/test.sh": SCRIPT,
        "tests/test_outputs.py": PLAIN,
        "tests/script.json": json.dumps({"seconds": 2}),
    },
}


def a_task(mode: str, **changes: str) -> Task:
    return Task(
        id=f"double/{mode}",
        split="train",
        instruction="double(x) is twice x, table(word) counts letters. Fix double.py.",
        files={"double.py": GIVEN, "tests/test_visible.py": VISIBLE},
        grading={"solution/double.py": REFERENCE} | GRADINGS[mode] | changes,
        mode=mode,
    )


TASKS = {mode: a_task(mode) for mode in GRADINGS}


@pytest.fixture(scope="session")
def make_task() -> Callable[..., Task]:
    return a_task


@pytest.fixture(scope="session")
def tasks() -> dict[str, Task]:
    return TASKS


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def pool() -> AsyncIterator[BoxPool]:
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    yield pool
    await pool.close()


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def grader(pool: BoxPool) -> AsyncIterator[Grader]:
    grader = Grader(GradingConfig(seconds=0.5), pool)
    yield grader
    await grader.close()
