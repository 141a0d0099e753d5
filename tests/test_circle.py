"""The whole circle as a user turns it: every service as a real process, two clusters of which one joins late, a report
at the end; and the same with a trainer that is killed with -9 on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from stretto.watch.metrics import read

TINY = [
    "rollouts.groups_per_step=2",
    "rollouts.group_size=4",
    "rollouts.concurrency=16",
    "tasks.train=20",
    "eval.attempts=1",
    "eval.every=0",
    "engine.slots=16",
]
RATE = {"before", "after", "gain", "ci95", "tasks"}
KEYS = {
    "solve_rate": RATE,
    "solve_rate_greedy": {"before", "after", "gain"},
    "solve_rate_new_templates": {"before", "after", "gain"},
    "staleness": {"mean", "max", "bound", "max_over_bound"},
    "idle": {"trainer", "engine"},
    "weights": {"versions", "bytes_full", "bytes_delta_median", "ratio_median", "pause_s_p50"},
    "mismatch": {"k3", "k3_without_replay", "disagreement"},
}


def stretto(root: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stretto.cli", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=root, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def end(process: subprocess.Popen[str], seconds: float = 300.0) -> str:
    """What it said until its end; a run that does not end is interrupted as with Ctrl-C."""
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)


def processes(root: Path) -> list[str]:
    """Command lines of processes that work on a run below `root`."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(root) in line or (process.info["cwd"] or "").startswith(str(root)):
            found.append(line)
    return found


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read(run / "metrics.jsonl") if line["kind"] == kind]


def test_a_run_from_configuration_to_report(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    more = [f"run.root={run.parent}", "trainer.steps=2", "trainer.mismatch_every=1", "launch.late_join_version=1"]
    more += ["tasks.heldout=4", "tasks.new_templates=2", "launch.clusters=2"]
    process = stretto(tmp_path, "train", "--name", "x", *TINY, *more)
    said = end(process)
    assert process.returncode == 0, said
    assert processes(tmp_path) == []

    tree = json.loads((run / "summary.json").read_text())
    assert {"wall_s", "steps", "rollouts", "outcomes"} <= set(tree)
    for name, keys in KEYS.items():
        assert keys <= set(tree[name]), name
        assert all(tree[name][key] is not None for key in keys), (name, tree[name])
    assert tree["steps"] == 2 and tree["rollouts"] >= 16 and sum(tree["outcomes"].values()) == tree["rollouts"]
    assert tree["solve_rate"]["tasks"] == 4 and tree["solve_rate_new_templates"]["tasks"] == 2
    assert tree["staleness"]["max_over_bound"] <= 0
    assert (
        tree["weights"]["versions"] == 3 and 0 < tree["weights"]["bytes_delta_median"] < tree["weights"]["bytes_full"]
    )
    assert tree["mismatch"]["k3"] < 1e-6
    late = tree["clusters"]["cluster-1"]
    assert late["first_version"] >= 1 and late["rollouts"] > 0
    assert (run / "report.html").stat().st_size > 10_000 and "report.html" in said
    assert "without a batch" not in said and "Traceback" not in said and len(said.splitlines()) < 60


def test_ASY_14_a_killed_trainer_is_named_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    """Where nothing is started again. Without held-out tasks, so that this also is a run with nothing to evaluate."""
    run = tmp_path / "runs" / "x"
    more = ["trainer.steps=99", "trainer.checkpoint_every=1", "tasks.heldout=0", "tasks.new_templates=0"]
    more += ["launch.restarts=0"]
    process = stretto(tmp_path, "train", "--name", "x", *TINY, *more, "launch.clusters=1")
    try:
        deadline = time.monotonic() + 300
        while len(of_kind(run, "step")) < 2:
            assert process.poll() is None and time.monotonic() < deadline, "no step was made"
            time.sleep(0.1)
        assert len(processes(tmp_path)) >= 6  # launcher, orchestrator, trainer, worker, engine, follower
        said = json.loads(end(stretto(tmp_path, "status", "x", "--json")))
        roles = {process["role"] for process in said["processes"].values()}
        assert roles == {"orchestrator", "trainer", "worker", "engine", "follower"} and said["running"]
        assert {process["health"] for process in said["processes"].values()} == {"ready"}, said["processes"]
        assert all(process["answered_seconds_ago"] < 60 for process in said["processes"].values())
        assert said["ledger"]["ordinals"]["opened"] >= 4 and said["orchestrator"]["flowing"]
        pid = said["processes"]["trainer"]["pid"]
        os.kill(pid, signal.SIGKILL)
    finally:
        said = end(process, seconds=120.0)
    assert process.returncode == 1, said
    assert "trainer was killed by SIGKILL" in said and "stretto resume x" in said, said
    assert "no tasks are held out, so nothing is evaluated" in said
    assert processes(tmp_path) == []

    steps = len(of_kind(run, "step")) + 2  # some more were made before the kill
    process = stretto(tmp_path, "resume", "x", f"trainer.steps={steps}")
    said = end(process)
    assert process.returncode == 0, said
    tree = json.loads((run / "summary.json").read_text())
    assert tree["steps"] == tree["version"] == steps and tree["staleness"]["max_over_bound"] <= 0
    assert tree["solve_rate"]["before"] is None and (run / "report.html").is_file()
    assert not [line for line in of_kind(run, "event") if "dropped" in line["text"]]
    assert processes(tmp_path) == []
