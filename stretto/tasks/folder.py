"""Task folders in Harbor's layout, read and written.

<task>/task.toml          id, split, grading mode, limits, metadata (`header.py`)
       instruction.md     what the agent is asked
       environment/       the files it works on
       tests/             how it is graded; never enters the agent's box
       solution/          the reference; never enters the agent's box

A small workspace of plain text is carried inside the task. Any other stays where it is, as a folder, and the box lays
it below the agent's copy-on-write layer: so it may be large, and hold binary files and git history.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

from stretto.records import Task
from stretto.tasks import header, portable

_MARKS = ("task.toml", "instruction.md")  # either makes a folder a task; the other must then be there
_CONTAINER = frozenset(("Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore"))
_BY_FILE = {"tests/oracle.json": "oracle", "tests/pytest.json": "pytest", "tests/test.sh": "script"}
INLINE_FILES, INLINE_BYTES = 32, 1 << 17
"""A workspace beyond these is not carried as text."""
QUARANTINE = "quarantine.json"
"""Beside task folders: which of them are not to be used, and why (`admission.py` writes it)."""
HIDDEN_FILES, HIDDEN_BYTES = 2048, 1 << 23
"""Most that `tests/` and `solution/` may hold: they travel with the task."""


class TaskError(ValueError):
    """A sentence naming the folder and what is wrong with it."""


def name(task: Task) -> str:
    """Of its folder: the id with `/` as `-`."""
    return task.id.replace("/", "-")


def write(task: Task, root: Path) -> Path:
    """Write one task below `root`, with a copy of its workspace."""
    folder = root / name(task)
    workspace = folder / "environment"
    if task.environment:
        workspace /= header.WORKSPACE
        shutil.copytree(task.environment, workspace, symlinks=True, dirs_exist_ok=True)
    files = {"task.toml": header.render(task), "instruction.md": task.instruction + "\n", **task.grading}
    files |= {
        path: text for path, text in portable.files(task).items() if path.removeprefix("environment/") not in task.files
    }
    files |= {f"{workspace.relative_to(folder).as_posix()}/{path}": text for path, text in task.files.items()}
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if path.endswith(".sh"):
            target.chmod(0o755)
    return folder


def read(folder: Path) -> Task:
    """Read one task folder; raises TaskError naming the missing or malformed part."""
    try:
        head = header.parse(_text(folder / "task.toml"), folder.resolve().name)
        instruction = _text(folder / "instruction.md").strip()
        files, environment = _workspace(folder, head.workspace)
        grading = {f"{part}/{k}": v for part in ("tests", "solution") for k, v in _hidden(folder / part).items()}
    except FileNotFoundError as error:
        raise TaskError(f"task {folder} lacks {Path(error.filename).name}") from error
    except TaskError:
        raise
    except ValueError as error:
        raise TaskError(f"task {folder}: {error}") from error
    except OSError as error:
        raise TaskError(f"task {folder} cannot be read: {Path(error.filename).name}: {error.strerror}") from error
    mode = head.mode or next((mode for path, mode in _BY_FILE.items() if path in grading), "oracle")
    wanted = next(path for path, of in _BY_FILE.items() if of == mode)
    if wanted not in grading:
        raise TaskError(f"task {folder} is graded by {mode}, and has no {wanted}")
    if mode != "script":
        grading = {path: text for path, text in grading.items() if not portable.ours(path, text)}
    return Task(
        id=head.id,
        split=head.split,
        instruction=instruction,
        files=files,
        grading=grading,
        metadata=head.metadata,
        tools=head.tools,
        environment=environment,
        mode=mode,
        libraries=head.libraries,
        limits=head.limits,
    )


def read_all(root: Path) -> list[Task]:
    """All tasks below `root`, ordered by folder name. Raises TaskError when there are none."""
    return [read(folder) for folder in folders(root)]


def folders(root: Path, quarantined: bool = False) -> list[Path]:
    """The task folders right below `root`, ordered by name; those in quarantine only when asked for.

    Raises TaskError when there are none.
    """
    if not root.is_dir():
        raise TaskError(f"no task folder at {root}")
    found = [folder for folder in sorted(root.iterdir()) if folder.is_dir() and _is_task(folder)]
    if not found:
        raise TaskError(f"{root} holds no task folders (a task is a folder with a task.toml)")
    if quarantined:
        return found
    kept = [folder for folder in found if folder.name not in quarantine(root)]
    if not kept:
        raise TaskError(f"all tasks of {root} are in quarantine; {QUARANTINE} there says why")
    return kept


def has_tasks(root: Path) -> bool:
    return any(_is_task(folder) for folder in root.iterdir())


def quarantine(root: Path) -> dict[str, str]:
    """Names of the folders that are not to be used, and why. Raises TaskError."""
    path = root / QUARANTINE
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from error


def _is_task(folder: Path) -> bool:
    return any((folder / part).is_file() for part in _MARKS)


def _workspace(folder: Path, below: str) -> tuple[dict[str, str], str]:
    """The workspace as texts, or as the folder that it is."""
    environment = folder / "environment"
    root = environment / below
    if not root.is_dir():
        raise TaskError(f"task {folder} lacks {root.relative_to(folder)}/")
    texts: dict[str, str] | None = {}
    size = count = 0
    for path in _walk(root):
        if not below and path.parent == environment and path.name in _CONTAINER:
            count += 1
            continue
        kind = path.lstat()
        size += kind.st_size
        if texts is not None:
            fits = not stat.S_ISLNK(kind.st_mode) and not kind.st_mode & 0o111 and size <= INLINE_BYTES
            text = _plain(path) if fits and len(texts) < INLINE_FILES else None
            texts = None if text is None else texts | {path.relative_to(root).as_posix(): text}
    if texts is None:
        return {}, str(root.resolve())
    if not texts and not count:
        raise TaskError(f"task {folder} has an empty environment/: there is nothing to work on")
    return texts, ""


def _hidden(root: Path) -> dict[str, str]:
    """Texts of `tests/` or `solution/`, within bounds."""
    found: dict[str, str] = {}
    size = 0
    for path in _walk(root) if root.is_dir() else ():
        found[path.relative_to(root).as_posix()] = text = _text(path)
        size += len(text)
        if len(found) > HIDDEN_FILES or size > HIDDEN_BYTES:
            raise TaskError(
                f"{root} holds more than {HIDDEN_FILES} files or {HIDDEN_BYTES >> 20} MiB: tests and solution travel "
                "with the task, so put what is large into environment/"
            )
    return found


def _walk(root: Path) -> list[Path]:
    """Regular files and links that stay inside; anything else is refused."""
    found = []
    inside = root.resolve()
    for folder, subfolders, names in os.walk(root):
        for entry in [*names, *(name for name in subfolders if (Path(folder) / name).is_symlink())]:
            path = Path(folder, entry)
            kind = path.lstat().st_mode
            if stat.S_ISLNK(kind) and not path.resolve().is_relative_to(inside):
                raise TaskError(f"{path} is a link to a place outside of {root.name}/: copy what it leads to")
            if not stat.S_ISLNK(kind) and not stat.S_ISREG(kind):
                raise TaskError(f"{path} is neither a file nor a link: a task holds nothing else")
            found.append(path)
    return sorted(found)


def _plain(path: Path) -> str | None:
    """Its text, or None where it can't be carried as such without change."""
    try:
        text = path.read_bytes().decode()
        path.name.encode()
    except UnicodeError:
        return None
    return None if "\r" in text or "\0" in text else text


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text, and tests and solution hold only text: {error}") from error
