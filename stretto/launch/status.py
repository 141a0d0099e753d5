"""`stretto status RUN`: where a run stands, running or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil

from stretto.launch.client import Orchestrator, Unanswered
from stretto.watch.metrics import read
from stretto.watch.state import RunState


def status(run: Path) -> dict[str, Any]:
    """`running`, `stage`, `version`, …; while it runs, the orchestrator's own status under `orchestrator`."""
    lines = read(run / "metrics.jsonl")
    state = RunState()
    state.absorb(lines)
    stages = [line["name"] for line in lines if line["kind"] == "stage"]
    tree: dict[str, Any] = {
        "run": str(run),
        "running": False,
        "stage": stages[-1] if stages else None,
        "version": state.version,
        "rollouts": state.rollouts,
        "solve_rate": sum(state.solve_rates[-4:]) / len(state.solve_rates[-4:]) if state.solve_rates else None,
        "clusters": {name: cluster.version for name, cluster in sorted(state.clusters.items())},
        "processes": {},
    }
    try:
        pids = json.loads((run / "pids.json").read_text())
    except (OSError, ValueError):
        return tree
    tree["running"] = psutil.pid_exists(pids["launcher"]) and bool(pids["children"])
    tree["processes"] = {
        name: {"pid": child["pid"], "alive": psutil.pid_exists(child["pid"]), "url": child["url"], "log": child["log"]}
        for name, child in pids["children"].items()
    }
    url = pids["children"].get("orchestrator", {}).get("url")
    if tree["running"] and url:
        try:
            tree["orchestrator"] = Orchestrator(url).status(timeout=3.0)
        except Unanswered as error:
            tree["orchestrator"] = {"error": str(error)}
    return tree


def show(tree: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(tree, indent=2))
        return
    rate = "" if tree["solve_rate"] is None else f", solve rate {tree['solve_rate']:.0%}"
    how = f"running, {tree['stage']}" if tree["running"] else "finished" if tree["stage"] == "done" else "not running"
    print(f"{tree['run']}: {how}; version {tree['version']}, {tree['rollouts']:,} rollouts{rate}")
    for name, version in tree["clusters"].items():
        print(f"  {name:<20} serves version {version}")
    for name, child in tree["processes"].items():
        print(f"  {name:<20} pid {child['pid']:<8} {'alive' if child['alive'] else 'dead':<6} {child['url'] or ''}")
    if "orchestrator" in tree:
        said = tree["orchestrator"]
        print(f"  chain {said['chain']}" if said.get("chain") else f"  {said.get('error', '')}".rstrip())
    if not tree["running"] and tree["stage"] != "done":
        run = Path(tree["run"])
        print(f"  go on with: stretto train --resume {run.name if run.parent == Path('runs') else run}")
