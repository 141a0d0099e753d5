"""`stretto eval`: a checkpoint, an engine that already serves, or any OpenAI-compatible endpoint, against tasks.

For the first two, rollouts are made exactly as in training, by an orchestrator, a worker and an engine; nothing is
trained and nothing published. An endpoint's model talks in messages instead (`endpoint.py`).

Each attempt is counted twice. Strictly: handed in, graded, right, and no detector voided it; that is what training
rewards. Permissively: what it left behind passes, handed in or not, whatever a detector says. Their difference is
what a lenient harness would add to a score.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from stretto.config import Config, load
from stretto.engine.fit import fitting, whole
from stretto.grading.oracle import try_references
from stretto.launch import endpoint, run_folder
from stretto.launch.client import Evaluation, Orchestrator, Unanswered, ask
from stretto.launch.local import Child, LaunchError, Processes, free_port, service
from stretto.launch.scores import scores
from stretto.launch.train import interruptible
from stretto.records import EngineStatus, Outcome, Rollout, Task, decode
from stretto.sandbox import check
from stretto.tasks import folder, repair
from stretto.weights.store import Store

SPLIT = "heldout"
NAME = "evaluation"
"""Of the evaluation, which is its rollouts' purpose."""


def evaluate(
    model: str,
    tasks: str,
    split: str,
    count: int,
    attempts: int,
    temperature: float,
    overrides: list[str],
    console: Console,
    served: str = "",
) -> dict[str, Any]:
    """Solve rate of `model` (checkpoint folder, `nano`, or a URL, where `served` may name one of several models) with
    its interval, strict and permissive, and how it worked.

    `tasks` is `repair` (then `split` and `count` of them are generated) or a folder of task folders.
    """
    remote = "://" in model
    foreign = remote and (bool(served) or not _ours(model))
    here = ["run.name=eval", "launch.clusters=1", *([] if remote else [f"model.path={model}"])]
    here += endpoint.ROOMY if foreign else []
    config = load("quickstart", [*here, *overrides])
    if not any(word.partition("=")[0].strip() == "run.name" for word in overrides):
        config = load("quickstart", [*here, f"run.name={_free_name(config.run.root)}", *overrides])
    check.require(config.sandbox.backend)
    # mistakes in what was given are found before there is a run
    url, name = endpoint.found(model, served) if foreign else (model, "")
    if remote and not foreign:
        _health(model)
    elif not remote:
        fitting(config.model.folder, config.engine)
        whole(config.model.folder)
    found = _tasks(tasks, split, count, config.run.seed)
    run_folder.demand_tools(config, found)
    if tasks != "repair":
        asyncio.run(try_references(found, config.grading, config.sandbox))
    run = run_folder.create(config)
    for task in found:
        folder.write(task, run / "tasks" / SPLIT)
    with run_folder.locked(run), interruptible():
        if foreign:
            with console.status("starting") as line:
                result = endpoint.evaluate(
                    config, found, url, name, attempts, temperature, lambda n, of: line.update(f"{n} of {of} rollouts")
                )
        else:
            asked = Evaluation(NAME, SPLIT, attempts, temperature)
            result = _served(config, run, model if remote else None, asked, console)
            result["agreed"] = _agreed(config, result["ids"])
    return {
        "model": f"{url} {name}".strip(),
        "tasks": sum(tries > 0 for tries in result["valid"]),
        "attempts": attempts,
        "temperature": temperature,
        **scores(result),
        "behaviour": result.get("behaviour", {}),
        "outcomes": result.get("outcomes", {}),
        "run": str(run),
    }


def _served(config: Config, run: Path, url: str | None, evaluation: Evaluation, console: Console) -> dict[str, Any]:
    """The counts, with rollouts made by the services of training."""
    processes = Processes(run, config.launch.start_seconds)
    try:
        return _wait(processes, _start(processes, config, run, url), evaluation, console)
    finally:
        processes.stop()


def _agreed(config: Config, ids: list[str]) -> list[int]:
    """How many rollouts of each task left behind what passes; told by their payloads."""
    store, counts = Store(config.store_url), Counter[str]()
    for key in store.list("rollouts/"):
        rollout = decode(store.get(key), Rollout)
        counts[rollout.task] += rollout.purpose == NAME and rollout.agreed and rollout.outcome is not Outcome.INFRA
    return [counts[id] for id in ids]


def _start(processes: Processes, config: Config, run: Path, engine_url: str | None) -> Orchestrator:
    host = config.launch.host

    def start(child: str, role: str, flags: dict[str, Any], listens: bool, threads: int = 1) -> Child:
        port = free_port(host) if listens else 0
        at = {"host": host, "port": port} if listens else {}
        url = f"http://{host}:{port}" if listens else None
        return processes.start(child, service(role, run=run, **flags, **at), url, threads, role=role)

    child = start("orchestrator", "orchestrator", {}, listens=True)
    children = [child]
    if engine_url is None:
        flags = {"name": "engine", "model": config.model.folder, "version": 0}
        engine = start("engine", "engine", flags, listens=True, threads=config.engine.threads)
        children.append(engine)
        engine_url = str(engine.url)
    processes.wait_ready(children)
    orchestrator = Orchestrator(str(child.url))
    health = _health(engine_url)
    version = health["version"]
    orchestrator.pause()
    orchestrator.version(version, "")
    fingerprint = str(health.get("fingerprint", ""))
    orchestrator.engine(EngineStatus(url=engine_url, cluster="evaluated", version=version, fingerprint=fingerprint))
    for index in range(config.rollouts.workers):
        name = f"worker-{index}"
        start(name, "worker", {"name": name, "orchestrator": orchestrator.url}, listens=False)
    return orchestrator


def _wait(processes: Processes, orchestrator: Orchestrator, evaluation: Evaluation, console: Console) -> dict[str, Any]:
    id = orchestrator.evaluate(evaluation)
    moved, finished = time.monotonic(), -1
    with console.status("starting") as line:
        while True:
            processes.check()
            answer = orchestrator.evaluation(id)
            if answer["done"]:
                return answer
            if answer["finished"] != finished:
                finished, moved = answer["finished"], time.monotonic()
                line.update(f"{finished} of {answer['total']} rollouts")
            elif time.monotonic() - moved > 300:
                raise LaunchError(f"no rollout has ended for 300 s; the logs are in {processes.run / 'logs'}")
            time.sleep(0.2)


def _ours(url: str) -> bool:
    """Whether an engine of ours answers there."""
    try:
        return ask(f"{url}/health").get("role") == "engine"
    except (Unanswered, ValueError):
        return False


def _health(engine_url: str) -> dict[str, Any]:
    """What an engine says of itself; LaunchError when there is none at this URL, or it has no weights."""
    try:
        health = ask(f"{engine_url}/health")
    except (Unanswered, ValueError) as error:  # ValueError: no URL that can be opened
        raise LaunchError(f"there is no engine of ours at {engine_url}: {error}") from error
    if health.get("role") != "engine":
        raise LaunchError(f"{engine_url} is no engine of ours: give the URL that `stretto serve` prints")
    if health.get("version") is None:
        raise LaunchError(f"{engine_url} serves no version yet: it cannot be evaluated")
    return health


def _tasks(tasks: str, split: str, count: int, seed: int) -> list[Task]:
    if tasks == "repair":
        return [made.task for made in itertools.islice(repair.generate(split, seed), count)]
    return folder.read_all(Path(tasks))


def _free_name(root: Path) -> str:
    numbers = itertools.count(1)
    return next(name for name in (f"eval-{n}" for n in numbers) if not (root / name).exists())
