"""The runs of `stretto bench loop`: each a `stretto train`, a `stretto eval` of its last checkpoint, or TRL, in a
process of its own and a folder that is deleted when its numbers are taken."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.watch import metrics, summary

GROUPS, GROUP = 4, 8
COMMON = [
    "tasks.heldout=0",
    "tasks.new_templates=0",
    "eval.every=0",
    "trainer.mismatch_every=0",
    "trainer.checkpoint_every=1000000",
    "trainer.decay_steps=0",
    "launch.clusters=1",
    "launch.late_join_version=0",
    "launch.start_seconds=600",
    "rollouts.deadline_seconds=600",
    "rollouts.concurrency=64",
    f"rollouts.groups_per_step={GROUPS}",
    f"rollouts.group_size={GROUP}",
]
"""Of all runs. 64 rollouts in flight are twice a step's: more of them only compete for the two cores."""
HELD_OUT, ATTEMPTS = 64, 2
RUN_SECONDS = 1800.0


@dataclass(frozen=True)
class Setting:
    name: str
    bound: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One run. `seconds` of training; idle shares are of these, `later_idle` of the time after the first step."""

    table: str
    setting: str
    bound: int
    seed: int
    seconds: float
    samples: int
    trainer_idle: float
    later_idle: float
    engine_idle: float
    staleness_mean: float
    staleness_max: int
    solve_rate: float
    solve_rate_se: float
    ends: list[float] = field(default_factory=list)  # of the steps, seconds since training began
    solved: list[float] = field(default_factory=list)  # share of each step's rollouts


class Runs:
    """Of one `stretto bench loop`, in the folder `place`."""

    def __init__(self, place: Path, held_out: int = HELD_OUT) -> None:
        self.place, self.held_out = place, held_out

    def words(self, model: Path, seed: int, steps: int, extra: Sequence[str] = ()) -> list[str]:
        """Overrides of the shipped configuration."""
        tasks = max(200, 2 * GROUPS * (steps + 10))
        own = [f"model.path={model}", f"run.seed={seed}", f"trainer.steps={steps}", f"tasks.train={tasks}"]
        return [*COMMON, *own, *extra]

    def train(self, table: str, setting: Setting, model: Path, seed: int, words: Sequence[str], steps: int) -> Row:
        """One run and its solve rate."""
        name = "run"
        run = self.place / "runs" / name
        bound = f"rollouts.max_staleness={setting.bound}"
        words = [*self.words(model, seed, steps, words), *setting.words, bound]
        _stretto(self.place, ["train", "quickstart", "--name", name, *words])
        lines = metrics.read(run / "metrics.jsonl")
        tree = json.loads((run / "summary.json").read_text())
        if tree["steps"] != steps:
            raise RuntimeError(f"{setting.name}, seed {seed}, made {tree['steps']} of {steps} steps")
        rate, se = self._solve_rate(run, seed)
        shutil.rmtree(run)
        start = summary.training_spans(lines)[0][0]
        taken = summary.last_of_version(summary.of_kind(lines, "step"))
        ends = [step["time"] - start for step in taken]
        waits = sum(step["seconds"]["wait"] for step in taken[1:])
        return Row(
            table=table,
            setting=setting.name,
            bound=setting.bound,
            seed=seed,
            seconds=round(tree["train_s"], 2),
            samples=steps * GROUPS * GROUP,
            trainer_idle=round(tree["idle"]["trainer"], 4),
            later_idle=round(waits / (ends[-1] - ends[0]), 4) if steps > 1 else 0.0,
            engine_idle=round(tree["idle"]["engine"], 4),
            staleness_mean=round(tree["staleness"]["mean"], 2),
            staleness_max=tree["staleness"]["max"],
            solve_rate=rate,
            solve_rate_se=round(se, 4),
            ends=[round(end, 2) for end in ends],
            solved=[round(step["solve_rate"], 4) for step in taken],
        )

    def _solve_rate(self, run: Path, seed: int) -> tuple[float, float]:
        """Of the last checkpoint on held-out tasks, the same for all runs of a seed, and its standard error."""
        checkpoint = max((run / "checkpoints").glob("v*"))
        words = ["eval", str(checkpoint), "--count", str(self.held_out), "--attempts", str(ATTEMPTS), "--json"]
        said = _stretto(self.place, [*words, f"run.seed={1000 + seed}", "launch.start_seconds=600"])
        tree = json.loads(said[said.index("{") :])
        shutil.rmtree(self.place / "runs" / Path(tree["run"]).name)
        low, high = tree["ci95"]
        return tree["solve_rate"], (high - low) / 2 / 1.96

    def trl(self, words: Sequence[str], threads: int) -> dict[str, Any]:
        """TRL's GRPOTrainer on these words, in a process with so many threads."""
        out = self.place / "trl.json"
        command = ["-m", "stretto.bench.grpo_trl", *words, "--threads", str(threads), "--out", str(out)]
        _run(self.place, command, f"TRL with {threads} threads", {"OMP_NUM_THREADS": str(threads)})
        return json.loads(out.read_text())


def trl_is_here() -> bool:
    return importlib.util.find_spec("trl") is not None


def _stretto(place: Path, words: list[str]) -> str:
    return _run(place, ["-m", "stretto.cli", *words], f"`stretto {words[0]}`", {})


def _run(place: Path, words: list[str], what: str, environment: dict[str, str]) -> str:
    """One command to its end; what it printed. Raises RuntimeError with its last words when it failed."""
    with (place / "out").open("w+") as out, (place / "err").open("w+") as err:
        command = [sys.executable, *words]
        code = _wait(subprocess.Popen(command, cwd=place, stdout=out, stderr=err, env={**os.environ, **environment}))
        out.seek(0)
        err.seek(0)
        said, complained = out.read(), err.read()
    if code != 0:
        raise RuntimeError(f"{what} ended with exit code {code}:\n{(said + complained)[-2000:]}")
    return said


def _wait(process: subprocess.Popen[Any]) -> int:
    try:
        return process.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"a run has not ended within {RUN_SECONDS:g} s") from error
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()
