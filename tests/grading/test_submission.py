"""What of a submission is graded: nothing that decides the grade is taken from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.grading.submission import base_tree, protected, restored
from stretto.records import Task


def a_task(**grading: str) -> Task:
    files = {"pkg/a.py": "A", "tests/test_a.py": "T", "pyproject.toml": "P", "data/x.txt": "X", "types.py": "Y"}
    return Task(id="t", split="", instruction="", files=files, grading=grading, mode="pytest")


def test_SBX_6_protected_paths_come_from_the_task_and_the_rest_from_the_submission():
    submitted = {
        "pkg/a.py": b"fixed",
        "pkg/new.py": b"new",
        "tests/test_a.py": b"assert True",
        "tests/test_more.py": b"more",
        "pyproject.toml": b"addopts",
        "conftest.py": b"hook",
        "pkg/conftest.py": b"hook",
        "types.py": b"mine",
    }
    tree = restored(a_task(**{"tests/tree/tests/test_hidden.py": "H", "tests/pytest.json": "{}"}), submitted)
    assert tree == {
        "pkg/a.py": b"fixed",
        "pkg/new.py": b"new",
        "tests/test_a.py": b"T",
        "tests/test_hidden.py": b"H",
        "pyproject.toml": b"P",
        "types.py": b"mine",  # the task had it, so that it is no shadow
    }


def test_what_the_policy_deletes_stays_deleted_unless_it_is_protected():
    assert restored(a_task(), {}) == {"tests/test_a.py": b"T", "pyproject.toml": b"P"}


@pytest.mark.parametrize(
    "path",
    [
        *("conftest.py", "a/conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "a/pyproject.toml"),
        *("sitecustomize.py", "evil.pth", ".local/lib/python3.11/site-packages/usercustomize.py", ".bashrc"),
        *("a/__pycache__/a.cpython-311.pyc", "a.pyc", "evil.so", "x-1.0.dist-info/entry_points.txt", ".git/config"),
        *("random.py", "json/__init__.py", "pytest/__init__.py", "_pytest/x.py", "unittest/case.py", "typing.py"),
        *("test_a.py", "deep/down/a_test.py", "tests/helper.py", "pkg/tests/data.json"),
    ],
)
def test_HCK_11_start_up_code_shadows_and_compiled_files_are_never_taken(path: str):
    assert protected(path)
    assert path not in restored(a_task(), {path: b"x"})


@pytest.mark.parametrize(
    "path", ["pkg/random.py", "pkg/types.py", "contest.py", "README.md", "pkg/latest.py", "json", "x/pytest.py"]
)
def test_honest_names_are_taken(path: str):
    assert restored(a_task(), {path: b"x"})[path] == b"x"


def test_the_task_may_protect_more_drop_some_and_free_others():
    submitted = {"vendor/x.py": b"1", "tests_old/y.py": b"2", "build/lib.so": b"3", "pkg/a.py": b"4"}
    tree = restored(a_task(), submitted, extra=["vendor/"], remove=["tests_old"], free=["build/*.so"])
    assert tree == {"tests/test_a.py": b"T", "pyproject.toml": b"P", "build/lib.so": b"3", "pkg/a.py": b"4"}


def test_files_of_the_submission_where_ours_need_folders_give_way():
    task = a_task(**{"tests/tree/hidden/test_h.py": "H"})
    assert restored(task, {"hidden": b"file", "hidden/test_h.py/deep": b"x", "tests": b"file"}) == {
        "hidden/test_h.py": b"H",
        "tests/test_a.py": b"T",
        "pyproject.toml": b"P",
    }


def test_an_environment_folder_is_the_base_without_its_history(tmp_path: Path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("remote")
    (tmp_path / "pkg" / "a.bin").write_bytes(b"\xff\0")
    (tmp_path / "link").symlink_to("pkg/a.bin")
    (tmp_path / "out").symlink_to("/etc/hostname")
    task = Task(id="t", split="", instruction="", files={"b": "B"}, grading={}, environment=str(tmp_path))
    assert base_tree(task) == {"pkg/a.bin": b"\xff\0", "link": b"\xff\0", "b": b"B"}
