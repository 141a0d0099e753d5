"""The tree that is graded: what the policy left, with everything that decides the grade put back from the task.

A submission is the regular files of the agent's workspace, under caps. Test files, configuration of test tools,
compiled files and modules that would shadow the grader's tools are never taken from it: they come from the task or not
at all. What a policy does to them is without effect, and told by a detector.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import msgspec

from stretto.grading.modes.spec import TaskBroken
from stretto.harness.session import agent_box
from stretto.records import Task
from stretto.sandbox.box import Box, BoxError
from stretto.sandbox.pool import BoxPool

MAX_FILES, MAX_BYTES = 2000, 1 << 24
"""What a submission may hold."""
TREE = "tests/tree/"
"""Files of the task below this folder are put over the submission, at the same path without it."""
SOLUTION = "solution/"
SOLVE_SECONDS = 60.0

CONFIGURATION = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "setup.py"),
    *("pyproject.toml", ".coveragerc", "noxfile.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-link"),
    *(".bashrc", ".profile", ".bash_profile", ".bash_aliases", ".inputrc", ".pdbrc", ".pythonrc.py", ".netrc"),
)
"""Names of files that configure a test run, wherever they lie."""
TESTS = ("test_*.py", "*_test.py", "tests.py")
FOLDERS = frozenset(
    "tests test __pycache__ .pytest_cache .hypothesis .mypy_cache .git .local .config *.egg-info *.dist-info".split()
)
COMPILED = ("*.pyc", "*.pyo", "*.so", "*.pyd", "*.dll", "*.dylib", "*.o", "*.a")
TOOLS = frozenset(
    "pytest _pytest py pluggy iniconfig packaging pygments hypothesis attr attrs coverage unittest".split()
)
"""Modules of test tools; like those of the standard library, the root of a tree may not shadow them."""


async def collect(box: Box) -> dict[str, bytes]:
    """The regular files of the workspace; raises BoxError beyond the caps."""
    return await box.files(MAX_FILES, MAX_BYTES)


def base_tree(task: Task) -> dict[str, bytes]:
    """What the agent was given: the task's files over its environment folder. A link has the content it leads to."""
    files = {path: text.encode() for path, text in task.files.items()}
    return _folder(task.environment) | files if task.environment else files


@functools.lru_cache(maxsize=16)
def _folder(root: str) -> dict[str, bytes]:
    found = {}
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name != ".git"]
        for name in names:
            path = Path(folder, name)
            if path.is_file() and path.resolve().is_relative_to(Path(root).resolve()):
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    return found


def fingerprint(task: Task) -> str:
    """The same for tasks that are graded in the same way."""
    return hashlib.sha256(msgspec.msgpack.encode((task.id, task.files, task.grading, task.environment))).hexdigest()


def has_reference(task: Task) -> bool:
    return any(path.startswith(SOLUTION) for path in task.grading)


async def reference_tree(task: Task, pool: BoxPool) -> dict[str, bytes]:
    """What the reference would hand in: `solution/*` over what the agent was given, then `solution/solve.sh` run in an
    agent's box. Raises BoxLost, TaskBroken."""
    files = {path.removeprefix(SOLUTION): text for path, text in task.grading.items() if path.startswith(SOLUTION)}
    script = files.pop("solve.sh", None)
    tree = base_tree(task) | {path: text.encode() for path, text in files.items()}
    if script is None:
        return tree
    try:
        box = await agent_box(task, pool)
        try:
            await box.write_all({path: text.encode() for path, text in files.items()})
            await box.exec(["bash", "-c", script], seconds=SOLVE_SECONDS)
            return await collect(box)
        finally:
            await box.stop()
    except (BoxError, ValueError) as error:
        raise TaskBroken(f"solution/solve.sh of task {task.id} can't be run: {error}") from error


def restored(
    task: Task,
    submitted: dict[str, bytes],
    extra: Sequence[str] = (),
    remove: Sequence[str] = (),
    free: Sequence[str] = (),
) -> dict[str, bytes]:
    """The tree to grade: unprotected files as submitted, protected ones as the task has them. Patterns: `extra` is
    protected too, `remove` is dropped from the submission, `free` is not protected."""
    base = base_tree(task)

    def ours(path: str) -> bool:
        return protected(path, extra, base) and not matches(path, free)

    kept = {path: data for path, data in base.items() if ours(path)} | hidden_tree(task)
    tree = {
        path: data
        for path, data in submitted.items()
        if not ours(path) and not matches(path, remove) and not in_the_way(path, kept)
    }
    return tree | kept


def in_the_way(path: str, ours: Collection[str]) -> bool:
    """Whether a file at `path` is where ours needs a folder, or lies below a file of ours."""
    below = any(str(parent) in ours for parent in PurePosixPath(path).parents)
    return below or any(name.startswith(path + "/") for name in ours)


def hidden_tree(task: Task) -> dict[str, bytes]:
    """The task's own files that are put over a submission."""
    return {path.removeprefix(TREE): text.encode() for path, text in task.grading.items() if path.startswith(TREE)}


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names the path or a folder above it."""
    return any(fnmatch(path, pattern) or fnmatch(path, pattern.rstrip("/") + "/*") for pattern in patterns)


def protected(path: str, extra: Sequence[str] = (), base: Collection[str] = ()) -> bool:
    """Whether the grader takes this path from the task only."""
    *folders, name = PurePosixPath(path).parts
    if any(fnmatch(folder, pattern) for folder in folders for pattern in FOLDERS):
        return True
    if any(fnmatch(name, pattern) for pattern in (*CONFIGURATION, *TESTS, *COMPILED)):
        return True
    return matches(path, extra) or (shadows(path) and path not in base)


def shadows(path: str) -> bool:
    """Whether a module at the root of the tree has the name of one of the standard library or of a test tool."""
    top = PurePosixPath(path).parts[0].split(".")[0]
    nested = "/" in path
    return (nested or path.endswith(".py")) and (top in sys.stdlib_module_names or top in TOOLS)
