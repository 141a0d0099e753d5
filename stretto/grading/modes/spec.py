"""How a task says that it is graded: its mode, and `tests/pytest.json` or `tests/script.json` of it.

| Mode | The task has | Right means |
|---|---|---|
| `oracle` | `tests/oracle.json` and the reference under `solution/` | equal to the reference on fresh calls |
| `pytest` | `tests/pytest.json`, hidden test files under `tests/tree/` | each required test seen and passed |
| `script` | `tests/test.sh`, perhaps `tests/script.json` | the script writes a reward of 1 |
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from stretto.records import Task

PYTEST, SCRIPT = "tests/pytest.json", "tests/script.json"
Spec = TypeVar("Spec", bound=msgspec.Struct)


class TaskBroken(ValueError):
    """The task itself can't be graded: no attempt at it may be judged. The message names the task."""


class PytestSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tests/pytest.json`. Test ids are pytest's, relative to the workspace: `tests/test_a.py::test_b[1-2]`."""

    fail_to_pass: list[str]  # fail in the environment, pass with the reference
    pass_to_pass: list[str] = []
    paths: tuple[str, ...] = (".",)  # folders of the workspace on sys.path, after the standard library
    package: str = ""  # a module that must be imported from the workspace
    remove: list[str] = []  # files or folders of the submission (globs) that are dropped
    protected: list[str] = []  # files or folders (globs) that are taken from the task, beside the usual ones
    libraries: tuple[str, ...] = ("pytest",)  # distributions the tests need; the task's own are added
    plugins: tuple[str, ...] = ()  # of pytest, by module; none is loaded by itself
    options: dict[str, str] = {}  # pytest's ini settings
    seconds: float = 30.0  # wall-clock limit of one run of the required tests


class ScriptSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tests/script.json`; a task without it takes these values."""

    remove: list[str] = []
    protected: list[str] = []
    unprotected: list[str] = []  # globs of what is taken from the submission although it would usually not be
    seconds: float = 60.0  # wall-clock limit of one run


def read_pytest(task: Task) -> PytestSpec:
    """Raises TaskBroken."""
    if PYTEST not in task.grading:
        raise TaskBroken(f"task {task.id} has no {PYTEST}")
    spec = _read(task, PYTEST, PytestSpec)
    if not spec.fail_to_pass + spec.pass_to_pass:
        raise TaskBroken(f"{PYTEST} of task {task.id} requires no test")
    return spec


def read_script(task: Task) -> ScriptSpec:
    """Raises TaskBroken."""
    if "tests/test.sh" not in task.grading:
        raise TaskBroken(f"task {task.id} has no tests/test.sh")
    return _read(task, SCRIPT, ScriptSpec) if SCRIPT in task.grading else ScriptSpec()


def _read(task: Task, path: str, kind: type[Spec]) -> Spec:
    try:
        return msgspec.json.decode(task.grading[path], type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise TaskBroken(f"{path} of task {task.id} can't be used: {error}") from None
