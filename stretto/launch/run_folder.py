"""A run's folder: made new, or opened again to go on; locked while a launcher uses it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from stretto.config import Config, ConfigError, dump, load_run
from stretto.harness import client, declare
from stretto.records import Task
from stretto.sandbox import backends
from stretto.tasks import folder
from stretto.tasks.mixture import read_recipe
from stretto.tasks.repair import write_splits
from stretto.weights.store import PARTIAL

TRAIN = "train"
HELD = ("heldout", "new_templates")
SPLITS = (TRAIN, *HELD)
FREE_BYTES = 200 * 2**20
"""Free space a new run must find; one of a small model that goes on needs less."""
ROLLOUT_BYTES = 16 * 2**20
FIXED = ("run", "model", "tasks", "harness")
"""Sections that a resumed run keeps: other values would make it another run."""


class RunError(ValueError):
    """A sentence for the user: what is wrong with this run folder, and what to do instead."""


def create(config: Config) -> Path:
    """Make `runs/<name>/` with config.toml. Raises RunError when it exists or cannot be written."""
    run = config.run_dir
    try:
        there = run.exists() and any(run.iterdir())
        _check_space(next(folder for folder in (run, *run.absolute().parents) if folder.exists()), FREE_BYTES)
    except OSError as error:
        raise _unusable(run, error) from error
    if there:
        name = config.run.name if config.run.root == Path("runs") else run
        raise RunError(
            f"{run} holds a run already; go on with it: stretto resume {name}, "
            f"or take another name: --name {_free_name(config)}"
        )
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.toml").write_text(dump(config))
    except OSError as error:
        raise _unusable(run, error) from error
    return run


def reopen(name: str, root: Path, overrides: list[str]) -> Config:
    """The configuration of an existing run, `overrides` applied and written back."""
    run = find(name, root)
    for override in overrides:
        if override.partition(".")[0] in FIXED:
            raise RunError(
                f"{override.partition('=')[0]} cannot change when a run is resumed; start another with --name"
            )
    config = load_run(run, overrides)
    _check_space(run, _to_go_on(run))
    with locked(run):
        temporary = run / "config.toml.new"
        temporary.write_text(dump(config))
        temporary.replace(run / "config.toml")
    return config


def find(name: str, root: Path = Path("runs")) -> Path:
    """The folder of a run given by name or path; RunError names those there are."""
    for path in (root / name, Path(name)):
        if (path / "config.toml").is_file():
            return path
    names = sorted(p.parent.name for p in root.glob("*/config.toml"))
    have = f"there are {', '.join(names)}" if names else "there are none yet"
    raise RunError(f"no run named {name!r} in {root}/: {have}")


def own_tasks(config: Config) -> dict[str, list[Task]]:
    """The tasks of the folder `tasks.source` by split, at most as many as `tasks.train`, … say; {} for a generator.

    A task is held out when it lies under `heldout/` or `new_templates/`, or when its task.toml says so; all others are
    trained on. Raises ConfigError and TaskError with a sentence.
    """
    if config.tasks.source == "repair":
        demand_tools(config, [])
        return {}
    source = Path(config.tasks.source)
    found: dict[str, list[Task]] = {split: [] for split in SPLITS}
    names: set[str] = set()
    for place, task in _read_source(source):
        if task.split not in ("", *SPLITS):
            raise ConfigError(f"task {task.id} of {source} has split {task.split!r}; use {', '.join(SPLITS)} or none")
        name = folder.name(task)
        if name in names:
            raise ConfigError(
                f"two tasks of {source} have the id {task.id}: ids must be unique, in all splits together"
            )
        names.add(name)
        split = place if place in HELD else task.split or TRAIN
        found[split].append(msgspec.structs.replace(task, split=split))
    if not found[TRAIN]:
        raise ConfigError(f"tasks.source {source} holds no task to train on: all of its tasks are held out")
    taken = {split: tasks[: getattr(config.tasks, split)] for split, tasks in found.items()}
    demand_tools(config, [task for tasks in taken.values() for task in tasks])
    return taken


def demand_tools(config: Config, tasks: Iterable[Task]) -> None:
    """ToolSetError for a client, or a task whose tools, are declared wrongly, ValueError where the sandbox can't hold
    them."""
    if config.harness.client:
        client.load(config.harness.client)
        backends.demand(config.sandbox, client.NEEDS, f"the client {config.harness.client}")
        return
    for task in tasks:
        toolset = declare.of(task, config.harness.tools)
        backends.demand(config.sandbox, toolset.needs, f"the tool set {toolset.name} of task {task.id}")


def lay_tasks(config: Config, run: Path, own: dict[str, list[Task]] | None = None) -> None:
    """Write `tasks/<split>/…` once: `own` (read again when it is not given), or generated ones."""
    target = run / "tasks"
    if target.is_dir():
        return
    partial = run / "tasks.partial"
    shutil.rmtree(partial, ignore_errors=True)
    own = own or own_tasks(config)
    if not own:
        write_splits(config.tasks, partial, config.run.seed)
    for split, tasks in own.items():
        for task in tasks:
            folder.write(task, partial / split)
    partial.rename(target)


def sizes(config: Config, run: Path) -> dict[str, int]:
    """Tasks by split: those that were laid, or those that will be."""
    root = run / "tasks"
    if not root.is_dir():
        return planned(config)
    return {split: len(list((root / split).glob("*/task.toml"))) for split in SPLITS}


def planned(config: Config) -> dict[str, int]:
    """Tasks by split that a new run will have."""
    own = own_tasks(config)
    return {split: len(own[split]) if own else getattr(config.tasks, split) for split in SPLITS}


def sweep(config: Config) -> None:
    """Remove what killed processes were still writing; only while none of them lives."""
    for path in unfinished(config.run_dir, config.store_url):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def unfinished(run: Path, store: str) -> list[Path]:
    """Files and folders that got no name yet: everybody writes beside and renames."""
    places = [run / "checkpoints", *(run / "cache").glob("*")]
    if "://" not in store:
        places.append(Path(store) / PARTIAL)
    return sorted(path for place in places for path in place.glob(".*"))


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run for this process; the lock goes when the process does, however it ends."""
    with (run / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunError(f"{run} is in use by process {file.read().strip() or '?'}; stop that one first") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _read_source(source: Path) -> Iterator[tuple[str, Task]]:
    """Tasks with the split of the folder they lie in, "" for those that lie in `source` itself."""
    if source.suffix == ".toml":
        recipe = read_recipe(source)
        for name in recipe.sources:
            yield from ((place, recipe.marked(task, name)) for place, task in _read_source(recipe.folder(name)))
        return
    nested = [split for split in SPLITS if (source / split).is_dir() and not (source / split / "task.toml").exists()]
    for split in nested:
        yield from ((split, task) for task in folder.read_all(source / split))
    if not nested or any(source.glob("*/task.toml")):
        yield from (("", task) for task in folder.read_all(source))


def _unusable(run: Path, error: OSError) -> RunError:
    return RunError(f"cannot write to {run}: {error.strerror}; set run.root to a folder of yours")


def _check_space(run: Path, needed: int) -> None:
    free = shutil.disk_usage(run).free
    if free < needed:
        raise RunError(
            f"only {free >> 20} MB are free below {run}, a run needs at least {needed >> 20} MB; "
            f"make room, or set run.root to another disk"
        )


def _to_go_on(run: Path) -> int:
    """Bytes a run needs to go on: a checkpoint is written before an old one goes, and some rollouts and versions lie
    between two. Its own size says what that is; a run of a small model can go on where a new one could not start."""
    sizes = [sum(file.stat().st_size for file in path.rglob("*")) for path in (run / "checkpoints").glob("v*")]
    return 2 * max(sizes) + ROLLOUT_BYTES if sizes else FREE_BYTES


def _free_name(config: Config) -> str:
    number = 2
    while (config.run.root / f"{config.run.name}-{number}").exists():
        number += 1
    return f"{config.run.name}-{number}"
