"""What `stretto train` says at its end: before and after with intervals, where everything is, what to try next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.config import Config
from stretto.watch import estimate
from stretto.watch.display import pause, size

Row = tuple[str, str, str, str]


def closing(console: Console, config: Config, summary: dict[str, Any]) -> None:
    console.print()
    measured = rows(summary)
    if measured:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        table.add_column("", no_wrap=True)
        table.add_column("before", justify="right", no_wrap=True)
        table.add_column("after", justify="right", no_wrap=True)
        table.add_column("gain")  # its interval goes below it where the terminal is narrow
        for row in measured:
            table.add_row(*row)
        console.print(table)
    else:
        console.print("Nothing was evaluated before and after training.", markup=False)
    console.print()
    for sentence in sentences(summary):
        console.print(Text(sentence), soft_wrap=not console.is_terminal)
    console.print()
    run = config.run_dir
    name = run_name(config)
    console.print(Text(f"Report      {run / 'report.html'}", style="bold"), soft_wrap=True)
    console.print(f"Checkpoint  {run / 'checkpoints' / checkpoint(config)}", markup=False, soft_wrap=True)
    console.print(f"Numbers     {run / 'summary.json'}, {run / 'metrics.jsonl'}", markup=False, soft_wrap=True)
    console.print("\nTry next:", markup=False)
    more = config.trainer.steps + 30
    for command, what in (
        (f"{program()} serve {run / 'checkpoints' / checkpoint(config)}", "talk to the trained model over HTTP"),
        (f"{program()} resume {name} trainer.steps={more}", "train it further"),
        (
            f"{program()} train quickstart --control shuffle --name {config.run.name}-shuffled",
            "the control that must not learn",
        ),
    ):
        console.print(f"  {command}", markup=False, soft_wrap=True)
        console.print(Text(f"      {what}", style="dim"))


def run_name(config: Config) -> str:
    """What finds the run again: its name, or its folder where that is not below runs/."""
    return config.run.name if config.run.root == Path("runs") else str(config.run_dir)


def rows(summary: dict[str, Any]) -> list[Row]:
    """(what, before, after, gain) as text; rows that were not measured are left out."""
    table = [
        _row("held-out tasks, sampled", summary["solve_rate"]),
        _row("held-out tasks, greedy", summary["solve_rate_greedy"]),
        _row("new templates, sampled", summary["solve_rate_new_templates"]),
        _row("new templates, greedy", summary["solve_rate_new_templates_greedy"]),
        _row("held-out, pass@4", _pass(summary["solve_rate"])),
        _row("new templates, pass@4", _pass(summary["solve_rate_new_templates"])),
    ]
    before, after = summary["behaviour"]["before"], summary["behaviour"]["after"]
    for key, words in BEHAVIOUR.items():
        if key in before or key in after:
            table.append(_row(words, {"before": before.get(key), "after": after.get(key)}))
    return [row for row in table if row[1:3] != ("–", "–")]


BEHAVIOUR = {
    "read": "read the file first",
    "tested": "ran the tests",
    "retried": "edited again after a failed test",
}
"""Shares of held-out rollouts, sampled; keys of `stretto.harness.behaviour`."""


def sentences(summary: dict[str, Any]) -> list[str]:
    """The run in words, each from what was measured."""
    said = []
    if summary["train_s"] and summary["steps"]:
        per_second = summary["rollouts"] / summary["train_s"]
        said.append(
            f"{summary['steps']} steps on {summary['rollouts']:,} rollouts in {estimate.exactly(summary['train_s'])} "
            f"({per_second:.0f} rollouts/s); with evaluations {estimate.exactly(summary['wall_s'])}."
        )
    idle = summary["idle"]
    if idle["trainer"] is not None and idle["engine"] is not None:
        said.append(f"Trainer idle {idle['trainer']:.0%}, engines idle {idle['engine']:.0%}.")
    if summary.get("busy"):
        shares = ", ".join(f"{name} {share:.0%}" for name, share in summary["busy"].items())
        said.append(f"Busy: {shares}.")
    staleness = summary["staleness"]
    if staleness["max"] is not None:
        said.append(
            f"Staleness mean {staleness['mean']:.2f}, max {staleness['max']} of at most {staleness['bound']} versions."
        )
    weights = summary["weights"]
    if weights["bytes_delta_median"]:
        paused = f", engines paused {pause(weights['pause_s_p50'])}" if weights["pause_s_p50"] is not None else ""
        said.append(
            f"A version costs {size(weights['bytes_delta_median'])} instead of {size(weights['bytes_full'])} "
            f"({weights['ratio_median']:.1f} × smaller){paused}."
        )
    mismatch = summary["mismatch"]
    if mismatch["k3"] is not None and mismatch["k3_without_replay"] is not None:
        said.append(
            f"Engine and trainer disagree by KL {mismatch['k3']:.1e} with router replay, "
            f"{mismatch['k3_without_replay']:.1e} without, under the version that sampled (both compute in float32)."
        )
    if mismatch["stale_k3"] is not None and mismatch["stale_k3_without_replay"] is not None:
        said.append(
            f"On tokens of older versions the KL is {mismatch['stale_k3']:.1e} with router replay, "
            f"{mismatch['stale_k3_without_replay']:.1e} without."
        )
    alarms = summary["alarms"]
    if alarms:
        said.append(f"{len(alarms)} alarm{'s' if len(alarms) > 1 else ''}; the last: {alarms[-1]}.")
    return said


def program() -> str:
    """How to call this program again: `stretto` where the shell finds it, else its path."""
    called = Path(sys.argv[0])
    if called.name != "stretto" or shutil.which("stretto") == str(called.absolute()):
        return "stretto"
    return os.path.relpath(called)


def checkpoint(config: Config) -> str:
    """Folder name of the last checkpoint, or `latest` where none is known."""
    pointer = config.run_dir / "checkpoints" / "latest"
    return pointer.read_text().strip() if pointer.is_file() else "latest"


def _row(what: str, rate: dict[str, Any]) -> Row:
    before, after = rate.get("before"), rate.get("after")
    gain = "" if before is None or after is None else f"{100 * (after - before):+.1f} points"
    if gain and rate.get("ci95"):
        low, high = rate["ci95"]
        gain += f"  [{100 * low:+.1f}, {100 * high:+.1f}]"
    return what, percent(before), percent(after), gain


def _pass(rate: dict[str, Any]) -> dict[str, Any]:
    return {"before": rate.get("pass_at_4_before"), "after": rate.get("pass_at_4_after")}


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
