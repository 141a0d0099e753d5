"""Task folders in Harbor's layout, read and written.

<task>/task.toml          id, split, metadata
       instruction.md     what the agent is asked
       environment/       the files it works on
       tests/             how it is graded; never enters the agent's box
       solution/          the reference; never enters the agent's box
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from stretto.records import Task

_MARKS = ("task.toml", "instruction.md")  # either makes a folder a task; the other must then be there


class TaskError(ValueError):
    """A sentence naming the folder and what is wrong with it."""


def name(task: Task) -> str:
    """Of its folder: the id with `/` as `-`."""
    return task.id.replace("/", "-")


def write(task: Task, root: Path) -> Path:
    """Write one task below `root`."""
    folder = root / name(task)
    metadata = "\n".join(f"{key} = {json.dumps(value)}" for key, value in task.metadata.items())
    head = f"[task]\nid = {json.dumps(task.id)}\nsplit = {json.dumps(task.split)}\n\n[metadata]\n{metadata}\n"
    files = {"task.toml": head, "instruction.md": task.instruction + "\n", **task.grading}
    files |= {f"environment/{path}": text for path, text in task.files.items()}
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def read(folder: Path) -> Task:
    """Read one task folder; raises TaskError naming the missing or malformed part."""
    try:
        head = tomllib.loads(_text(folder / "task.toml"))
        instruction = _text(folder / "instruction.md").strip()
        files = _texts(folder / "environment")
        grading = {f"{part}/{k}": v for part in ("tests", "solution") for k, v in _texts(folder / part).items()}
        task = head["task"]
        id, split, metadata = task["id"], task.get("split", ""), head.get("metadata", {})
    except FileNotFoundError as error:
        raise TaskError(f"task {folder} lacks {Path(error.filename).name}") from error
    except KeyError as error:
        raise TaskError(f"task {folder}: task.toml lacks {error.args[0]!r} (it needs [task] id)") from error
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise TaskError(f"task {folder}: task.toml cannot be read: {error}") from error
    except OSError as error:
        raise TaskError(f"task {folder} cannot be read: {Path(error.filename).name}: {error.strerror}") from error
    if not isinstance(id, str) or not id.isprintable() or id in ("", ".", ".."):
        raise TaskError(f"task {folder}: task.toml has id = {id!r}; give it a name, as text")
    if not isinstance(split, str) or not isinstance(metadata, dict):
        raise TaskError(f"task {folder}: task.toml needs split as text, and [metadata] as a table")
    if not files:
        raise TaskError(f"task {folder} has an empty environment/: there is nothing to work on")
    return Task(id=id, split=split, instruction=instruction, files=files, grading=grading, metadata=metadata)


def read_all(root: Path) -> list[Task]:
    """All tasks below `root`, ordered by folder name. Raises TaskError when there are none."""
    if not root.is_dir():
        raise TaskError(f"no task folder at {root}")
    tasks = [read(folder) for folder in sorted(root.iterdir()) if any((folder / part).is_file() for part in _MARKS)]
    if not tasks:
        raise TaskError(f"{root} holds no task folders (a task is a folder with a task.toml)")
    return tasks


def _texts(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): _text(path) for path in sorted(root.rglob("*")) if path.is_file()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text, and a task holds only text: {error}") from error
