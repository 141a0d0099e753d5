"""The whole loop with vLLM as its engine, through the real launcher: rollouts, a step, weights by the chain, a swap."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from stretto.watch.metrics import read

TINY = [
    "engine.backend=vllm",
    "engine.routes=unknown",
    "engine.slots=16",
    "trainer.replay=false",
    "trainer.steps=2",
    "trainer.mismatch_every=1",
    "rollouts.groups_per_step=2",
    "rollouts.group_size=4",
    "rollouts.concurrency=16",
    "tasks.train=20",
    "tasks.heldout=0",
    "tasks.new_templates=0",
    "launch.clusters=1",
    "launch.start_seconds=400",
]


def test_a_run_with_vllm(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    command = [sys.executable, "-m", "stretto.cli", "train", "--name", "x", f"run.root={run.parent}", *TINY]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said = process.communicate(timeout=600)[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
    assert process.returncode == 0, said
    tree = json.loads((run / "summary.json").read_text())
    assert tree["steps"] == 2 and tree["rollouts"] >= 16 and tree["staleness"]["max_over_bound"] <= 0
    assert tree["outcomes"].get("infra", 0) == 0
    assert tree["mismatch"]["k3"] < 1e-6  # the trainer's forward says of vLLM's tokens what vLLM said
    swaps = [line for line in read(run / "metrics.jsonl") if line["kind"] == "swap"]
    assert [swap["version"] for swap in swaps][-1] == 2 and all(swap["pause_s"] > 0 for swap in swaps)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]
    assert not left
