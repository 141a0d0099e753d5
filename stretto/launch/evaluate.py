"""`stretto eval`: a checkpoint, or an engine that already serves, against tasks. An orchestrator, a worker, an engine.

The rollouts are made exactly as in training, by the same services; nothing is trained and nothing published.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from stretto.config import Config, load
from stretto.engine.fit import fitting, whole
from stretto.grading.oracle import try_references
from stretto.launch import run_folder
from stretto.launch.client import Evaluation, Orchestrator, Unanswered, ask
from stretto.launch.local import Child, LaunchError, Processes, free_port, service
from stretto.launch.train import interruptible
from stretto.records import EngineStatus, Task
from stretto.sandbox import check
from stretto.tasks import folder, repair
from stretto.watch import statistics

SPLIT = "heldout"


def evaluate(
    model: str,
    tasks: str,
    split: str,
    count: int,
    attempts: int,
    temperature: float,
    overrides: list[str],
    console: Console,
) -> dict[str, Any]:
    """Solve rate of `model` (checkpoint folder, `nano`, or an engine's URL) with its interval, and how it worked.

    `tasks` is `repair` (then `split` and `count` of them are generated) or a folder of task folders.
    """
    check.require()
    remote = "://" in model
    here = ["run.name=eval", "launch.clusters=1", *([] if remote else [f"model.path={model}"])]
    config = load("quickstart", [*here, *overrides])
    if not any(word.partition("=")[0].strip() == "run.name" for word in overrides):
        config = load("quickstart", [*here, f"run.name={_free_name(config.run.root)}", *overrides])
    # mistakes in what was given are found before there is a run
    if remote:
        _health(model)
    else:
        fitting(config.model.folder, config.engine)
        whole(config.model.folder)
    found = _tasks(tasks, split, count, config.run.seed)
    if tasks != "repair":
        asyncio.run(try_references(found, config.grading, config.sandbox))
    run = run_folder.create(config)
    for task in found:
        folder.write(task, run / "tasks" / SPLIT)
    processes = Processes(run, config.launch.start_seconds)
    with run_folder.locked(run), interruptible():
        try:
            orchestrator = _start(processes, config, run, model if remote else None)
            result = _wait(processes, orchestrator, Evaluation("evaluation", SPLIT, attempts, temperature), console)
        finally:
            processes.stop()
    values = statistics.rates(result)
    return {
        "model": model,
        "tasks": len(values),
        "attempts": attempts,
        "temperature": temperature,
        "solve_rate": statistics.mean(values),
        "ci95": statistics.interval(values),
        "pass_at_4": statistics.pass_at(4, result),
        "behaviour": result.get("behaviour", {}),
        "outcomes": result.get("outcomes", {}),
        "run": str(run),
    }


def show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    low, high = result["ci95"]
    print(
        f"{result['model']}: {result['solve_rate']:.1%} solved [{low:.1%}, {high:.1%}], "
        f"{result['tasks']} tasks × {result['attempts']} attempts at temperature {result['temperature']:g}"
    )
    if result["pass_at_4"] is not None:
        print(f"  pass@4     {result['pass_at_4']:.1%}")
    print(f"  outcomes   {', '.join(f'{name} {count}' for name, count in result['outcomes'].items())}")
    print(f"  behaviour  {', '.join(f'{name} {value:.2f}' for name, value in result['behaviour'].items())}")
    print(f"  rollouts   {result['run']}/store/rollouts/")


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
