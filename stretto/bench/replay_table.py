"""What `stretto bench replay` prints: three tables, and each check with its limit."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

LIMITS: dict[str, tuple[str, float]] = {
    "k3_removed": ("at least", 0.9),
    "disagreement_removed": ("at least", 1.0),
    "tail_removed_by_replay": ("", 0.0),
    "step_time_cost": ("at most", 0.05),
    "engine_cost": ("at most", 0.05),
    "corrupt_k3_over_clean": ("at most", 3.0),
    "shift_alarm": ("at least", True),
    "exact_max_abs_dlogp": ("at most", 0.0),
    "exact_cost": ("at most", 2.0),
}
"""What each check should be; one without words is only shown."""

MEANING = {
    "k3_removed": "share of k3 gone, from no replay to ordered",
    "disagreement_removed": "share of rows with other experts gone, from no replay to ordered",
    "tail_removed_by_replay": "share of p99.9 |Δ log-prob| gone by replay alone",
    "step_time_cost": "training step, ordered over no replay",
    "engine_cost": "tokens/s lost to recording and sending routes",
    "corrupt_k3_over_clean": "k3 with 2 % random rows over clean, replay + filter",
    "shift_alarm": "routes moved by one token raise the alarm",
    "exact_max_abs_dlogp": "exact, random schedules, float32 and bf16",
    "exact_cost": "training step, exact over ordered",
}


def show(result: dict[str, Any], console: Console) -> None:
    console.print(_agreement(result))
    console.print(_routes(result))
    console.print(_filter(result))
    console.print(_costs(result))
    sizes = result["bytes_per_token"]
    console.print(f"Routes take {sizes['raw']:.1f} B a token, {sizes['wire']:.1f} B on the wire.")
    for name, value in result["checks"].items():
        console.print(f"{_verdict(name, value):>8}  {name} = {_plain(value)}: {MEANING[name]}{_limit(name)}")


def met(name: str, value: float | bool) -> bool | None:
    """None where nothing is asked."""
    words, limit = LIMITS[name]
    if not words:
        return None
    return value >= limit if words == "at least" else value <= limit


def _verdict(name: str, value: float | bool) -> str:
    return {None: "", True: "met", False: "NOT MET"}[met(name, value)]


def _limit(name: str) -> str:
    words, limit = LIMITS[name]
    return f" ({words} {_plain(limit)})" if words else ""


def _plain(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}"


def _agreement(result: dict[str, Any]) -> Table:
    title = f"Trainer against engine, {result['sampled_tokens']:,} tokens of {result['rollouts']} rollouts"
    table = _table(title, "engine, lag", "trainer")
    for name in ("k1", "k3", "mean |Δ|", "p99", "p99.9", "max", "mean |Δp|", "F(2)"):
        table.add_column(name, justify="right", no_wrap=True)
    keys = ("k1", "k3", "mean_dlogp", "p99_dlogp", "p999_dlogp", "max_dlogp", "mean_dp")
    last = None
    for row in result["rows"]:
        here = (row["engine"], row["lag"])
        if last is not None and here != last:
            table.add_section()
        label = "" if here == last else f"{row['engine']}, {row['lag']}"
        table.add_row(label, row["variant"], *(_short(row[key]) for key in keys), f"{row['f2']:.2%}")
        last = here
    return table


def _routes(result: dict[str, Any]) -> Table:
    table = _table("Experts: share of (token, layer) rows", "engine, lag", "trainer")
    for name in ("other experts used", "own choice differs", "replaced", "covered"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        shares = [row[key] for key in ("used_differ", "disagreement", "replaced", "coverage")]
        words = ["–" if share is None else f"{share:.3%}" for share in shares]
        table.add_row(f"{row['engine']}, {row['lag']}", row["variant"], *words)
    return table


def _filter(result: dict[str, Any]) -> Table:
    table = _table("Plausibility filter: k3 (and share of rows replaced), bf16 engine, float32 trainer", "ratio")
    names = {"clean": "clean", "corrupt": "2 % random rows", "shift": "off by one token", "stale": "clean, lag 4"}
    for words in names.values():
        table.add_column(words, justify="right")
    for line in result["filter"]:
        cells = [f"{_short(line[key]['k3'])} ({line[key]['replaced']:.2%})" for key in names]
        table.add_row(f"{line['ratio']:g}", *cells)
    return table


def _costs(result: dict[str, Any]) -> Table:
    table = _table("Cost, CPU seconds in one thread, medians of interleaved rounds", "what", "case")
    table.add_column("seconds", justify="right")
    table.add_column("time relative", justify="right")
    for what, key in (("training step", "step"), ("engine", "engine")):
        for name, cost in result[key].items():
            table.add_row(what, name, f"{cost['seconds']:.3f}", f"{cost['relative']:.3f}")
    return table


def _table(title: str, *labels: str) -> Table:
    table = Table(title=title)
    for label in labels:
        table.add_column(label, no_wrap=True)
    return table


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+00", "")
