"""`stretto bench loop`: how much time asynchrony saves, on the same work, and what it costs in solve rate.

Real runs (`stretto train`) in a temporary folder, one after the other: the same tasks in the same order, the same
number of trained groups, the same learning rate; only the bound on staleness differs. First with tools that take their
time (each call sleeps in its box, lognormal with a median of 0.2 s, one of a hundred longer than 6 s), then without.
The last checkpoint of the former is evaluated on the same held-out tasks, without sleeps. Last, TRL's GRPOTrainer with
the same weights, and tasks reduced to their first turn.

The model is the shipped one with wider experts (`wider.py`): so small as it is, sandboxes take most of the CPU. What is
compared is the time between the start of training and its last step; starting the services and evaluating are outside.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.bench.wider import widen

GROUPS, GROUP = 4, 8
EXPERT_SIZE = 2048
WORDS = [
    "tasks.heldout=0",
    "tasks.new_templates=0",
    "eval.every=0",
    "trainer.mismatch_every=0",
    "trainer.checkpoint_every=1000000",
    "trainer.decay_steps=0",
    "launch.clusters=1",
    "launch.late_join_version=0",
    "rollouts.deadline_seconds=600",
    "rollouts.concurrency=256",
    "engine.slots=256",
    f"rollouts.groups_per_step={GROUPS}",
    f"rollouts.group_size={GROUP}",
]
LATENCY = ["sandbox.latency_p50=0.2", "sandbox.latency_p99=6"]
HELD_OUT, ATTEMPTS = 96, 2
RUN_SECONDS = 1800.0
TRL_STEPS = 3
LIMITS = {"async_speedup": 2.5, "trainer_idle": 0.1, "staleness_max_over_bound": 0, "vs_trl_samples": 5.0}


@dataclass(frozen=True)
class Setting:
    name: str
    bound: int
    words: tuple[str, ...] = ()


SYNCHRONOUS = Setting("synchronous", 0)
ASYNCHRONOUS = tuple(Setting(f"asynchronous, {bound}", bound) for bound in (2, 4, 8))
SETTINGS = (SYNCHRONOUS, Setting("one step ahead", 1), *ASYNCHRONOUS)
UNCORRECTED = Setting("asynchronous, 8, no correction", 8, ("trainer.correction=none",))


@dataclass(frozen=True)
class Row:
    """One run. `seconds` of training; idle shares are of these."""

    setting: str
    bound: int
    latency: bool
    seed: int
    seconds: float
    samples: int
    trainer_idle: float
    engine_idle: float
    staleness_mean: float
    staleness_max: int
    solve_rate: float | None = None
    solve_rate_se: float | None = None


def loop(
    steps: int,
    seeds: int,
    json_file: Path | None,
    console: Console,
    settings: Sequence[Setting] = (*SETTINGS, UNCORRECTED),
    held_out: int = HELD_OUT,
    expert_size: int = EXPERT_SIZE,
) -> bool:
    """Run everything, print the tables, write the JSON; whether every check holds. Raises RuntimeError with the last
    words of a run that failed."""
    place = Path(tempfile.mkdtemp(prefix="stretto-loop-"))
    rows: list[Row] = []
    try:
        nano = Path(str(resources.files("stretto") / "assets" / "nano"))
        model = widen(nano, place / "model", expert_size)
        for seed in range(seeds):  # seeds outside, so that a machine that slows down meets all settings alike
            for latency in (True, False):
                for setting in settings:
                    if setting.words and not latency:
                        continue
                    row = _run(place, model, setting, steps, latency, seed)
                    if latency:
                        rate, se = _solve_rate(place, model, row, held_out)
                        row = replace(row, solve_rate=rate, solve_rate_se=se)
                    rows.append(row)
                    console.print(f"  {_name(row)}: {row.seconds:.0f} s")
        trl = _trl(place, model, steps, console)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    tree = summary(rows, trl, steps, seeds)
    for latency in (True, False):
        console.print(_table([row for row in rows if row.latency is latency], latency))
    console.print(_words(tree), markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return all(check["ok"] for check in tree["checks"].values())


def summary(rows: Sequence[Row], trl: dict[str, Any] | None, steps: int, seeds: int) -> dict[str, Any]:
    """The JSON. Ratios are medians over seeds of runs that followed one another; `async_speedup` and `trainer_idle` are
    those of the asynchronous setting with the largest ratio under latency."""
    ratios = {latency: _ratios(rows, latency) for latency in (True, False)}
    names = [setting.name for setting in ASYNCHRONOUS if setting.name in ratios[True]]
    best = max(names, key=lambda name: ratios[True][name])
    idle = statistics.median(row.trainer_idle for row in rows if row.latency and row.setting == best)
    gap, noise = max((_gap(rows, name) for name in names), key=lambda found: found[0] - found[1])
    over = max(row.staleness_max - row.bound for row in rows)
    found: dict[str, tuple[float | None, bool]] = {
        "async_speedup": (ratios[True][best], ratios[True][best] >= LIMITS["async_speedup"]),
        "trainer_idle": (idle, idle <= LIMITS["trainer_idle"]),
        "solve_rate_gap": (gap, gap <= noise),
        "staleness_max_over_bound": (over, over <= LIMITS["staleness_max_over_bound"]),
    }
    if trl is not None:
        ours = max(row.samples / row.seconds for row in rows if not row.latency and row.setting in names)
        versus = ours / trl["samples_per_s"]
        found["vs_trl_samples"] = (versus, versus >= LIMITS["vs_trl_samples"])
    checks: dict[str, dict[str, Any]] = {
        name: {"value": value if value is None else round(value, 4), "limit": LIMITS.get(name), "ok": bool(ok)}
        for name, (value, ok) in found.items()
    }
    checks["solve_rate_gap"]["limit"] = round(noise, 4)
    return {
        "benchmark": "loop",
        "steps": steps,
        "seeds": seeds,
        "rollouts_per_step": GROUPS * GROUP,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "best": best,
        "ratios": {"latency": ratios[True], "none": ratios[False]},
        "uncorrected": _uncorrected(rows),
        "trl": trl,
        "rows": [asdict(row) for row in rows],
        "checks": checks,
    }


def _ratios(rows: Sequence[Row], latency: bool) -> dict[str, float]:
    """By setting: how many times faster than the synchronous run of the same seed."""
    base = {row.seed: row.seconds for row in rows if row.latency is latency and row.setting == SYNCHRONOUS.name}
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.latency is latency:
            found.setdefault(row.setting, []).append(base[row.seed] / row.seconds)
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def _gap(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """(how much lower its solve rate is than that of the synchronous runs, two standard errors of that)."""
    (ours, ours_se), (base, base_se) = _rate(rows, name), _rate(rows, SYNCHRONOUS.name)
    return base - ours, 2.0 * math.hypot(ours_se, base_se)


def _rate(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """Mean solve rate over seeds and its standard error: that of the evaluation, or of the spread over seeds if that is
    larger."""
    known = [(row.solve_rate, row.solve_rate_se or 0.0) for row in rows if row.latency and row.setting == name]
    rates = [rate for rate, _ in known if rate is not None]
    sampling = math.hypot(*(se for _, se in known)) / len(known)
    spread = statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0
    return statistics.mean(rates), max(sampling, spread)


def _uncorrected(rows: Sequence[Row]) -> dict[str, float] | None:
    if not any(row.setting == UNCORRECTED.name for row in rows):
        return None
    corrected, without = ASYNCHRONOUS[-1].name, UNCORRECTED.name
    (a, a_se), (b, b_se) = _rate(rows, corrected), _rate(rows, without)
    return {"default": round(a, 4), "none": round(b, 4), "noise": round(2.0 * math.hypot(a_se, b_se), 4)}


# Running


def _run(place: Path, model: Path, setting: Setting, steps: int, latency: bool, seed: int) -> Row:
    name = f"b{setting.bound}{'-plain' if setting.words else ''}{'-slow' if latency else ''}-{seed}"
    words = [*WORDS, *(LATENCY if latency else []), *setting.words]
    words += [f"model.path={model}", f"run.seed={seed}", f"trainer.steps={steps}"]
    words += [f"rollouts.max_staleness={setting.bound}", f"tasks.train={max(200, 2 * GROUPS * (steps + 10))}"]
    _stretto(place, name, ["train", "quickstart", "--name", name, *words])
    tree = json.loads((place / "runs" / name / "summary.json").read_text())
    if tree["steps"] != steps:
        raise RuntimeError(f"run {name} made {tree['steps']} of {steps} steps")
    return Row(
        setting=setting.name,
        bound=setting.bound,
        latency=latency,
        seed=seed,
        seconds=round(tree["train_s"], 2),
        samples=steps * GROUPS * GROUP,
        trainer_idle=round(tree["idle"]["trainer"], 4),
        engine_idle=round(tree["idle"]["engine"], 4),
        staleness_mean=round(tree["staleness"]["mean"], 2),
        staleness_max=tree["staleness"]["max"],
    )


def _solve_rate(place: Path, model: Path, row: Row, held_out: int) -> tuple[float, float]:
    """Of the run's last checkpoint, and its standard error."""
    plain = "-plain" if row.setting == UNCORRECTED.name else ""
    run = place / "runs" / f"b{row.bound}{plain}-slow-{row.seed}"
    checkpoint = max((run / "checkpoints").glob("v*"))
    words = ["eval", str(checkpoint), "--count", str(held_out), "--attempts", str(ATTEMPTS), "--json"]
    said = _stretto(place, f"{run.name}-eval", [*words, f"run.seed={1000 + row.seed}"])
    tree = json.loads(said[said.index("{") :])
    low, high = tree["ci95"]
    return tree["solve_rate"], (high - low) / 2 / 1.96


def _trl(place: Path, model: Path, steps: int, console: Console) -> dict[str, Any] | None:
    if importlib.util.find_spec("trl") is None:
        console.print("TRL is not installed, so it is not compared with: pip install -e '.[bench]'", markup=False)
        return None
    found = [_trl_with(place, model, steps, threads) for threads in sorted({1, os.cpu_count() or 1})]
    return max(found, key=lambda tree: tree["samples_per_s"])  # two threads are slower than one on a busy machine


def _trl_with(place: Path, model: Path, steps: int, threads: int) -> dict[str, Any]:
    out = place / f"trl-{threads}.json"
    words = ["--model", str(model), "--steps", str(min(steps, TRL_STEPS)), "--threads", str(threads)]
    words += ["--groups", str(GROUPS), "--group", str(GROUP), "--out", str(out)]
    command = [sys.executable, "-m", "stretto.bench.grpo_trl", *words]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((place / "trl.log").open("w+"))
        code = _wait(subprocess.Popen(command, cwd=place, stdout=log, stderr=subprocess.STDOUT))
        log.seek(0)
        said = log.read()
    if code != 0:
        raise RuntimeError(f"TRL ended with exit code {code}:\n{said[-2000:]}")
    return json.loads(out.read_text())


def _stretto(place: Path, name: str, words: list[str]) -> str:
    """One command to its end; what it printed. Raises RuntimeError with its last words when it failed."""
    with (place / f"{name}.out").open("w+") as out, (place / f"{name}.err").open("w+") as err:
        command = [sys.executable, "-m", "stretto.cli", *words]
        code = _wait(subprocess.Popen(command, cwd=place, stdout=out, stderr=err))
        out.seek(0)
        err.seek(0)
        said, complained = out.read(), err.read()
    if code != 0:
        raise RuntimeError(
            f"`stretto {words[0]}` of {name} ended with exit code {code}:\n{(said + complained)[-2000:]}"
        )
    return said


def _wait(process: subprocess.Popen[Any]) -> int:
    try:
        return process.wait(RUN_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


# Showing


def _name(row: Row) -> str:
    return f"{row.setting}, {'slow tools' if row.latency else 'no latency'}, seed {row.seed}"


def _table(rows: Sequence[Row], latency: bool) -> Table:
    what = "tools that sleep: median 0.2 s, one of a hundred over 6 s" if latency else "tools without latency"
    table = Table(title=f"{rows[0].samples} samples, {what}")
    table.add_column("", no_wrap=True)
    for name in ("seconds", "× synchronous", "trainer idle", "engine idle", "staleness mean, max"):
        table.add_column(name, justify="right")
    if latency:
        table.add_column("solved, held out", justify="right")
    ratios = _ratios(rows, latency)
    for name, ratio in ratios.items():
        runs = [row for row in rows if row.setting == name]
        cells = [
            "/".join(f"{row.seconds:.0f}" for row in runs),
            f"{ratio:.2f}",
            f"{statistics.median(row.trainer_idle for row in runs):.0%}",
            f"{statistics.median(row.engine_idle for row in runs):.0%}",
            f"{statistics.mean(row.staleness_mean for row in runs):.1f}, {max(row.staleness_max for row in runs)}",
        ]
        if latency:
            rate, se = _rate(rows, name)
            cells.append(f"{rate:.1%} ± {2 * se:.1%}")
        table.add_row(name, *cells)
    return table


def _words(tree: dict[str, Any]) -> str:
    lines = []
    if tree["uncorrected"]:
        lines.append(
            "Solve rate at staleness 8: {default:.1%} corrected, {none:.1%} not; noise {noise:.1%}.".format(
                **tree["uncorrected"]
            )
        )
    if tree["trl"]:
        lines.append(
            f"TRL {tree['trl']['version']}: {tree['trl']['samples_per_s']:.2f} samples/s of one turn each, "
            f"{tree['trl']['sampled_mean']:.0f} tokens; ours, whole rollouts: "
            f"{tree['checks']['vs_trl_samples']['value']:.1f} times as many."
        )
    for name, check in tree["checks"].items():
        limit = "" if check["limit"] is None else f" (limit {check['limit']:g})"
        lines.append(f"{name}: {check['value']:g}{limit} {'holds' if check['ok'] else 'DOES NOT HOLD'}")
    return "\n".join(lines)
