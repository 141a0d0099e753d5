"""`report.html` of a mid-training run: loss, learning rate and what was measured on held-out text, over tokens read.

Drawn from the run's metrics.jsonl alone (`midtrain`, `bits` and `fim` lines), finished or not. A step repeated after a
restart counts once. What was not measured is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from stretto.watch.charts import Format, Plot, legend, ticks
from stretto.watch.metrics import read
from stretto.watch.report import document, figure, pairs
from stretto.watch.summary import Line

COLOURS = ("c1", "c2", "c3", "c4", "c-batch")
"""Of languages, the most seen first; further ones are not drawn."""
DOTS = 600
"""Single steps drawn, at most."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """Metrics in the order of training. `x` is tokens read since the run began."""

    steps: list[Line]
    bits: list[Line]
    fim: list[Line]
    phases: list[tuple[str, float]]  # name, x where it begins


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a mid-training run."""
    path = folder / "metrics.jsonl"
    return (
        path.is_file()
        and not (folder / "config.toml").exists()
        and any(line["kind"] == "midtrain" for line in read(path))
    )


def write(folder: Path) -> Path:
    """Draw the report; returns the page's path. Raises ValueError where it can't be written."""
    path = folder / "report.html"
    try:
        path.write_text(page(read(folder / "metrics.jsonl"), folder.resolve().name))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    return path


def page(lines: Sequence[Line], name: str) -> str:
    run = ordered(lines)
    loss = figure("Loss", "Nats a token that is learnt, of each step; the line is their moving mean.", _loss(run))
    cards = [
        ("Bits per byte", "On held-out text, by language. Vocabularies of any size can be compared.", _bits(run)),
        (
            "Lines written back",
            "Share of held-out spans filled in exactly, the last curve with 95 % intervals.",
            _fim(run),
        ),
        ("Learning rate", "Warm-up, plateau and decay of each phase.", _step(run, "lr", "c3", lambda v: f"{v:.2g}")),
        ("Router balance", "Load of the busiest expert of the worst layer; 1 is a fair share.", _balance(run)),
        ("Gradient norm", "Before clipping.", _step(run, "grad_norm", "c2", lambda v: f"{v:g}")),
        ("Speed", "Tokens a second of each step.", _step(run, "tokens_per_s", "c4", tokens)),
    ]
    small = pairs([figure(title, caption, body, small=True) for title, caption, body in cards])
    return document(f"Stretto · {name}", _head(run, name) + loss + small)


def ordered(lines: Sequence[Line]) -> Run:
    """Each step and measurement once, with `x`."""
    kinds: dict[str, dict[tuple[str, int], Line]] = {"midtrain": {}, "bits": {}, "fim": {}}
    for line in lines:
        if line["kind"] in kinds and isinstance(line.get("step"), int):
            kinds[line["kind"]][str(line.get("phase")), line["step"]] = line
    names = list(dict.fromkeys(phase for phase, _ in kinds["midtrain"]))
    starts, at = [], 0.0
    x: dict[tuple[str, int], float] = {}
    for name in names:
        starts.append((name, at))
        seen = {key: float(line.get("seen") or 0) for key, line in kinds["midtrain"].items() if key[0] == name}
        x |= {key: at + value for key, value in seen.items()}
        at += max(seen.values(), default=0.0)
    sort = [
        [{**line, "x": x[key]} for key, line in sorted(found.items(), key=lambda one: x.get(one[0], 0.0)) if key in x]
        for found in kinds.values()
    ]
    return Run(sort[0], sort[1], sort[2], starts)


def tokens(value: float) -> str:
    """1.2 M, 35 k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def _head(run: Run, name: str) -> str:
    last = run.steps[-1]
    hero = f"<div class='rate'><b>{last['loss']:.2f}</b> <small>nats a token</small></div>"
    if len(run.bits) > 1 and "all" in run.bits[0]:
        first, final = run.bits[0]["all"], run.bits[-1]["all"]
        hero = (
            f'<div class="rate">{first:.2f}<span class="arrow">→</span><b>{final:.2f}</b></div>'
            '<div class="gain">bits per byte of held-out text, first and last measurement</div>'
        )
    speeds = [line["tokens_per_s"] for line in run.steps if line.get("tokens_per_s")]
    tiles = [(tokens(last["x"]), "tokens read"), (f"{len(run.steps):,}", "steps"), (f"{last['loss']:.3f}", "last loss")]
    tiles += [(tokens(statistics.median(speeds)), "tokens a second, median")] if speeds else []
    if run.fim and "all" in run.fim[-1]:
        tiles.append((f"{run.fim[-1]['all']['match']:.1%}", "of held-out spans written back exactly"))
    tiles.append((str(len(run.phases)), "phases: " + ", ".join(name for name, _ in run.phases)))
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{escape(text)}</span></div>' for value, text in tiles)
    return (
        f"<header><h1>Stretto <span class='muted'>· mid-training · {escape(name)}</span></h1>"
        '<button id="theme" type="button">light / dark</button></header>'
        f'<section class="hero"><div>{hero}</div><div class="tiles">{cells}</div></section>\n'
    )


# Pictures


def _plot(
    run: Run, label: str, values: Sequence[float], form: Format, low: float | None = None, wide: bool = False
) -> Plot:
    """Axes over tokens read, with a mark where each phase but the first begins."""
    least, most = min(values) if low is None else low, max(values)
    room = (most - least) * 0.08 or abs(most) * 0.1 or 1.0
    y = (least - (room if low is None else 0.0), most + room)
    width, height = (1080, 340) if wide else (460, 260)
    plot = Plot(label, (0.0, run.steps[-1]["x"]), y, width, height, left=58, bottom=38)
    plot.axes(form, tokens, "tokens read", x_ticks=ticks(0.0, run.steps[-1]["x"], 9 if wide else 5))
    for name, start in run.phases[1:]:
        plot.mark(start, name)
    return plot


def _series(lines: Sequence[Line], key: str) -> Points:
    return [(line["x"], float(line[key])) for line in lines if isinstance(line.get(key), int | float)]


def _thin(points: Points) -> Points:
    """At most DOTS of them, evenly; the last always."""
    stride = -(-len(points) // DOTS)
    return [*points[:-1:stride], *points[-1:]] if points else []


def _loss(run: Run) -> str:
    points = _series(run.steps, "loss")
    if not points:
        return ""
    plot = _plot(run, "loss over tokens", [loss for _, loss in points], lambda v: f"{v:g}", wide=True)
    plot.parts.append('<g class="soft">')
    for x, loss in _thin(points):
        plot.dot(x, loss, "c-batch", 2, f"{tokens(x)} tokens: {loss:.3f}")
    plot.parts.append("</g>")
    plot.line(_thin(list(_smooth(points))), "c1 strong")
    return f'<div class="wide">{plot.svg()}</div>'


def _step(run: Run, key: str, cls: str, form: Format) -> str:
    points = _thin(_series(run.steps, key))
    if not points:
        return ""
    plot = _plot(run, f"{key} over tokens", [value for _, value in points], form, low=0.0)
    plot.line(points, cls)
    return plot.svg()


def _balance(run: Run) -> str:
    points = _thin(_series(run.steps, "busiest"))
    if not points or all(value == 1.0 for _, value in points):  # no experts
        return ""
    plot = _plot(run, "load of the busiest expert", [1.0, *(value for _, value in points)], lambda v: f"{v:g}", low=0.0)
    plot.level(1.0, "fair share")
    plot.line(points, "c1")
    return plot.svg()


def _bits(run: Run) -> str:
    shown = _languages(run.bits)
    series = {name: _series(run.bits, name) for name in shown}
    values = [value for points in series.values() for _, value in points]
    if not values:
        return ""
    plot = _plot(run, "bits per byte over tokens", values, lambda v: f"{v:g}")
    for name, cls in shown.items():
        plot.line(series[name], cls)
        for x, value in series[name]:
            plot.dot(x, value, cls, 3.5, f"{name}, {tokens(x)} tokens: {value:.3f} bits per byte")
    return legend([(cls, name) for name, cls in shown.items()]) + plot.svg()


def _fim(run: Run) -> str:
    shown = _languages(run.fim)
    rows = [(line["x"], name, line[name]) for line in run.fim for name in shown if isinstance(line.get(name), dict)]
    if not rows:
        return ""
    last = [*shown][-1]
    top = [one["ci95"][1] if name == last else one["match"] for _, name, one in rows]
    plot = _plot(run, "exact matches over tokens", top, lambda v: f"{100 * v:.3g} %", low=0.0)
    for number, (name, cls) in enumerate(shown.items()):
        shift = 0.006 * run.steps[-1]["x"] * (number - (len(shown) - 1) / 2)  # so that intervals don't cover each other
        mine = [(x + shift, one) for x, language, one in rows if language == name]
        plot.line([(x, one["match"]) for x, one in mine], cls)
        for x, one in mine:
            tip = f"{name}: {one['match']:.1%} [{one['ci95'][0]:.1%}, {one['ci95'][1]:.1%}] of {one['spans']} spans"
            if number == len(shown) - 1:  # the others' intervals are in their tips
                plot.whisker(x, one["ci95"][0], one["ci95"][1], cls, tip)
            plot.dot(x, one["match"], cls, 3.5, tip)
    return legend([(cls, name) for name, cls in shown.items()]) + plot.svg()


def _languages(lines: Sequence[Line]) -> dict[str, str]:
    """Language -> colour, all of them together last; alone where there is one."""
    known: dict[str, Any] = {}
    for line in lines:
        known |= {name: value for name, value in line.items() if isinstance(value, float | dict) and name != "time"}
    names = [name for name in known if name not in ("all", "x")]
    names = names[: len(COLOURS) - 1] + (["all"] if len(names) > 1 else [])
    return dict(zip(names, COLOURS, strict=False))


def _smooth(points: Points) -> Iterator[tuple[float, float]]:
    """Mean of the steps around each, a twentieth of the run wide."""
    reach = max(1, len(points) // 40)
    for at, (x, _) in enumerate(points):
        near = points[max(0, at - reach) : at + reach + 1]
        yield x, sum(value for _, value in near) / len(near)
