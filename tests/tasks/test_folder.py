"""Pins: Harbor's folders are read as they come, large and binary workspaces stay on disk, bad ones are sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.records import Task
from stretto.tasks import folder

HARBOR = """\
version = "1.0"

[metadata]
difficulty = "easy"
tags = ["trivial"]

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
memory = "2G"
storage_mb = 64
"""


def lay(root: Path, files: dict[str, str | bytes]) -> Path:
    for path, content in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def harbor(root: Path, **more: str | bytes) -> Path:
    files: dict[str, str | bytes] = {
        "task.toml": HARBOR,
        "instruction.md": "Write hello to hello.txt.\n",
        "environment/Dockerfile": "FROM python:3.11\n",
        "environment/notes.txt": "nothing\n",
        "tests/test.sh": "#!/bin/bash\ngrep -q hello hello.txt && echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo hello > hello.txt\n",
    }
    return lay(root, files | more)


def test_a_folder_of_harbor_is_a_task(tmp_path: Path) -> None:
    task = folder.read(harbor(tmp_path / "hello"))
    assert (task.id, task.mode, task.split) == ("hello", "script", "")
    assert task.files == {"notes.txt": "nothing\n"} and not task.environment
    assert task.limits == {"memory_mib": 2048, "workspace_mib": 64, "seconds": 120.0}
    assert set(task.grading) == {"tests/test.sh", "solution/solve.sh"}
    lay(tmp_path / "hello", {"task.toml": '[task]\nname = "org/hello"\n'})
    assert folder.read(tmp_path / "hello").id == "org/hello"


@pytest.mark.parametrize(
    "workspace",
    [
        {"environment/data.bin": b"\xff\xfe\x00"},
        {"environment/windows.txt": b"a\r\nb\r\n"},
        {f"environment/{number}.txt": "x" for number in range(folder.INLINE_FILES + 1)},
        {"environment/large.txt": "x" * (folder.INLINE_BYTES + 1)},
    ],
)
def test_a_workspace_that_is_no_small_text_stays_a_folder_and_survives_a_round_trip(
    tmp_path: Path, workspace: dict[str, str | bytes]
) -> None:
    task = folder.read(harbor(tmp_path / "hello", **workspace))
    assert task.files == {} and task.environment == str((tmp_path / "hello" / "environment").resolve())
    again = folder.read(folder.write(task, tmp_path / "copies"))
    assert again.id == task.id and again.grading == task.grading and again.limits == task.limits
    for path, content in workspace.items():
        data = content if isinstance(content, bytes) else content.encode()
        assert Path(again.environment, path.removeprefix("environment/")).read_bytes() == data


def test_everything_in_a_task_survives_a_round_trip(tmp_path: Path) -> None:
    task = Task(
        id="a/b",
        split="heldout",
        instruction='Say "hi" \\ \u2028 ü',
        files={"a.py": "x = 1\n", "b/c.py": ""},
        grading={"tests/pytest.json": "{}", "solution/a.py": "x = 2\n"},
        metadata={"quote": 'a"b\\\x7f', "nested": {"x y": [1, 2.5, True], "ü": {"": "\t"}}},
        tools={"set": "code", "edit_file": {"name": "write"}},
        mode="pytest",
        libraries=["pytest", "attrs"],
        limits={"seconds": 3.5, "memory_mib": 256, "workspace_mib": 32},
    )
    assert folder.read(folder.write(task, tmp_path)) == task


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"task.toml": '[grading]\nmode = "judge"\n'}, "grading mode 'judge'"),
        ({"task.toml": '[grading]\nmode = "oracle"\n'}, "has no tests/oracle.json"),
        ({"task.toml": "[environment]\nlibraries = 3\n"}, "libraries as a list"),
        ({"task.toml": '[environment]\nworkspace = "../tests"\n'}, "a folder below environment/"),
        ({"task.toml": '[environment]\nworkspace = "absent"\n'}, "lacks environment/absent"),
        ({"task.toml": "[environment]\nmemory_mb = -1\n"}, "a positive number"),
        ({"task.toml": "[verifier]\ntimeout_sec = true\n"}, "a positive number"),
        ({"tests/expected.bin": b"\xff\xfe"}, "not UTF-8 text"),
        ({"tests/large": "x" * (folder.HIDDEN_BYTES + 1)}, "travel with the task"),
    ],
)
def test_malformed_folders_are_sentences(tmp_path: Path, files: dict[str, str | bytes], said: str) -> None:
    with pytest.raises(folder.TaskError, match=said):
        folder.read(harbor(tmp_path / "task", **files))


def test_HCK_5_links_out_of_a_part_are_refused(tmp_path: Path) -> None:
    for part in ("environment", "tests", "solution"):
        path = harbor(tmp_path / part)
        (path / part / "link").symlink_to("/etc/passwd" if part != "environment" else "../solution")
        with pytest.raises(folder.TaskError, match="a link to a place outside"):
            folder.read(path)


def test_a_pipe_is_no_part_of_a_task(tmp_path: Path) -> None:
    import os

    path = harbor(tmp_path / "task")
    os.mkfifo(path / "environment" / "pipe")
    with pytest.raises(folder.TaskError, match="neither a file nor a link"):
        folder.read(path)


def test_tasks_in_quarantine_are_not_read(tmp_path: Path) -> None:
    for name in ("one", "two"):
        harbor(tmp_path / name)
    (tmp_path / folder.QUARANTINE).write_text('{"one": "flaky"}')
    assert [task.id for task in folder.read_all(tmp_path)] == ["two"]
    assert len(folder.folders(tmp_path, quarantined=True)) == 2
    (tmp_path / folder.QUARANTINE).write_text('{"one": "flaky", "two": "hackable"}')
    with pytest.raises(folder.TaskError, match="in quarantine"):
        folder.read_all(tmp_path)
