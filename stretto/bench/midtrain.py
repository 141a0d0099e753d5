"""`stretto bench midtrain`: what mid-training is worth, measured side by side in one run.

    (a) corpus        MB of unpacked sources per CPU second and stage            midtrain_corpus.py
    (b) training      tokens/s beside transformers; share of the matmul peak     midtrain_speed.py
    (c) speculation   tokens/s and distribution with guessed tokens              speculation.py
    (d) resume        N + N steps against 2N, one rank against two               midtrain_resume.py
    (e) reward        loss after mid-training against reward after RL            midtrain_reward.py, only when asked for

Needs the `corpus` extra and transformers (`dev`). The first four take about two minutes on two cores, the last about
six; its picture is written beside the JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.bench import (
    midtrain_corpus,
    midtrain_picture,
    midtrain_resume,
    midtrain_reward,
    midtrain_speed,
    speculation,
)
from stretto.config import ModelConfig

LIMITS = {
    "corpus_mb_per_s": 5.0,
    "vs_hf_tokens_per_s": 1.5,
    "peak_share": 0.5,
    "resume_equal": 1.0,
    "spec_speedup": 1.3,
    "spec_distribution_p": 0.01,
    "loss_reward_monotone": 0.0,
}
ABOVE = {"spec_distribution_p", "loss_reward_monotone"}
"""Checks whose value must be above its limit; the others may be as large."""


def midtrain(
    json_file: Path | None,
    console: Console,
    sources: Path | None = None,
    loss_to_reward: bool = False,
    seeds: int = midtrain_reward.SEEDS,
    rl_steps: int = midtrain_reward.RL_STEPS,
) -> bool:
    """Measure, print, write the JSON; whether every check holds. Raises ValueError with a sentence for what can't be
    measured here, RuntimeError for a run that failed."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"{json_file} cannot be written: there is no folder {json_file.absolute().parent}")
    if sources is not None and not sources.is_dir():
        raise ValueError(f"--sources {sources}: there is no such folder")
    with tempfile.TemporaryDirectory(prefix="stretto-midtrain-") as scratch:
        place = Path(scratch)
        found = {}
        for name, measure in {
            "corpus": lambda: midtrain_corpus.measure(sources, _folder(place / "corpus")),
            "training": midtrain_speed.measure,
            "speculation": lambda: speculation.measure(ModelConfig().folder),
            "resume": lambda: midtrain_resume.measure(_folder(place / "resume")),
        }.items():
            console.print(f"{name} …", style="dim")
            found[name] = measure()
        if loss_to_reward:
            console.print("reward …", style="dim")
            say = lambda text: console.print(f"  {text}", markup=False)  # noqa: E731
            found["reward"] = midtrain_reward.measure(_folder(place / "reward"), say, seeds=seeds, rl_steps=rl_steps)
    tree = summary(found)
    show(tree, console)
    if json_file is not None:
        json_file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        if loss_to_reward:
            midtrain_picture.write(found["reward"], json_file.with_suffix(".svg"))
            console.print(f"the picture is in {json_file.with_suffix('.svg')}", markup=False)
    return all(check["ok"] for check in tree["checks"].values())


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON. Only what was measured has a check."""
    training, resume = found["training"], found["resume"]
    values = {
        "corpus_mb_per_s": found["corpus"]["mb_per_cpu_s"],
        "vs_hf_tokens_per_s": training["nano"]["ratio"],
        "peak_share": training["wide"]["share"],
        "resume_equal": float(resume["bit_equal"] and resume["same_documents"]),
        "spec_speedup": found["speculation"]["spec_speedup"],
        "spec_distribution_p": found["speculation"]["spec_distribution_p"],
    }
    if "reward" in found:
        values["loss_reward_monotone"] = found["reward"]["least_gain"]
    return {
        "benchmark": "midtrain",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        **found,
        "checks": {
            name: {"value": round(value, 4), "limit": LIMITS[name], "ok": holds(name, value)}
            for name, value in values.items()
        },
    }


def holds(name: str, value: float) -> bool:
    return value > LIMITS[name] if name in ABOVE else value >= LIMITS[name]


def show(tree: Mapping[str, Any], console: Console) -> None:
    console.print(_corpus_table(tree["corpus"]))
    console.print(_training_table(tree["training"]))
    console.print(_speculation_table(tree["speculation"]))
    if "reward" in tree:
        console.print(_reward_table(tree["reward"]))
    for name, check in tree["checks"].items():
        sign = "above" if name in ABOVE else "at least"
        said = "holds" if check["ok"] else "DOES NOT HOLD"
        console.print(f"  {name:<22} {sign} {check['limit']:g}: {check['value']:.4g}, {said}", markup=False)


def _corpus_table(corpus: Mapping[str, Any]) -> Table:
    table = Table(title=f"Corpus: {corpus['read_mb']:.0f} MB of {corpus['sources']}, {corpus['kept_mb']:.0f} MB kept")
    for name in ("stage", "CPU seconds", "share", "MB/s"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage, seconds in [*corpus["stages_cpu_s"].items(), ("all", corpus["cpu_s"])]:
        rate = f"{corpus['read_mb'] / seconds:,.1f}" if seconds > 0 else ""
        table.add_row(stage, f"{seconds:.2f}", f"{seconds / corpus['cpu_s']:.0%}", rate)
    return table


def _training_table(training: Mapping[str, Any]) -> Table:
    table = Table(title="Training, float32, one thread")
    for name in ("model", "learner", "tokens/s"):
        table.add_column(name, justify="right" if name == "tokens/s" else "left")
    table.add_column("", no_wrap=True)
    nano, wide = training["nano"], training["wide"]
    table.add_row("nano", "Stretto", f"{nano['tokens_per_s']['ours']:,}", f"{nano['ratio']:.2f} × transformers")
    table.add_row("", f"transformers, {nano['transformers_way']}", f"{nano['tokens_per_s']['theirs']:,}", "")
    packed = nano["packed"]
    table.add_row("", "transformers, packed rows", f"{packed['tokens_per_s']:,}", f"Stretto {packed['ratio']:.2f} ×")
    about = f"{wide['share']:.0%} of {wide['peak_gflops']:.0f} GFLOP/s"
    table.add_row(f"width {wide['width']}", "Stretto", f"{wide['tokens_per_s']:,}", about)
    return table


def _speculation_table(found: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"Guessing ahead, batch 1, temperature {found['temperature']:g}, at most {found['guesses']} guesses"
    )
    for name in ("guesses of", "tokens/s", "beside plain", "whole turns", "came true", "tokens a pass", "text"):
        table.add_column(name, justify="left" if name == "guesses of" else "right")
    table.add_row("nobody", f"{found['plain_tokens_per_s']:,.0f}")
    for name, side in found["sides"].items():
        table.add_row(
            {"heads": "the head"}.get(name, name),
            f"{side['tokens_per_s']:,.0f}",
            f"{side['speedup']:.2f} ×",
            f"{side['whole_turn_speedup']:.2f} ×",
            f"{side['acceptance']:.0%}",
            f"{side['tokens_per_pass']:.2f}",
            "the same" if side["same_text"] else "ANOTHER",
        )
    return table


def _reward_table(reward: Mapping[str, Any]) -> Table:
    table = Table(title=f"The same {reward['rl_steps']} steps of RL after three budgets, {reward['seeds']} seeds")
    for name in ("tokens", "loss after mid-training", "solved after RL", "each seed"):
        table.add_column(name, justify="right")
    for one in reward["budgets"]:
        seeds = " ".join(f"{value:.0%}" for value in one["rewards"])
        table.add_row(f"{one['tokens']:,}", f"{one['loss']:.4f}", f"{one['reward']:.1%}", seeds)
    return table
