"""Pins: no answer key survives in what an agent is given, and what is left of one is found."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from stretto.tasks.purge import ancestors, clean_copy, history_keys, keys, twins


def sh(command: str, at: Path) -> str:
    identity = "-c user.name=a -c user.email=a@b"
    script = f'git() {{ command git {identity} "$@"; }}\n{command}'
    done = subprocess.run(["bash", "-ec", script], cwd=at, text=True, errors="replace", capture_output=True, check=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits, a branch and a tag that know more, a lost commit, a stash and a remote."""
    root = tmp_path / "repository"
    root.mkdir()
    sh(
        """
        git init -q -b main .
        echo one > a.txt; git add .; git commit -qm one
        echo two > a.txt; git commit -qam two
        echo SECRET > a.txt; git commit -qam three
        git tag gold; git branch later
        echo LOST > a.txt; git commit -qam lost; git reset -q --hard HEAD~1
        echo stashed > a.txt; git stash -q
        git remote add origin https://example.invalid/a.git
        """,
        root,
    )
    return root


def test_SBX_8_nothing_later_is_in_the_history(repository: Path, tmp_path: Path) -> None:
    base = sh("git rev-parse HEAD~1", repository).strip()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.txt").write_text("two\n")
    ancestors(repository, base, tree)
    assert sh("git log --all --format=%s", tree).split() == ["two", "one"]
    assert sh("git status --porcelain", tree) == ""
    objects = sh("git cat-file --batch-all-objects --batch-check | cut -d' ' -f1 | git cat-file --batch", tree)
    assert "SECRET" not in objects and "LOST" not in objects and "stashed" not in objects
    assert not sh("git remote", tree) and not sh("git reflog --all", tree)
    assert history_keys(tree) == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("git remote add origin https://example.invalid/a.git", "remote"),
        ("git tag gold", "other references"),
        ("git branch later", "other references"),
        ("echo x > b; git add b; git commit -qm x; git reset -q --hard HEAD~1", "is there|does not reach"),
        ("echo x | git hash-object -w --stdin", "does not reach"),
    ],
)
def test_SBX_8_histories_that_tell_of_the_future_are_found(
    repository: Path, tmp_path: Path, command: str, said: str
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    ancestors(repository, sh("git rev-parse HEAD~1", repository).strip(), tree)
    assert keys(tree) == []
    sh(command, tree)
    assert any(re.search(said, found) for found in keys(tree))


def test_HCK_6_bytecode_caches_builds_and_twins_are_left_out(shop: Path, tmp_path: Path) -> None:
    (shop / "link").symlink_to("/etc/passwd")
    (shop / "inner").symlink_to("shop")
    assert len(keys(shop)) >= 5
    clean_copy(shop, tmp_path / "clean")
    kept = sorted(path.relative_to(tmp_path / "clean").as_posix() for path in (tmp_path / "clean").rglob("*.*"))
    assert kept == [
        "pyproject.toml", "shop/__init__.py", "shop/prices.py", "tests/__init__.py", "tests/test_prices.py"
    ]  # fmt: skip
    assert not (tmp_path / "clean" / "link").is_symlink() and (tmp_path / "clean" / "inner").is_symlink()
    assert keys(tmp_path / "clean") == []


def test_HCK_6_a_library_that_holds_what_is_under_test_is_found() -> None:
    assert twins(["pluggy", "shop"], ["pytest"]) == ["pluggy"]  # pytest requires it
    assert twins(["shop"], ["pytest"]) == []


def test_HCK_7_a_repository_elsewhere_is_no_history(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: /elsewhere\n")
    assert keys(tmp_path) == [".git is no source"]
