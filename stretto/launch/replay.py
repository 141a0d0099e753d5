"""`stretto train --replay RUN`: the run's steps again from its recorded batches, as a table beside what was logged."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stretto.config import load_run
from stretto.trainer.replay import Compared, ReplayError, as_json, replay

ROUNDING = 1e-3
"""Relative difference that another order of additions (another machine, other micro-batches) may have grown to over
some steps; the same code on the same machine makes none."""


def show(run: Path, steps: str | None, overrides: list[str], as_lines: bool, console: Console) -> bool:
    """Replay and print. False when a step without overrides came out otherwise than it was logged.

    `steps` is `A-B`, `A-`, `-B` or `A`: versions. Raises ReplayError and ConfigError with a sentence.
    """
    first, last = span(steps)
    config = load_run(run, overrides)
    table = Table(box=None, pad_edge=False)
    for name in ("version", "loss", "logged", "gradient", "logged", "off by", "clipped", "moved", "lr ×"):
        table.add_column(name, justify="right", no_wrap=True)
    found = []
    with console.status("replaying") as status:
        for compared in replay(config, run, first, last):
            found.append(compared)
            status.update(f"replaying: version {compared.step.version} made again")
            if as_lines:
                print(json.dumps(as_json(compared)), flush=True)
            table.add_row(*_row(compared))
    if not as_lines:
        console.print(table)
        console.print(_verdict(found, bool(overrides)), markup=False)
    return bool(overrides) or not any(map(_differs, found))


def span(steps: str | None) -> tuple[int | None, int | None]:
    """`3-7` as (3, 7); open ends are None."""
    if steps is None:
        return None, None
    match = re.fullmatch(r"(\d*)(-?)(\d*)", steps)
    if not match or not (match[1] or match[3]):
        raise ReplayError(f"--steps {steps!r} is no range of versions; write 3-7, 3-, -7 or 3")
    first, last = (int(text) if text else None for text in (match[1], match[3]))
    return first, last if match[2] else first


def _row(compared: Compared) -> list[str]:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    report, difference = compared.step.report, compared.difference
    return [
        str(compared.step.version),
        number(report.loss),
        number(compared.logged_loss),
        number(report.grad_norm),
        number(compared.logged_grad_norm),
        "–" if difference is None else "0" if difference == 0 else f"{difference:.1e}",
        f"{report.clipped:.2%}",
        f"{report.moved:.4f}",
        f"{report.scale:.2f}",
    ]


def _differs(compared: Compared) -> bool:
    return compared.difference is not None and compared.difference > ROUNDING


def _verdict(found: list[Compared], overridden: bool) -> str:
    steps = "1 step" if len(found) == 1 else f"{len(found)} steps"
    different = [compared.step.version for compared in found if _differs(compared)]
    if overridden:
        return f"{steps} replayed under another configuration; {len(different)} came out otherwise than logged"
    if different:
        return (
            f"{len(different)} of {steps} came out otherwise than logged, the first one version {different[0]}: the "
            f"code, the configuration or the machine is not the one that trained this run"
        )
    exact = sum(compared.difference == 0 for compared in found)
    return f"{steps} replayed as logged, {exact} of them equal to the bit"
