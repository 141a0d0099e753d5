"""Mode `script` in real boxes: Harbor's test scripts, and rewards that mean something."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.grader import Grader
from stretto.grading.modes.script import UNGUARDED, read_reward
from stretto.grading.outcome import Grade
from stretto.grading.script_driver import rewritten
from stretto.records import Outcome, Task
from stretto.sandbox.pool import BoxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHECK = "import sys\nsys.path.insert(0, '/app')\nfrom a import double\n\ndef test_a():\n    assert double(2) == 4\n"
SCRIPT = """#!/bin/bash
set -u
cd /app && [ -z "$(ls -A "$HOME")" ] || exit 3
if python3 -c 'import sys; sys.path.insert(0, "/tests"); from check_a import test_a; test_a()'; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
GIVEN = {"a.py": "def double(x):\n    return x + 3\n", "notes/readme.txt": "hello\n"}


def a_task(script: str = SCRIPT, solve: str = "sed -i 's/x + 3/2 * x/' a.py", **grading: str) -> Task:
    grading = {"tests/test.sh": script, "tests/check_a.py": CHECK, "tests/script.json": '{"seconds": 3}'} | grading
    if solve:
        grading["solution/solve.sh"] = solve
    id = f"script/{hash((script, solve, *grading.values()))}"
    return Task(id=id, split="", instruction="", files=GIVEN, grading=grading, mode="script")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader() -> AsyncIterator[Grader]:
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    grader = Grader(GradingConfig(), pool)
    yield grader
    await grader.close()
    await pool.close()


async def grade(grader: Grader, source: str, task: Task | None = None, files: dict[str, str] | None = None) -> Grade:
    tree = GIVEN | {"a.py": source} | (files or {})
    (verdict,) = await grader.grade(task or a_task(), [{path: text.encode() for path, text in tree.items()}], seed=1)
    return verdict


async def test_the_script_decides(grader: Grader):
    assert await grade(grader, "def double(x):\n    return x * 2\n") == Grade(True, Outcome.SCORED, 1, 1)
    wrong = await grade(grader, GIVEN["a.py"])
    assert (wrong.solved, wrong.outcome, wrong.reason) == (False, Outcome.SCORED, "AssertionError")


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("class A:\n    __eq__ = lambda s, o: True\ndef double(x):\n    return A()\n", Outcome.VOID),
        ("import os\nos._exit(0)\n", Outcome.VOID),
        ("raise SystemExit(1)\n", Outcome.SCORED),
    ],
)
async def test_who_fools_the_script_is_void(grader: Grader, source: str, outcome: Outcome):
    verdict = await grade(grader, source)
    assert not verdict.solved and verdict.outcome is outcome, verdict


async def test_SBX_11_processes_that_outlive_the_script_are_not_paid_and_do_not_stay(grader: Grader):
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    for n in range(3): os.close(n)\n    time.sleep(60)\n"
        "def double(x):\n    return 2 * x\n"
    )
    verdict = await grade(grader, source)
    assert not verdict.solved and verdict.reason == "1 processes outlived the script", verdict


async def test_SBX_7_rewards_are_finite_and_in_range(grader: Grader):
    for text in ("nan", "inf", "-1", "1.5", "1e999", "", "one", "1 1", "\u0661x", "9" * 400):
        data = b"m" + json.dumps([0, text, "reward.txt", 0]).encode()
        assert read_reward(data, "m", "").reward == 0, text
    for text in ("{}", "[1]", "true", '"1"', '{"reward": true}', '{"a": 1, "b": 1}', '{"reward": NaN}', "{"):
        data = b"m" + json.dumps([0, text, "reward.json", 0]).encode()
        assert read_reward(data, "m", "").reward == 0, text
    for text, kind, value in (
        ("1\n", "reward.txt", 1),
        ("0.25", "reward.txt", 0.25),
        ('{"reward": 1.0}', "reward.json", 1),
        ('{"accuracy": 0.5}', "reward.json", 0.5),
    ):
        assert read_reward(b"m" + json.dumps([1, text, kind, 0]).encode(), "m", "").reward == value
    for data in (b"", b"m", b"m[]", b'm[0, "1", "reward.txt"', b'x[0, "1", "reward.txt", 0]'):
        assert read_reward(data, "m", "said").reward == 0
    high = a_task("echo 1.5 > /logs/verifier/reward.txt", solve="")
    verdict = await grade(grader, GIVEN["a.py"], high)
    assert not verdict.solved and verdict.reason == "the script's reward 1.5 is not between 0 and 1"


async def test_HCK_5_what_the_agent_plants_is_not_where_the_grader_reads(grader: Grader):
    planted: dict[str, str] = dict.fromkeys(
        ("logs/verifier/reward.txt", "tests/test.sh", "tests/check_a.py", ".local/bin/python3", "sitecustomize.py"), "1"
    )
    assert not (await grade(grader, GIVEN["a.py"], files=planted)).solved
    looks = "import os\ndef double(x):\n    return 2 * x if os.path.exists('/workspace/tests') else 0\n"
    assert not (await grade(grader, looks, files=planted)).solved


async def test_a_script_without_python_tests_is_taken_at_its_word_and_that_is_said(grader: Grader):
    task = a_task("grep -q '2 . x' a.py && echo 1 > /logs/verifier/reward.txt\n", **{"tests/check_a.py": ""})
    verdict = await grade(grader, "def double(x):\n    return 2 * x\n", task)
    assert verdict.solved and verdict.reason == UNGUARDED


async def test_a_broken_task_blames_no_submission(grader: Grader):
    for task, says in (
        (a_task(solve="true"), "the reference of task script"),
        (a_task("exit 0"), "wrote no reward"),
        (a_task("while true; do :; done", **{"tests/script.json": '{"seconds": 0.3}'}), "ran out of time"),
        (a_task(**{"tests/script.json": "{"}), "script.json"),
    ):
        verdict = await grade(grader, "def double(x):\n    return 2 * x\n", task)
        assert verdict.outcome is Outcome.INFRA and says in verdict.reason, verdict


async def test_output_without_end_is_the_policys(grader: Grader):
    verdict = await grade(grader, "while True:\n    print('x' * 9999)\n")
    assert not verdict.solved and verdict.outcome is Outcome.SCORED, verdict


async def test_harbors_places_are_rewritten_and_others_are_not():
    text = "cp /tests/a /logs/verifier; cd /app; ls /app/tests ./tests src/tests /testsuite"
    assert rewritten(text, "/tmp/r") == (
        "cp /tmp/r/tests/a /tmp/r/logs/verifier; cd /workspace; ls /workspace/tests ./tests src/tests /testsuite"
    )
