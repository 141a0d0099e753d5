"""Pins: `stretto tasks try` with its input from a pipe: tools, the terminal, the grade, what is said of mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stretto.launch.person import read_call
from stretto.records import CallStatus
from stretto.tasks import folder

from .test_remote import task


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return folder.write(task(1), tmp_path)


def run(place: Path, lines: str, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "stretto.cli", "tasks", "try", str(place), *options]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_person_solves_a_task(place: Path) -> None:
    code, said = run(
        place,
        "read_file path=solution.py\nfrobnicate\nread_file\nread_file solution.py\n"
        "edit_file path=notes.md old='' new=<<END\nline one\nline two\nEND\n"
        'edit_file {"path": "solution.py", "old": "x + 3", "new": "x + x"}\nsubmit\n',
    )
    assert code == 0 and "double(x) must return twice x." in said
    assert "1\tdef double(x):" in said.replace("       ", "\t") and "no tool named 'frobnicate'" in said
    assert "read_file needs path" in said and "is not of the form key=value" in said and "No closing" not in said
    assert "made notes.md: 2 lines" in said and "edited solution.py: 2" in said and "solved (scored, 24 of 24)" in said


def test_the_terminal_is_the_boxs(place: Path) -> None:
    code, said = run(place, "pwd; id -u\nsed -i 's/x + 3/x * 2/' solution.py\ncd /tmp\npwd\n/submit\n", "--shell")
    assert code == 0 and "/workspace\n1000" in said and "\n/tmp\n" in said and "solved (scored" in said


def test_other_endings_and_bad_folders_are_told(place: Path, tmp_path: Path) -> None:
    code, said = run(place, "give_up reason=odd\n")
    assert code == 1 and "not solved (scored)" in said and "the policy gave up" in said
    code, said = run(place, "list_dir\n")
    assert code == 1 and "nothing was handed in" in said
    code, said = run(tmp_path / "gone", "")
    assert code == 1 and said.startswith("stretto tasks: no task folder at")
    folder.write(task(2), tmp_path)
    code, said = run(tmp_path, "")
    assert code == 1 and "holds 2 tasks; give the folder of one (double-1, double-2" in said


def test_lines_become_calls() -> None:
    lines = iter(["a", " b", "EOF"])
    call = read_call("edit_file path='a b.py' old= new=<<EOF", lambda _: next(lines))
    assert (call.name, call.spelled) == ("edit_file", True)
    assert call.arguments == {"path": "a b.py", "old": "", "new": "a\n b\n"}
    assert read_call('run {"command": 3}', input).arguments == {"command": 3}
    assert read_call("run {", input).status is CallStatus.BAD_JSON
    for line in ("run 'x", "run [1]"):
        assert read_call(line, input).status is CallStatus.BAD_ARGUMENTS
