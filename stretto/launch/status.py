"""`stretto status RUN`: where a run stands, running or not.

Three sources: the processes themselves (each is asked now), the ledger (read-only), and metrics.jsonl. What cannot be
asked any more is told from the other two, with the age of what is told.
"""

from __future__ import annotations

import json
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from stretto.launch.client import Unanswered, ask
from stretto.launch.run_folder import RunError
from stretto.rollouts.census import census
from stretto.watch.metrics import read
from stretto.watch.state import RunState

ASK_SECONDS = 3.0
SILENT_SECONDS = {"worker": 10.0, "follower": 10.0, "trainer": 60.0}
"""Whoever has not said anything for so long is called silent; a trainer may compute for long."""


@dataclass(frozen=True)
class Process:
    """One process of the run. `health`: ready, starting (answers, has nothing to serve yet), silent or dead (it is
    started again); one whose job is done, or whose run is over, has ended. `version` is then the last one it had."""

    role: str
    pid: int
    health: str
    version: int | None
    answered_seconds_ago: float | None  # since it last answered, or was heard of
    restarts: int
    url: str | None
    log: str


def status(run: Path) -> dict[str, Any]:
    """`state` (running, finished, stopped, killed or not started), `reason`, `stage`, `version`, `processes`, `ledger`,
    …; while it runs, the orchestrator's own status too. Raises RunError for a folder that holds no run."""
    lines = read(run / "metrics.jsonl")
    state = RunState()
    state.absorb(lines)
    stages = [str(line["name"]) for line in lines if line["kind"] == "stage" and "name" in line]
    launcher, children = _children(run, lines)
    alive = {name: _alive(child.get("pid"), run) for name, child in children.items()}
    running = _alive(launcher) and any(alive.values())
    with ThreadPoolExecutor(8) as pool:  # a process that hangs holds up nobody else
        answers = dict(zip(children, pool.map(_health, children.values(), alive.values()), strict=True))
        orchestrator = _status_of(children.get("orchestrator"), alive.get("orchestrator", False))
    ledger = census(run / "ledger.sqlite")
    damaged = ledger is None and (run / "ledger.sqlite").exists()
    if not lines and (damaged or not _configured(run)):
        raise RunError(f"{run} holds no run that can be read: neither its metrics.jsonl nor its ledger is one of ours")
    heard = _heard(lines, orchestrator)
    tree: dict[str, Any] = {
        "run": str(run),
        "state": _state(running, stages),
        "reason": None if running else _reason(lines),
        "running": running,
        "stage": stages[-1] if stages else None,
        "version": state.version if ledger is None else max(state.version, ledger["version"]),
        "rollouts": state.rollouts,
        "solve_rate": sum(state.solve_rates[-4:]) / len(state.solve_rates[-4:]) if state.solve_rates else None,
        "clusters": {name: cluster.version for name, cluster in sorted(state.clusters.items())},
        "processes": {
            name: asdict(_process(name, child, alive[name], answers[name], heard, state))
            for name, child in children.items()
        },
        "ledger": ledger,
        "ledger_damaged": damaged,
    }
    if not running:
        for process in tree["processes"].values():
            process["health"] = "ended" if process["health"] == "dead" else process["health"]
    if running and orchestrator is not None:
        tree["orchestrator"] = orchestrator
    return tree


def _configured(run: Path) -> bool:
    try:
        tomllib.loads((run / "config.toml").read_text())
    except (OSError, ValueError):
        return False
    return True


def _state(running: bool, stages: list[str]) -> str:
    if running or not stages:
        return "running" if running else "not started"
    ends = {"done": "finished", "stopping": "stopped", "report": "stopped"}
    return ends.get(stages[-1], "killed")  # the launcher had no time to say that it stops


def _reason(lines: list[dict[str, Any]]) -> str | None:
    """Why the last launch ended, where an error ended it."""
    reason = None
    for line in lines:
        if line["kind"] == "stage" and line.get("name") == "starting":
            reason = None
        if line["kind"] == "event" and line.get("final"):
            reason = str(line["text"])
    return reason


def _children(run: Path, lines: list[dict[str, Any]]) -> tuple[int | None, dict[str, dict[str, Any]]]:
    """The launcher's pid and its children by name; those of the last launch when there are none now."""
    try:
        pids = json.loads((run / "pids.json").read_text())
        launcher, children = int(pids["launcher"]), dict(pids["children"])
    except (OSError, ValueError, KeyError, TypeError):
        launcher, children = None, {}
    if not children:
        for line in lines:
            if line["kind"] == "stage" and line.get("name") == "starting":
                children = {}
            if line["kind"] == "service" and line.get("name"):
                children[str(line["name"])] = {**line, "log": str(run / "logs" / f"{line['name']}.log")}
    return launcher, children


def _alive(pid: int | None, run: Path | None = None) -> bool:
    """Whether this process lives, and is not another one that got its number."""
    try:
        process = psutil.Process(pid) if pid else None
        if process is None or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return run is None or "stretto.launch.service" in process.cmdline()
    except psutil.Error:
        return False


def _health(child: dict[str, Any], alive: bool) -> dict[str, Any] | None:
    if not alive or not child.get("url"):
        return None
    try:
        return ask(f"{child['url']}/health", timeout=ASK_SECONDS)
    except Unanswered:
        return None


def _status_of(child: dict[str, Any] | None, alive: bool) -> dict[str, Any] | None:
    if child is None or not alive:
        return None
    try:
        return ask(f"{child['url']}/status", timeout=ASK_SECONDS)
    except Unanswered as error:
        return {"error": str(error)}


def _heard(lines: list[dict[str, Any]], orchestrator: dict[str, Any] | None) -> dict[str, float]:
    """By process: when it was last heard of, unix seconds. Followers count by cluster: `<cluster>-follower`."""
    now = time.time()
    heard = {str(line.get("process")): float(line["time"]) for line in lines}
    said = orchestrator or {}

    def note(name: str, ago: Any) -> None:
        if isinstance(ago, int | float):
            heard[name] = max(heard.get(name, 0.0), now - ago)

    for name, worker in (said.get("workers") or {}).items():
        note(name, worker.get("heard_seconds_ago"))
    note("trainer", said.get("trainer_heard_seconds_ago"))
    for engine in said.get("engines") or []:
        note(f"{engine['cluster']}-follower", engine.get("renewed_seconds_ago"))
    return heard


def _process(
    name: str,
    child: dict[str, Any],
    alive: bool,
    answer: dict[str, Any] | None,
    heard: dict[str, float],
    state: RunState,
) -> Process:
    role = str(child.get("role") or name)
    ago = 0.0 if answer is not None else time.time() - heard[name] if name in heard else None
    if not alive:
        health = "ended" if child.get("finished") else "dead"
    elif child.get("url"):
        health = "silent" if answer is None else "ready" if answer.get("ready") else "starting"
    elif ago is None:
        health = "starting"
    else:
        health = "silent" if ago > SILENT_SECONDS.get(role, 60.0) else "ready"
    cluster = state.clusters.get(str(child.get("cluster")))
    trained = state.version if state.version >= 0 else None
    versions = {
        "trainer": trained,
        "orchestrator": trained,
        "follower": None if cluster is None else cluster.version,
        "engine": None if cluster is None else cluster.version,
    }
    version = answer.get("version") if answer is not None else versions.get(role)
    return Process(
        role=role,
        pid=int(child.get("pid") or 0),
        health=health,
        version=version,
        answered_seconds_ago=None if ago is None else round(ago, 1),
        restarts=int(child.get("restarts") or 0),
        url=child.get("url"),
        log=str(child.get("log") or ""),
    )


def show(tree: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(tree, indent=2))
        return
    rate = "" if tree["solve_rate"] is None else f", solve rate {tree['solve_rate']:.0%}"
    print(f"{tree['run']}: {_how(tree)}; {tree['rollouts']:,} rollouts{rate}")
    if tree["reason"]:
        print(f"  {tree['reason']}")
    for name, child in tree["processes"].items():
        print(f"  {_line(name, child)}".rstrip())
    for name, text in _ledger_lines(tree["ledger"]):
        print(f"  {name:<20} {text}")
    if tree["ledger_damaged"]:
        print(f"  {'ledger':<20} {tree['run']}/ledger.sqlite is damaged: it cannot be read")
    said = tree.get("orchestrator") or {}
    if said.get("chain"):
        print(f"  {'chain':<20} {said['chain']}")
    for key in ("stall", "error"):
        if said.get(key):
            print(f"  {said[key]}")
    if tree["state"] in ("stopped", "killed"):
        run = Path(tree["run"])
        print(f"  go on with: stretto resume {run.name if run.parent == Path('runs') else run}")


def _how(tree: dict[str, Any]) -> str:
    at = f"at version {tree['version']}" if tree["version"] >= 0 else "before there was a version"
    return {
        "running": f"running, {tree['stage']}, {at}",
        "finished": f"finished {at}",
        "stopped": f"stopped {at}",
        "killed": f"its launcher was killed {at}",
        "not started": "has not been started",
    }[tree["state"]]


def _line(name: str, child: dict[str, Any]) -> str:
    if child["health"] == "ended":
        return f"{name:<20} ended" + ("" if child["version"] is None else f", last at version {child['version']}")
    ago = child["answered_seconds_ago"]
    heard = "" if ago is None else "answers" if ago == 0 else f"heard of {ago:,.0f} s ago"
    version = "" if child["version"] is None else f"version {child['version']}"
    again = f"{child['restarts']} restarts" if child["restarts"] else ""
    words = (child["health"], version, heard, again, child["url"] or "")
    return f"{name:<20} pid {child['pid']:<8} {words[0]:<9} {', '.join(word for word in words[1:] if word)}"


def _ledger_lines(ledger: dict[str, Any] | None) -> list[tuple[str, str]]:
    if ledger is None:
        return []
    ordinals, leases = ledger["ordinals"], ledger["leases"]
    dropped = {f"dropped ({reason})": count for reason, count in ordinals["dropped"].items()}
    prompts = {state: ordinals[state] for state in ("open", "ready", "batched", "trained")} | dropped
    granted = {state: leases[state] for state in ("out", "answered", "not needed")}
    granted |= {f"lapsed ({reason})": count for reason, count in leases["lapsed_by_reason"].items()}
    granted |= {"moved to another engine": leases["moved"]}
    return [
        ("prompts", f"{ordinals['opened']:,} opened: {_words(prompts)}"),
        ("leases", f"{leases['granted']:,} granted: {_words(granted)}"),
        ("receipts", _words(ledger["receipts"]) or "none"),
        ("batches", f"{ledger['batches']['cut']} cut, {ledger['batches']['trained']} trained"),
    ]


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
