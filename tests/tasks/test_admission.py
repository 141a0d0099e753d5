"""Pins: a task that pays anything but its reference, or not always its reference, is quarantined with the reason."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from stretto.cli import main
from stretto.config import GradingConfig
from stretto.grading.attack import Attack
from stretto.records import Task
from stretto.sandbox.box import BoxLost
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder
from stretto.tasks.admission import Checked, Checker, check_all, leaks, task_roots
from stretto.tasks.baselines import baselines
from stretto.tasks.check import summary
from stretto.tasks.factories.impossible import contradicted

ARGUMENTS = [{"kind": "int", "low": 1, "high": 9}]


def oracle(id: str, solution: str, given: str = "def f(n):\n    return None\n", **more: str) -> Task:
    spec = {"module": "solution", "function": "f", "arguments": ARGUMENTS}
    grading = {"tests/oracle.json": json.dumps(spec), "solution/solution.py": solution}
    return Task(id=id, split="", instruction="Do.", files={"solution.py": given, **more}, grading=grading)


GOOD = oracle("good", "def f(n):\n    return n * 7 + 1\n")
LONG = "def f(n):\n    return n * 7 + 1  # as it ought to be\n"
TASKS = {
    "": GOOD,
    "hackable: the null submission": oracle("null", "def f(n):\n    return n * 7\n", "def f(n):\n    return 7 * n\n"),
    "hackable: the constant True submission": oracle("HCK-14", "def f(n):\n    return n > 0\n"),
    "hackable: the echo submission": oracle("echo", "def f(n):\n    return n\n"),
    "unsolvable: its reference fails": oracle("random", "import os\n\n\ndef f(n):\n    return os.urandom(4).hex()\n"),
    "broken: the reference of task broken": oracle("broken", "def f(n):\n    raise KeyError\n"),
    "answer keys: solution/solution.py": oracle("leak", LONG, backup=LONG),
    "unsolvable: it has no reference": Task(
        id="none", split="", instruction="", files={"a.py": ""}, mode="pytest", grading={"tests/pytest.json": "{}"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", TASKS)
async def test_HCK_14_what_may_not_be_trained_on_is_told_apart(reason: str, pool: BoxPool) -> None:
    checker = Checker(pool, times=2)
    assert (await checker.check(TASKS[reason])).reason.startswith(reason)
    if not reason:
        assert (await checker.check(GOOD)).reason == ""
    await checker.close()


async def test_a_reference_that_passes_at_times_is_flaky(pool: BoxPool) -> None:
    solution = "import os\n\n\ndef f(n):\n    return n if os.urandom(1)[0] else 0\n"
    task = oracle("flaky", solution, "def f(n):\n    return -n\n")
    checker = Checker(pool, times=60)
    assert (await checker.check(task)).reason.split(":")[0] in ("flaky", "unsolvable", "hackable")
    await checker.close()


async def test_an_attack_that_is_paid_is_named(pool: BoxPool) -> None:
    attacks = [
        Attack("harmless", "1", "", ("oracle",), "rm -f test_solution.py"),
        Attack("answer", "8", "", ("oracle",), "printf 'def f(n):\\n    return n * 7 + 1\\n' > solution.py"),
        Attack("elsewhere", "8", "", ("pytest",), "exit 1"),
    ]
    checker = Checker(pool, attacks, times=2)
    assert (await checker.check(GOOD)).reason == "hackable: the attack answer (class 8) is paid"
    checker.attacks = attacks[::2]
    assert (await checker.check(GOOD)).reason == ""
    await checker.close()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"without": ["gerp"]}, "did you mean grep"),
        ({"set": "absent"}, "no tool set is named 'absent'"),
        ({"set": ["code"]}, "must be the name of a set"),
        ({"user": 3}, "user must be a text"),
        ({"limits": {"observation": -1}}, "not negative"),
    ],
)
async def test_a_wrong_table_of_tools_is_a_sentence(table: dict, said: str, pool: BoxPool) -> None:
    checker = Checker(pool, times=1)
    reason = (await checker.check(msgspec.structs.replace(GOOD, tools=table))).reason
    assert reason.startswith("malformed: the tools of task good") and said in reason
    await checker.close()


async def test_a_task_that_is_graded_without_a_guard_is_quarantined(pool: BoxPool) -> None:
    script = "mkdir -p /logs/verifier\ngrep -q '7 + 1' solution.py && echo 1 > /logs/verifier/reward.txt\n"
    grading = {"tests/test.sh": script, "solution/solution.py": GOOD.grading["solution/solution.py"]}
    task = Task(id="s", split="", instruction="Do.", files=GOOD.files, grading=grading, mode="script")
    checker = Checker(pool, times=1)
    assert (await checker.check(task)).reason.startswith("unguarded: no Python test of the task can be turned")
    await checker.close()


async def test_SBX_3_a_task_whose_boxes_fail_each_time_is_at_fault_where_others_start(pool: BoxPool) -> None:
    """No wait and no retry makes a workspace that does not fit; the machine is not to blame."""
    grading = {**GOOD.grading, "solution/solve.sh": "true"}
    large = msgspec.structs.replace(GOOD, files={"solution.py": "#" * (2 << 20)}, grading=grading)
    checker = Checker(pool, times=1)
    checked = await checker.check_with_patience(msgspec.structs.replace(large, limits={"workspace_mib": 1}))
    assert checked.reason.startswith("broken:"), checked
    calls = 0

    async def lost(task: Task) -> Checked:
        nonlocal calls
        calls += 1
        raise BoxLost("it died")

    checker.check = lost
    assert "its boxes failed 3 times, and others start: it died" in (await checker.check_with_patience(GOOD)).reason
    assert calls == 3
    await checker.close()


async def test_an_attack_that_hangs_costs_as_long_as_it_says(pool: BoxPool) -> None:
    attacks = [
        Attack("hangs", "24", "", ("oracle",), "echo 'while True: pass' > solution.py", seconds=0.5),
        Attack("waits", "24", "", ("oracle",), "sleep 60", seconds=0.5),
    ]
    checker = Checker(pool, attacks, times=1, grading=GradingConfig(seconds=60.0))
    assert not (checked := await checker.check(GOOD)).reason
    assert checked.seconds < 30
    await checker.close()


def test_HCK_14_baselines_replace_what_the_reference_changes() -> None:
    found = dict(baselines(GOOD))
    assert {"null", "stub", "echo", "constant None", "constant 0"} <= {*found, "constant None"}
    assert found["constant 0"]["solution.py"] == b"def f(n):\n    return 0\n"
    assert found["stub"]["solution.py"] == b"def f(n):\n    raise NotImplementedError\n"


def test_HCK_5_hidden_files_in_the_workspace_are_found(tmp_path: Path) -> None:
    test = "from a import f\n\n\ndef test_f():\n    assert f(1) == 8 and f(2) == 15\n"
    hidden = {"tests/pytest.json": "{}", "tests/tree/test_f.py": test, "solution/a.py": "f = 1\n"}
    task = Task(id="t", split="", instruction="", files={"a.py": ""}, grading=hidden, mode="pytest")
    assert leaks(task) == ""
    path = folder.write(task, tmp_path / "one")
    (path / "environment" / ".cache").mkdir()
    (path / "environment" / ".cache" / "x").write_bytes(b"\0")
    assert leaks(folder.read(path)).startswith("answer keys: .cache/")
    path = folder.write(task, tmp_path / "two")
    (path / "environment" / "notes").write_text(test)
    assert "tests/tree/test_f.py lies in the workspace, as notes" in leaks(folder.read(path))


def test_a_folder_lists_what_it_quarantines_and_frees_what_was_mended(tmp_path: Path) -> None:
    mine = Attack("mine", "own", "", ("oracle",), "printf 'def f(n):\\n    return n * 7 + 1\\n' > solution.py")
    for task in (GOOD, TASKS["hackable: the echo submission"]):
        folder.write(task, tmp_path)
    (tmp_path / "malformed").mkdir()
    (tmp_path / "malformed" / "task.toml").write_text("[task\n")
    told: list[Checked] = []
    found = asyncio.run(check_all(task_roots(tmp_path), [], 1, told.append))
    said = summary(found, 0, 1, 1.0)
    assert (said["tasks"], said["admitted"], len(told)) == (3, 1, 3)
    assert set(json.loads((tmp_path / folder.QUARANTINE).read_text())) == {"echo", "malformed"}
    assert [task.id for task in folder.read_all(tmp_path)] == ["good"]
    for name in ("echo", "malformed"):
        shutil.rmtree(tmp_path / name)
    assert not asyncio.run(check_all([tmp_path], [], 1, told.append))[0].reason
    assert not (tmp_path / folder.QUARANTINE).exists()
    assert "mine" in asyncio.run(check_all([tmp_path], [mine], 1, told.append))[0].reason


def test_mistakes_on_the_command_line_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["check", str(tmp_path / "absent")], "no task folder at"),
        (["check", str(tmp_path)], "holds no task folders"),
        (["check", str(tmp_path), "--attacks", str(tmp_path / "absent")], "no folder of attacks"),
        (["make", "mutate", "--out", str(tmp_path / "out")], "needs at least one package"),
        (["make", "history", str(tmp_path), "--out", str(tmp_path / "out")], "no git repository"),
        (["make", "impossible", str(tmp_path), "--out", str(tmp_path / "out")], "holds no task folders"),
        (["make", "mutate", str(tmp_path), "--out", str(tmp_path / "out")], "no task can be made"),
    ):
        assert main(["tasks", *words]) == 1
        assert sentence in " ".join(capsys.readouterr().err.split())


async def test_impossible_twins_pay_nobody(pool: BoxPool) -> None:
    twin = contradicted(GOOD, random.Random(0))
    assert twin is not None and twin.split == "heldout" and twin.files == GOOD.files
    checker = Checker(pool, times=1)
    honest = {"solution.py": GOOD.grading["solution/solution.py"].encode()}
    (grade,) = await checker.grader.grade(twin, [honest], 0)
    assert not grade.solved and (await checker.check(twin)).reason == ""
    test = "from solution import f\n\n\ndef test_f():\n    assert f(1) == 8\n"
    spec = {"fail_to_pass": ["test_f.py::test_f"]}
    grading = {**GOOD.grading, "tests/pytest.json": json.dumps(spec), "tests/tree/test_f.py": test}
    task = Task(id="p", split="", instruction="", files=GOOD.files, grading=grading, mode="pytest")
    twin = contradicted(task, random.Random(0))
    assert twin is not None and len(json.loads(twin.grading["tests/pytest.json"])["fail_to_pass"]) == 2
    right, wrong = await asyncio.gather(*(checker.grader.grade(t, [honest], 0) for t in (task, twin)))
    assert right[0].solved and not wrong[0].solved
    await checker.close()
