"""What `stretto bench loop` prints: a table per kind of work, then what it comes to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.bench.loop_runs import Row

TITLES = {
    "slow": "{samples} samples, tools that sleep: median 0.2 s, one of a hundred over 6 s",
    "none": "{samples} samples, tools without latency",
    "hard": "{samples} samples at a learning rate of {lr:g}, twice the shipped one; tools without latency",
}


def name(row: Row) -> str:
    work = {"slow": "slow tools", "none": "no latency", "hard": "twice the learning rate"}[row.table]
    return f"{row.setting}, {work}, seed {row.seed}"


def show(rows: Sequence[Row], tree: dict[str, Any], console: Console) -> None:
    for table, title in TITLES.items():
        own = [row for row in rows if row.table == table]
        if own:
            console.print(_table(own, title.format(samples=own[0].samples, lr=tree["learning_rate_of_hard"]), tree))
    console.print(_words(tree), markup=False)


def _table(rows: Sequence[Row], title: str, tree: dict[str, Any]) -> Table:
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    columns = ("seconds", "× sync.", "trainer idle", "after step 1", "engine idle", "staleness mean, max", "solved")
    for column in columns:
        table.add_column(column, justify="right")
    ratios = tree["ratios"].get(rows[0].table, {})
    for setting in dict.fromkeys(row.setting for row in rows):
        runs = [row for row in rows if row.setting == setting]
        table.add_row(
            setting,
            "/".join(f"{row.seconds:.0f}" for row in runs),
            f"{ratios[setting]:.2f}" if setting in ratios else "",
            f"{statistics.median(row.trainer_idle for row in runs):.0%}",
            f"{statistics.median(row.later_idle for row in runs):.0%}",
            f"{statistics.median(row.engine_idle for row in runs):.0%}",
            f"{statistics.mean(row.staleness_mean for row in runs):.1f}, {max(row.staleness_max for row in runs)}",
            "/".join(f"{row.solve_rate:.0%}" for row in runs),
        )
    return table


def _words(tree: dict[str, Any]) -> str:
    lines = []
    for table, rates in tree["solve_rates"].items():
        what = {"slow": "Slow tools", "hard": "Twice the learning rate"}[table]
        said = ", ".join(f"{name} {mean:.1%} ± {2 * error:.1%}" for name, (mean, error) in rates.items())
        lines.append(f"{what}, held out, mean over seeds: {said}.")
    if tree["trl"]:
        trl, same = tree["trl"], tree["trl"]["same_reward"]
        per_second, ratios = trl["samples_per_s"], trl["ratios"]
        lines.append(
            f"TRL {trl['version']}, {trl['threads']} threads: {per_second['slow']:.2f} samples/s with slow tools, ours "
            f"{ratios['slow']:.1f} times as many; {per_second['none']:.2f} without latency, ours {ratios['none']:.1f} "
            "times as many."
        )
        lines.append(
            f"To {same['reward']:.1%} solved (mean of four steps, no latency): TRL {same['trl_s']:.0f} s, "
            f"ours {same['ours_s']:.0f} s ({same['setting']})."
        )
    for name, check in tree["checks"].items():
        lines.append(
            f"{name}: {check['value']:g} (limit {check['limit']:g}) {'holds' if check['ok'] else 'DOES NOT HOLD'}"
        )
    return "\n".join(lines)
