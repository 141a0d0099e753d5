"""A run's folder: never overwritten, never used twice at once, and opened again with what it was made with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.config import Config, ConfigError, load, parse
from stretto.launch import run_folder
from stretto.launch.run_folder import RunError
from stretto.records import Task
from stretto.tasks import folder


def config(root: Path, **tasks: object) -> Config:
    return parse(
        {"run": {"name": "a", "root": str(root)}, "tasks": {"train": 3, "heldout": 2, "new_templates": 0, **tasks}}
    )


def test_an_existing_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run = run_folder.create(config(tmp_path))
    assert load(run / "config.toml") == config(tmp_path)
    (tmp_path / "a-2").mkdir()
    with pytest.raises(RunError, match=r"holds a run already.*resume .*--name a-3"):
        run_folder.create(config(tmp_path))


def test_a_root_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*set run\.root"):
        run_folder.create(config(tmp_path / "file"))
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may write everywhere
    try:
        with pytest.raises(RunError, match=r"cannot write to .*Permission denied; set run\.root"):
            run_folder.create(config(closed))
    finally:
        os.seteuid(user)


def test_too_little_space_is_a_sentence_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "FREE_BYTES", 2**60)
    with pytest.raises(RunError, match="MB are free below"):
        run_folder.create(config(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_where_its_next_checkpoint_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, then room made: what a new run would want is not asked of one that goes on."""
    run = run_folder.create(config(tmp_path))
    free = shutil.disk_usage(tmp_path)._replace(free=30 * 2**20)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: free)
    with pytest.raises(RunError, match="a run needs at least 200 MB"):
        run_folder.reopen("a", tmp_path, [])  # it has no checkpoint yet, so nothing is known about its size
    checkpoint = run / "checkpoints" / "v000001" / "resume"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state").write_bytes(bytes(2**20))
    assert run_folder.reopen("a", tmp_path, []).run.name == "a"
    (checkpoint / "state").write_bytes(bytes(8 * 2**20))
    with pytest.raises(RunError, match="only 30 MB are free below .*, a run needs at least 32 MB"):
        run_folder.reopen("a", tmp_path, [])


def test_a_run_is_found_by_name_and_by_folder(tmp_path: Path) -> None:
    run = run_folder.create(config(tmp_path))
    assert run_folder.find("a", tmp_path) == run == run_folder.find(str(run))
    with pytest.raises(RunError, match="there are a"):
        run_folder.find("b", tmp_path)


def test_reopening_applies_what_may_change(tmp_path: Path) -> None:
    run = run_folder.create(config(tmp_path))
    again = run_folder.reopen("a", tmp_path, ["trainer.steps=99"])
    assert again.trainer.steps == 99 and load(run / "config.toml") == again
    for override in ("model.path=x", "tasks.train=5", "run.seed=2"):
        with pytest.raises(RunError, match="cannot change when a run is resumed"):
            run_folder.reopen("a", tmp_path, [override])
    with pytest.raises(ConfigError, match="did you mean"):
        run_folder.reopen("a", tmp_path, ["trainer.stepz=1"])


def test_a_moved_run_is_reopened_where_it_lies(tmp_path: Path) -> None:
    run_folder.create(config(tmp_path / "old"))
    (tmp_path / "old").rename(tmp_path / "new")
    again = run_folder.reopen(str(tmp_path / "new" / "a"), Path("runs"), [])
    assert again.run_dir == tmp_path / "new" / "a"


def test_one_launcher_at_a_time_also_after_a_kill(tmp_path: Path) -> None:
    source = (
        "import sys, time; from pathlib import Path; from stretto.launch.run_folder import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline()
        with pytest.raises(RunError, match=f"in use by process {holder.pid}"), run_folder.locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
    with run_folder.locked(tmp_path):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_tasks_are_laid_once(tmp_path: Path) -> None:
    run = run_folder.create(config(tmp_path))
    run_folder.lay_tasks(config(tmp_path), run)
    assert len(folder.read_all(run / "tasks" / "train")) == 3 and len(folder.read_all(run / "tasks" / "heldout")) == 2
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("task.toml"))
    run_folder.lay_tasks(config(tmp_path), run)
    assert sorted(path.stat().st_mtime_ns for path in run.rglob("task.toml")) == before


def own(root: Path, places: dict[str, str]) -> Path:
    """A folder of tasks: path below `root` -> the split its task.toml says."""
    for path, split in places.items():
        place, _, id = path.rpartition("/")
        task = Task(id=id, split=split, instruction="fix", files={"a.py": ""}, grading={"tests/oracle.json": "{}"})
        folder.write(task, root / place)
    return root


def laid(run: Path) -> dict[str, set[str]]:
    return {split.name: {task.id for task in folder.read_all(split)} for split in (run / "tasks").iterdir()}


def test_held_out_tasks_of_ones_own_are_never_trained_on(tmp_path: Path) -> None:
    """Whoever says it, the folder a task lies in or its task.toml."""
    places = {"a": "", "b": "train", "c": "heldout", "d": "new_templates"}
    places |= {"heldout/e": "", "heldout/f": "train", "train/g": "heldout", "train/h": "", "new_templates/i": ""}
    mine = config(tmp_path, source=str(own(tmp_path / "mine", places)), train=9, heldout=9, new_templates=9)
    run = run_folder.create(mine)
    assert run_folder.sizes(mine, run) == {"train": 3, "heldout": 4, "new_templates": 2}
    run_folder.lay_tasks(mine, run)
    assert laid(run) == {"train": set("abh"), "heldout": set("cefg"), "new_templates": set("di")}
    assert all(task.split == "heldout" for task in folder.read_all(run / "tasks" / "heldout"))
    assert run_folder.sizes(mine, run) == {"train": 3, "heldout": 4, "new_templates": 2}


def test_the_limits_leave_tasks_out_but_move_none(tmp_path: Path) -> None:
    places = {"train/a": "", "train/b": "", "heldout/c": "", "heldout/d": ""}
    mine = config(tmp_path, source=str(own(tmp_path / "mine", places)), train=1, heldout=0)
    run = run_folder.create(mine)
    run_folder.lay_tasks(mine, run)
    assert laid(run) == {"train": {"a"}}


def test_a_folder_without_held_out_tasks_is_enough(tmp_path: Path) -> None:
    mine = parse({"run": {"root": str(tmp_path)}, "tasks": {"source": str(own(tmp_path / "mine", {"a": "", "b": ""}))}})
    run = run_folder.create(mine)
    run_folder.lay_tasks(mine, run)
    assert run_folder.sizes(mine, run) == {"train": 2, "heldout": 0, "new_templates": 0}


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        ({"heldout/a": ""}, "holds no task to train on"),
        ({"a": "test"}, "task a of .* has split 'test'; use train, heldout, new_templates or none"),
        ({"train/a": "", "heldout/a": ""}, "two tasks of .* have the id a"),
        ({}, "no task folder at"),
    ],
)
def test_mistakes_in_ones_own_tasks_are_sentences(tmp_path: Path, places: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run_folder.own_tasks(config(tmp_path, source=str(own(tmp_path / "mine", places))))


def test_the_configuration_of_a_run_is_readable_json_in_toml(tmp_path: Path) -> None:
    run = run_folder.create(config(tmp_path))
    assert f"name = {json.dumps('a')}" in (run / "config.toml").read_text()
