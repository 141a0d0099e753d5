"""`stretto bench loop`: how much time asynchrony saves, on the same work, and what it costs in solve rate.

Real runs (`stretto train`), one after the other: the same tasks in the same order, the same number of trained groups,
the same learning rate; only the bound on staleness differs. Three tables and a comparison:

- with tools that take their time (each call sleeps in its box, lognormal with a median of 0.2 s, one of a hundred
  longer than 6 s): the synchronous run and the one that is judged with every seed, the others with one;
- without these sleeps, with one seed;
- at twice the shipped learning rate, where staleness does harm: synchronous, at staleness 8 with the defaults, and at
  staleness 8 with neither correction nor guard;
- TRL's GRPOTrainer, which plays the same rollouts in the same boxes with the same weights (`grpo_trl.py`).

The model is the shipped one. For all but the third table its experts are made wider (`wider.py`) and activations are
computed again in the backward pass, as with large models: small as it is, sandboxes would take most of the CPU, and no
trainer would be the bottleneck, as it is where the engines are sized for it. What is compared is the time from the
start of training to its last step; starting the services and evaluating are outside. Solve rates are those of the last
checkpoint on held-out tasks.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from stretto.bench import loop_tables
from stretto.bench.loop_runs import ATTEMPTS, GROUP, GROUPS, HELD_OUT, Row, Runs, Setting, trl_is_here
from stretto.bench.wider import widen

EXPERT_SIZE = 4096
LATENCY = ["sandbox.latency_p50=0.2", "sandbox.latency_p99=6"]
HARD_LR, HARD_STEPS = 1e-3, 20
WINDOW = 4
"""Steps that a reward is averaged over, where times to the same reward are compared."""
TRL_PROBE, TRL_SLOW, TRL_STEPS = 2, 3, 12
"""Steps TRL makes at most: to find its best number of threads, with slow tools, without. The first of each isn't timed
for samples per second."""
WIDE = ["trainer.recompute=true"]
"""Overrides for the wider model."""

SLOW, NONE, HARD = "slow", "none", "hard"
SYNCHRONOUS = Setting("synchronous", 0)
JUDGED = Setting("asynchronous, 8", 8)
BETWEEN = (Setting("one step ahead", 1), *(Setting(f"asynchronous, {bound}", bound) for bound in (2, 4)))
UNCORRECTED = Setting("asynchronous, 8, uncorrected", 8, ("trainer.correction=none", "trainer.guard=0"))

LIMITS = {
    "async_speedup": 2.5,
    "trainer_idle": 0.1,
    "staleness_max_over_bound": 0,
    "vs_trl_samples": 5.0,
    "vs_trl_time_to_reward": 1.0,
}


def loop(
    steps: int,
    seeds: int,
    json_file: Path | None,
    console: Console,
    expert_size: int = EXPERT_SIZE,
    hard_steps: int = HARD_STEPS,
    held_out: int = HELD_OUT,
    between: Sequence[Setting] = BETWEEN,
) -> bool:
    """Run everything, print the tables, write the JSON; whether every check holds. Raises RuntimeError with the last
    words of a run that failed."""
    place = Path(tempfile.mkdtemp(prefix="stretto-loop-"))
    rows: list[Row] = []
    try:
        nano = Path(str(resources.files("stretto") / "assets" / "nano"))
        wide = widen(nano, place / "model", expert_size)
        runs = Runs(place, held_out)

        def run(table: str, setting: Setting, seed: int) -> None:
            model, made = (nano, hard_steps) if table == HARD else (wide, steps)
            words = {SLOW: [*WIDE, *LATENCY], NONE: WIDE, HARD: [f"trainer.lr={HARD_LR:g}"]}[table]
            row = runs.train(table, setting, model, seed, words, made)
            rows.append(row)
            console.print(f"  {loop_tables.name(row)}: {row.seconds:.0f} s, {row.solve_rate:.0%} solved")

        for seed in range(seeds):  # seeds outside, so that a machine that slows down meets all settings alike
            for setting in (SYNCHRONOUS, *([] if seed else between), JUDGED):
                run(SLOW, setting, seed)
            for setting in (SYNCHRONOUS, JUDGED, UNCORRECTED):
                run(HARD, setting, seed)
        for setting in (SYNCHRONOUS, *between, JUDGED):
            run(NONE, setting, 0)
        trl = _trl(runs, wide, steps, console)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    tree = summary(rows, trl, steps, seeds)
    loop_tables.show(rows, tree, console)
    if json_file is not None:
        json_file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return all(check["ok"] for check in tree["checks"].values())


def _trl(runs: Runs, model: Path, steps: int, console: Console) -> dict[str, Any] | None:
    """TRL with the number of threads that makes it fastest; None where it is not installed."""
    if not trl_is_here():
        console.print("TRL is not installed, so it is not compared with: pip install -e '.[bench]'", markup=False)
        return None
    threads = sorted({1, os.cpu_count() or 1})
    probes = {count: runs.trl(runs.words(model, 0, TRL_PROBE), count)["samples_per_s"] for count in threads}
    best = max(probes, key=lambda count: probes[count])
    slow = runs.trl(runs.words(model, 0, TRL_SLOW, LATENCY), best)
    none = runs.trl(runs.words(model, 0, min(steps, TRL_STEPS)), best)
    console.print(f"  TRL: {none['samples_per_s']:.1f} samples/s, {slow['samples_per_s']:.1f} with slow tools")
    return {
        "version": none["version"],
        "threads": best,
        "probes": probes,
        "samples_per_s": {SLOW: slow["samples_per_s"], NONE: none["samples_per_s"]},
        "ends": none["ends"],
        "solved": none["solved"],
    }


# What the rows say


def summary(rows: Sequence[Row], trl: dict[str, Any] | None, steps: int, seeds: int) -> dict[str, Any]:
    """The JSON. Ratios are medians over seeds, of runs of one seed; noise is two standard errors of a difference."""
    speed, idle = ratios(rows, SLOW), statistics.median(row.trainer_idle for row in of(rows, SLOW, JUDGED))
    sync, judged = rate(of(rows, SLOW, SYNCHRONOUS)), rate(of(rows, SLOW, JUDGED))
    hard = {setting.name: rate(of(rows, HARD, setting)) for setting in (SYNCHRONOUS, JUDGED, UNCORRECTED)}
    over = max(row.staleness_max - row.bound for row in rows)
    found: dict[str, tuple[float, float, bool]] = {  # value, limit, whether it holds
        "async_speedup": _least("async_speedup", speed[JUDGED.name]),
        "trainer_idle": (idle, LIMITS["trainer_idle"], idle <= LIMITS["trainer_idle"]),
        "solve_rate_gap": _at_most(sync, judged),
        "corrected_gap": _at_most(hard[SYNCHRONOUS.name], hard[JUDGED.name]),
        "uncorrected_gap": _more(hard[JUDGED.name], hard[UNCORRECTED.name]),
        "staleness_max_over_bound": (over, 0, over <= LIMITS["staleness_max_over_bound"]),
    }
    if trl is not None:
        trl = {**trl, "ratios": versus(rows, trl), "same_reward": same_reward(rows, trl)}
        found["vs_trl_samples"] = _least("vs_trl_samples", trl["ratios"][SLOW])
        found["vs_trl_time_to_reward"] = _least("vs_trl_time_to_reward", trl["same_reward"]["ratio"])
    return {
        "benchmark": "loop",
        "steps": steps,
        "seeds": seeds,
        "rollouts_per_step": GROUPS * GROUP,
        "held_out": {"tasks": HELD_OUT, "attempts": ATTEMPTS},
        "learning_rate_of_hard": HARD_LR,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "judged": JUDGED.name,
        "ratios": {SLOW: speed, NONE: ratios(rows, NONE)},
        "solve_rates": {
            SLOW: {SYNCHRONOUS.name: sync, JUDGED.name: judged},
            HARD: hard,
        },
        "trl": trl,
        "rows": [asdict(row) for row in rows],
        "checks": {
            name: {"value": round(value, 4), "limit": round(limit, 4), "ok": bool(ok)}
            for name, (value, limit, ok) in found.items()
        },
    }


def of(rows: Sequence[Row], table: str, setting: Setting) -> list[Row]:
    return [row for row in rows if row.table == table and row.setting == setting.name]


def ratios(rows: Sequence[Row], table: str) -> dict[str, float]:
    """By setting: how many times faster than the synchronous run of the same seed."""
    base = {row.seed: row.seconds for row in of(rows, table, SYNCHRONOUS)}
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.table == table:
            found.setdefault(row.setting, []).append(base[row.seed] / row.seconds)
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def rate(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean solve rate over seeds and its standard error: that of the evaluation, or of the spread over seeds if that is
    larger."""
    rates = [row.solve_rate for row in rows]
    sampling = math.hypot(*(row.solve_rate_se for row in rows)) / len(rows)
    spread = statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0
    return round(statistics.mean(rates), 4), round(max(sampling, spread), 4)


def _noise(a: tuple[float, float], b: tuple[float, float]) -> float:
    return 2.0 * math.hypot(a[1], b[1])


def _at_most(base: tuple[float, float], other: tuple[float, float]) -> tuple[float, float, bool]:
    """How much lower the other is: at most by noise."""
    gap, noise = base[0] - other[0], _noise(base, other)
    return gap, noise, gap <= noise


def _more(base: tuple[float, float], other: tuple[float, float]) -> tuple[float, float, bool]:
    """How much lower the other is: by more than noise."""
    gap, noise = base[0] - other[0], _noise(base, other)
    return gap, noise, gap > noise


def _least(name: str, value: float) -> tuple[float, float, bool]:
    return value, LIMITS[name], value >= LIMITS[name]


def versus(rows: Sequence[Row], trl: dict[str, Any]) -> dict[str, float]:
    """By table: the judged setting's samples per second over TRL's."""
    found = {}
    for table in (SLOW, NONE):
        ours = statistics.median(row.samples / row.seconds for row in of(rows, table, JUDGED))
        found[table] = round(ours / trl["samples_per_s"][table], 3)
    return found


def same_reward(rows: Sequence[Row], trl: dict[str, Any]) -> dict[str, Any]:
    """Seconds until the solve rate of the last steps' rollouts, tools without latency, was for the first time the
    highest that both TRL and an asynchronous run came to. Ours is the run that is first."""
    ours = [row for row in rows if row.table == NONE and row.bound > 0]
    reward = min(max(max(_windows(row.solved)) for row in ours), max(_windows(trl["solved"])))
    able = [row for row in ours if max(_windows(row.solved)) >= reward]
    mine, name = min((_reached(row.ends, row.solved, reward), row.setting) for row in able)
    theirs = _reached(trl["ends"], trl["solved"], reward)
    return {
        "reward": round(reward, 4),
        "setting": name,
        "ours_s": mine,
        "trl_s": theirs,
        "ratio": round(theirs / mine, 3),
    }


def _windows(solved: Sequence[float]) -> list[float]:
    """Means over `WINDOW` steps, or over all there are."""
    size = min(WINDOW, len(solved))
    return [statistics.mean(solved[end - size : end]) for end in range(size, len(solved) + 1)]


def _reached(ends: Sequence[float], solved: Sequence[float], reward: float) -> float:
    means = _windows(solved)
    return round(ends[next(i for i, mean in enumerate(means) if mean >= reward) + len(ends) - len(means)], 2)
