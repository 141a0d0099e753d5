"""One process of each role of a real run is stopped with SIGSTOP: it lives, and hangs. The launcher says so, starts it
again, and the run comes to its end with right books."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from stretto.bench.chaos import Run, Witness, account
from stretto.watch.metrics import read

from .test_chaos import TINY

TOGETHER = ("cluster-0-follower", "cluster-1-engine", "worker-0", "trainer")


def test_ASY_14_a_hung_process_of_every_role_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    words = [*TINY, "trainer.steps=12", "launch.silent_seconds=3", "launch.clusters=2"]
    command = [sys.executable, "-m", "stretto.cli", "train", "--name", "x", *words]
    run = Run(tmp_path / "runs" / "x")
    witness = Witness(run.folder)
    with (tmp_path / "log").open("w+") as output:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 240

            def wait(condition) -> None:
                while process.poll() is None and not condition():
                    assert time.monotonic() < end, (run.folder / "metrics.jsonl").read_text()[-2000:]
                    witness.progress()
                    time.sleep(0.1)

            wait(lambda: witness.training)
            wait(lambda: _version(run.folder) >= 2)
            for names in (TOGETHER, ("orchestrator",)):
                for name in names:
                    os.kill(witness.children()[name]["pid"], signal.SIGSTOP)
                wait(lambda names=names: _named(run.folder) >= set(names))
            run.code = process.wait(max(1.0, end - time.monotonic()))
        finally:
            process.kill()
            process.wait()
            output.seek(0)
            run.said = output.read()[-2000:]
    run.left = witness.left()
    assert run.code == 0, run.said
    assert _named(run.folder) >= {*TOGETHER, "orchestrator"}
    books = account(run)
    assert books["unaccounted"] == books["trained_twice"] == 0 and run.left == []


def _named(run: Path) -> set[str]:
    lines = [str(line["text"]) for line in read(run / "metrics.jsonl") if line["kind"] == "event"]
    said = "though its process lives; it was killed and is started again"
    return {text.partition(" ")[0] for text in lines if said in text}


def _version(run: Path) -> int:
    return max((line["version"] for line in read(run / "metrics.jsonl") if line["kind"] == "step"), default=-1)
