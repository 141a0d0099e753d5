"""`task.toml`: Harbor's keys where it has them, ours beside them; read and written.

Harbor ignores keys that it doesn't know, and so do we: a table that nobody here reads (`agent`, `solution`, an image)
is passed over, not refused.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from typing import Any

from stretto.records import Task

MODES = ("oracle", "pytest", "script")
WORKSPACE = "repo"
"""Folder below `environment/` that holds the workspace of a task too large to be carried as text."""
_SIZES = {"K": 2**-10, "M": 1.0, "G": 2**10}
_VERSION = "1.1"


@dataclass(frozen=True)
class Header:
    """What `task.toml` says; `mode` is empty where it leaves that to `tests/`."""

    id: str
    split: str = ""
    mode: str = ""
    workspace: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    libraries: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    tools: dict[str, Any] = field(default_factory=dict)


def parse(text: str, name: str) -> Header:
    """`name` is the id of a task that has none. Raises ValueError with a clause: what is wrong in the file."""
    try:
        toml = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"task.toml cannot be read: {error}") from error
    tables = {key: toml.get(key, {}) for key in ("task", "metadata", "grading", "environment", "verifier", "tools")}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"task.toml cannot be read: {key} is no table")
    task, environment = tables["task"], tables["environment"]
    id = task.get("id", task.get("name", name))
    if not isinstance(id, str) or not id.isprintable() or id.strip() in ("", ".", "..") or len(id) > 200:
        raise ValueError(f"task.toml has id = {id!r}; give it a name, as text of at most 200 characters")
    split, workspace = task.get("split", ""), environment.get("workspace", "")
    if not isinstance(split, str):
        raise ValueError("task.toml needs split as text")
    if not isinstance(workspace, str) or workspace.startswith("/") or ".." in workspace.split("/"):
        raise ValueError(f"task.toml has workspace = {workspace!r}; it names a folder below environment/")
    mode = tables["grading"].get("mode", "")
    if mode not in ("", *MODES):
        raise ValueError(f"task.toml has grading mode {mode!r}; there are {', '.join(MODES)}")
    libraries = environment.get("libraries", [])
    if not isinstance(libraries, list) or not all(isinstance(name, str) for name in libraries):
        raise ValueError("task.toml needs libraries as a list of names")
    limits = _limits(environment, tables["verifier"])
    return Header(id, split, mode, workspace, tables["metadata"], libraries, limits, tables["tools"])


def render(task: Task) -> str:
    """The file's text; `parse` gives back what it holds of the task."""
    large = bool(task.environment)
    environment: dict[str, Any] = {"workspace": WORKSPACE} if large else {}
    if task.libraries:
        environment["libraries"] = task.libraries
    for ours, theirs in (("memory_mib", "memory_mb"), ("workspace_mib", "storage_mb")):
        if ours in task.limits:
            environment[theirs] = task.limits[ours]
    tables = {
        "task": {"id": task.id, "split": task.split},
        "metadata": task.metadata,
        "grading": {"mode": task.mode},
        "environment": environment,
        "verifier": {"timeout_sec": task.limits["seconds"]} if "seconds" in task.limits else {},
        "tools": task.tools,
    }
    lines = [f"schema_version = {_value(_VERSION)}", ""]
    for name, table in tables.items():
        if table:
            lines += [f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _limits(environment: dict[str, Any], verifier: dict[str, Any]) -> dict[str, float]:
    found = {}
    for table, key, old, ours in (
        (environment, "memory_mb", "memory", "memory_mib"),
        (environment, "storage_mb", "storage", "workspace_mib"),
        (verifier, "timeout_sec", "", "seconds"),
    ):
        value = table.get(key, table.get(old))
        if value is None:
            continue
        if isinstance(value, str) and value[-1:].upper() in _SIZES and value[:-1].strip().isdigit():
            value = int(value[:-1]) * _SIZES[value[-1].upper()]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise ValueError(f"task.toml has {key} = {value!r}; it takes a positive number")
        found[ours] = value
    return found


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("-", "_").isidentifier() else _value(key)


def _value(value: Any) -> str:
    """As TOML. JSON's notation is the same but for tables, null (left out of tables) and the character 127."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(key)} = {_value(v)}' for key, v in value.items() if v is not None)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
