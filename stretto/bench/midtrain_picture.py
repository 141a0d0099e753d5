"""The picture of loss against reward: one SVG file that carries its own style."""

from __future__ import annotations

import statistics
from importlib import resources
from pathlib import Path
from typing import Any

from stretto.watch.charts import Plot

ROOM = 0.12
"""Of each axis, left free at both ends."""


def picture(found: dict[str, Any]) -> str:
    """`found` is what `midtrain_reward.measure` gives. Mean and each seed; the loss falls to the right."""
    budgets = sorted(found["budgets"], key=lambda one: one["tokens"])
    rewards = [value for one in budgets for value in one["rewards"]]
    plot = Plot(
        "Solve rate after RL, by the loss after mid-training",
        x=_wider([-one["loss"] for one in budgets]),
        y=_wider([100 * value for value in rewards]),
        width=560,
        height=320,
    )
    plot.axes(
        y_format=lambda value: f"{value:g} %",
        x_format=lambda value: f"{-value:.3f}",
        x_title="loss after mid-training, nats per token of the agent (falls to the right)",
        x_ticks=[-one["loss"] for one in budgets],
    )
    plot.line([(-one["loss"], 100 * statistics.mean(one["rewards"])) for one in budgets], "c1 strong")
    for one in budgets:
        mean = 100 * statistics.mean(one["rewards"])
        for value in one["rewards"]:
            plot.dot(-one["loss"], 100 * value, "c1 hollow", 3)
        plot.dot(-one["loss"], mean, "c1", 5)
        first = one is budgets[0]  # to the left of it is the axis
        anchor, dx, dy = ("start", 10, 16) if first else ("end", -10, -8)
        plot.text(-one["loss"], mean, f"{one['tokens'] / 1000:g}k tokens", anchor=anchor, dx=dx, dy=dy)
    style = resources.files("stretto.watch").joinpath("report.css").read_text(encoding="utf-8")
    head, body = plot.svg().split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"><style>{style}</style>{body}\n'


def write(found: dict[str, Any], file: Path) -> None:
    file.write_text(picture(found), encoding="utf-8")


def _wider(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low or 1.0) * ROOM
    return low - margin, high + margin
