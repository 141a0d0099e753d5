"""The report's pictures, each from metrics lines to HTML; "" where nothing was measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from stretto.watch import statistics, summary
from stretto.watch.charts import Plot, legend, whole
from stretto.watch.closing import BEHAVIOUR
from stretto.watch.display import pause, size
from stretto.watch.summary import Line, last_of_version, of_kind

TIMELINE_STEPS = 40
LANE = (0.28, 0.92)
"""Where a process's bar lies within its row of the timeline; names of versions stand above it."""
OUTCOMES = ("solved", "not solved", "truncated", "fault", "void", "infra")


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def solve_rate(lines: Sequence[Line]) -> str:
    """Training batches light, held-out tasks strong with 95 % intervals, over versions."""
    batches = [
        (int(s["version"]) - 1, float(s["solve_rate"]))
        for s in last_of_version(of_kind(lines, "step"))
        if s.get("solve_rate") is not None
    ]
    series = {
        "heldout": _evaluations(lines, "heldout", 0.0, above=True),
        "new": _evaluations(lines, "new_templates", 0.0, above=True),
        "greedy": _evaluations(lines, "heldout", 0.0, above=False),
    }
    if not batches and not any(series.values()):
        return ""
    last = max([v for v, _ in batches] + [v for points in series.values() for v, *_ in points] + [1])
    top = max([r for _, r in batches] + [high for points in series.values() for *_, high, _ in points] + [0.1])
    top = min(1.0, 0.1 * int(top * 10 + 1.2))
    plot = Plot("solve rate over versions", (-0.02 * last, 1.02 * last), (0.0, top), width=1080, height=380, bottom=40)
    plot.axes(percent, x_title="policy version", x_ticks=whole(0, last, 11))
    plot.parts.append('<g class="soft">')
    for version, rate in batches:
        plot.dot(version, rate, "c-batch", 3, f"batch for version {version + 1}: {rate:.1%} solved")
    if len(batches) > 3:
        plot.line(_smooth(batches), "c-batch")
    plot.parts.append("</g>")
    for key, cls, name in (
        ("new", "c2", "new templates, sampled"),
        ("greedy", "c1 hollow", "held-out, greedy"),
        ("heldout", "c1", "held-out, sampled"),
    ):
        points = series[key]
        shift = {"new": 0.004, "greedy": -0.004, "heldout": 0.0}[key] * last  # so that whiskers don't cover each other
        if len(points) > 1:
            plot.line(
                [(v + shift, rate) for v, rate, *_ in points], f"{cls} {'dash' if key != 'heldout' else 'strong'}"
            )
        for version, rate, low, high, tasks in points:
            tip = f"{name}, version {version}: {rate:.1%} [{low:.1%}, {high:.1%}] on {tasks} tasks"
            plot.whisker(version + shift, low, high, cls, tip)
            plot.dot(version + shift, rate, cls, 6 if key == "heldout" else 5, tip)
        for version, rate, *_ in points[:1] + points[-1:]:
            side = 1 if version == 0 else -1
            plot.text(
                version + shift, rate, percent(rate), f"value {cls}", "start" if side > 0 else "end", 11 * side, 4.5
            )
    names = [
        ("c1", "held-out tasks, sampled"),
        ("c1 hollow", "held-out, greedy"),
        ("c2", "templates never trained on"),
        ("c-batch", "training batches"),
    ]
    return legend(names) + _wide(plot.svg())


def timeline(lines: Sequence[Line]) -> str:
    """Who was busy when: trainer, its publishing, engines with their swaps, workers."""
    steps = last_of_version(of_kind(lines, "step"))
    busy = of_kind(lines, "busy")
    if not steps or not busy:
        return ""
    spans = summary.training_spans(lines)
    start, end = spans[-1] if spans[-1][1] > spans[-1][0] else spans[0]
    inside = [step for step in steps if start <= step["time"] <= end]
    if len(inside) > TIMELINE_STEPS:
        at = (len(inside) - TIMELINE_STEPS) // 2
        start, end = inside[at]["time"], inside[at + TIMELINE_STEPS]["time"]
    clusters = {
        line["name"]: str(line["cluster"]) for line in of_kind(lines, "service") if line.get("role") == "engine"
    }
    engines = sorted({b["process"] for b in busy if b["process"] in clusters or b["process"].endswith("engine")})
    workers = sorted({b["process"] for b in busy if b["process"].startswith("worker")})
    rows = ["trainer", "publishing", *engines, *workers]
    plot = Plot(
        "timeline of training",
        (0.0, max(end - start, 1e-3)),
        (float(len(rows)), 0.0),
        width=1080,
        height=50 * len(rows) + 56,
        left=132,
        top=22,
        bottom=40,
    )
    plot.axes(y_ticks=(), x_format=lambda s: f"{s:g} s", count=9, x_title="seconds of training")
    for index, row in enumerate(rows):
        plot.parts.append(
            f'<text class="row" x="{plot.left - 12}" y="{plot.py(index + 0.6) + 4:.1f}" text-anchor="end">{row}</text>'
        )
        plot.bar(0, plot.x[1], index + LANE[0], index + LANE[1], "lane")
        if row in ("trainer", "publishing"):
            kinds = ("publish",) if row == "publishing" else ("compute", "wait")
            found = [b for b in busy if b["process"] == "trainer" and b.get("what") in kinds]
        else:
            found = [b for b in busy if b["process"] == row]
        for span in _merged(found):
            a, b = max(span["start"], start), min(span["end"], end)
            if b > a:
                what, share = str(span.get("what", "busy")), min(1.0, float(span.get("share", 1.0)))
                cls = {"compute": "t-compute", "wait": "t-wait", "publish": "t-publish"}.get(what)
                cls = cls or ("t-engine" if row in engines else "t-worker")
                tip = f"{row}: {what}, {b - a:.2f} s" + (f", {share:.0%} busy" if "share" in span else "")
                plot.bar(a - start, b - start, index + LANE[0], index + LANE[1], cls, tip, 0.12 + 0.88 * share)
        if row in engines:
            cluster = clusters.get(row, row.removesuffix("-engine"))
            _swaps(plot, [s for s in of_kind(lines, "swap") if s["cluster"] == cluster], index, start, end)
    names = [("t-compute", "learning"), ("t-wait", "waiting for a batch"), ("t-publish", "publishing a version")]
    names += [
        ("t-engine", "generating (darker: fuller)"),
        ("t-worker", "rollouts in flight"),
        ("t-swap", "new weights swapped in"),
    ]
    return legend(names) + _wide(plot.svg())


def staleness(lines: Sequence[Line], bound: int) -> str:
    """Age of trained rollouts at their step, as shares, with the bound."""
    ages = [int(age) for step in last_of_version(of_kind(lines, "step")) for age in step.get("staleness") or []]
    if not ages:
        return ""
    most = max(bound, *ages)
    shares = [ages.count(age) / len(ages) for age in range(most + 1)]
    plot = Plot("staleness", (-0.6, 1.25 * most + 1.2), (0.0, max(shares) * 1.12))
    plot.axes(percent, x_title="age in versions when trained", x_ticks=range(most + 1))
    for age, share in enumerate(shares):
        plot.bar(
            age - 0.36, age + 0.36, 0, share, "c1" if age <= bound else "bad", f"age {age}: {share:.1%} of rollouts"
        )
        if share:
            plot.text(age, share, percent(share), anchor="middle", dy=-5)
    plot.mark(bound + 0.6, f"bound {bound}", "bad")
    return plot.svg()


def bytes_per_version(lines: Sequence[Line]) -> str:
    """What each version cost to send, beside the full size. One that got a delta and an anchor has two bars."""
    found = {(int(line["version"]), str(line["form"])): line for line in of_kind(lines, "publish")}
    published = [found[key] for key in sorted(found)]  # an anchor comes before its version's delta, hence behind it
    if not published:
        return ""
    full = max(float(line["bytes_full"]) for line in published)
    last = max(int(line["version"]) for line in published)
    plot = Plot("bytes per version", (-0.8, last + 0.8), (0.0, full * 1.12), left=62)
    plot.axes(size, x_title="policy version", x_ticks=whole(0, last))
    for line in published:
        version, count = int(line["version"]), float(line["bytes"])
        ratio = f", {float(line['bytes_full']) / count:.1f} × smaller" if count else ""
        cls = "c-anchor" if line["form"] == "anchor" else "c1"  # a skip delta is a delta
        changed = float(line.get("changed") or 0)
        tip = f"version {version}, {line['form']}: {size(count)}{ratio}, {changed:.0%} of values changed"
        plot.bar(version - 0.4, version + 0.4, 0, count, cls, tip)
    plot.level(full, f"all weights, {size(full)}")
    return plot.svg() + legend([("c1", "delta"), ("c-anchor", "anchor (all weights)")])


def pauses(lines: Sequence[Line]) -> str:
    """How long generation stood still per swap."""
    swaps = [line for line in of_kind(lines, "swap") if line.get("pause_s") is not None]
    if not swaps:
        return ""
    names = sorted({str(line["cluster"]) for line in swaps})
    top = max(float(line["pause_s"]) for line in swaps) * 1000
    last = max(int(line["version"]) for line in swaps)
    plot = Plot("pause per swap", (-0.8, last + 0.8), (0.0, top * 1.15 or 1.0))
    plot.axes(lambda ms: pause(ms / 1000) if ms else "0", x_title="policy version", x_ticks=whole(0, last))
    for line in swaps:
        ms, cls = float(line["pause_s"]) * 1000, f"c{1 + names.index(str(line['cluster'])) % 4}"
        fetch = (
            f"; fetched in {float(line.get('fetch_s') or 0):.2f} s, applied in {float(line.get('apply_s') or 0):.2f} s"
        )
        plot.dot(
            int(line["version"]), ms, cls, 4, f"{line['cluster']}, version {line['version']}: {pause(ms / 1000)}{fetch}"
        )
    return plot.svg() + legend([(f"c{1 + index % 4}", name) for index, name in enumerate(names)])


MISMATCH = {
    "k3": ("c1", "same version, with replay"),
    "k3_without_replay": ("c2", "same version, without"),
    "stale_k3": ("c3", "older tokens, with replay"),
    "stale_k3_without_replay": ("c4", "older tokens, without"),
}
"""Metrics of a `mismatch` line, with their colour and their words."""


def mismatch(lines: Sequence[Line]) -> str:
    """KL between what the engine sampled from and what the trainer computes, with and without replay: under the very
    version that sampled (numerics alone), and under newer weights (staleness as well)."""
    measured = last_of_version(of_kind(lines, "mismatch"))
    series = {key: [(m["version"], abs(m[key])) for m in measured if m.get(key)] for key in MISMATCH}
    values = [value for points in series.values() for _, value in points]
    if not values:
        return ""
    low, high = min(values) / 2, max(values) * 2
    last = max(int(m["version"]) for m in measured)
    plot = Plot("mismatch", (0, last * 1.05), (10.0 ** _floor10(low), 10.0 ** (_floor10(high) + 1)), log=True, left=58)
    plot.axes(lambda value: f"{value:.0e}".replace("e-0", "e-"), x_title="policy version", x_ticks=whole(0, last))
    for key, (cls, words) in reversed(MISMATCH.items()):
        plot.line(series[key], f"{cls} strong")
        for version, value in series[key]:
            plot.dot(version, value, cls, 4, f"version {version}, {words}: {value:.2e}")
    return plot.svg() + legend(list(MISMATCH.values()))


def outcomes(lines: Sequence[Line]) -> str:
    """How training rollouts ended, as shares, by the version that sampled them."""
    counts: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(OUTCOMES, 0))
    for line in of_kind(lines, "rollout"):
        version = line.get("newest_version")
        if line.get("purpose") != "train" or version is None or version < 0:
            continue
        outcome = str(line.get("outcome"))
        counts[int(version)]["solved" if line.get("solved") else "not solved" if outcome == "scored" else outcome] += 1
    if not counts:
        return ""
    last = max(counts)
    plot = Plot("outcomes", (-0.6, last + 0.6), (0.0, 1.0))
    plot.axes(percent, x_title="version that sampled", x_ticks=whole(0, last))
    for version, found in sorted(counts.items()):
        total, at = sum(found.values()), 0.0
        for name in OUTCOMES:
            share = found[name] / total
            if share:
                plot.bar(
                    version - 0.46,
                    version + 0.46,
                    at,
                    at + share,
                    _outcome(name),
                    f"version {version}: {found[name]} {name}, {share:.0%}",
                )
            at += share
    seen = [name for name in OUTCOMES if any(found[name] for found in counts.values())]
    return plot.svg() + legend([(_outcome(name), name) for name in seen])


def behaviour(tree: Line) -> str:
    """Shares of held-out rollouts that read, tested and retried: before (hollow) and after (full)."""
    before, after = tree["before"], tree["after"]
    keys = [key for key in BEHAVIOUR if key in before or key in after]
    if not keys:
        return ""
    plot = Plot("behaviour", (0.0, 1.0), (float(len(keys)), 0.0), height=64 * len(keys) + 50, left=14, right=52)
    plot.axes(y_ticks=(), x_format=percent, count=5)
    for index, key in enumerate(keys):
        row = index + 0.62
        plot.text(0, index, BEHAVIOUR[key], "row", dy=20)
        plot.bar(0, 1, row - 0.02, row + 0.02, "lane")
        a, b = before.get(key), after.get(key)
        if a is not None and b is not None:
            plot.bar(min(a, b), max(a, b), row - 0.05, row + 0.05, "c1 span")
        if a is not None:
            plot.dot(a, row, "c1 hollow", 6, f"before: {a:.0%}")
        if b is not None:
            plot.dot(b, row, "c1", 6, f"after: {b:.0%}")
            plot.text(b, row, percent(b), dx=12, dy=4.5)
    return plot.svg() + legend([("c1 hollow", "before"), ("c1", "after")])


def _evaluations(
    lines: Sequence[Line], split: str, greedy: float, above: bool
) -> list[tuple[int, float, float, float, int]]:
    """(version, rate, low, high, tasks) of a split's evaluations, sampled (`above`) or greedy, by version."""
    found: dict[str, Line] = {}
    for line in of_kind(lines, "eval"):
        if (
            line.get("split") == split
            and line.get("solved")
            and (float(line.get("temperature") or 0) > greedy) == above
        ):
            found[str(line.get("name"))] = line
    points = []
    for line in found.values():
        values = statistics.rates(line)
        if not values:
            continue
        low, high = statistics.interval(values)
        points.append((int(line.get("version") or 0), statistics.mean(values), low, high, len(values)))
    return sorted(points)


def _swaps(plot: Plot, swaps: Sequence[Line], index: int, start: float, end: float) -> None:
    """A tick per swap on its engine's lane, and the version where there is room."""
    free_from = 0.0
    for swap in swaps:
        at = float(swap["time"])
        if not start <= at <= end:
            continue
        paused = pause(float(swap.get("pause_s") or 0))
        tip = f"{swap['cluster']} swapped to version {swap['version']}, pause {paused}"
        x = plot.px(at - start)
        plot.parts.append(
            f'<line class="t-swap" x1="{x:.1f}" x2="{x:.1f}" y1="{plot.py(index + 0.06):.1f}" '
            f'y2="{plot.py(index + 0.95):.1f}" data-tip="{tip}"/>'
        )
        if x > free_from:
            plot.put(x + 3, plot.py(index + LANE[0]) - 3, f"v{swap['version']}", "tiny")
            free_from = x + 26


def _merged(spans: Sequence[Line], limit: int = 900) -> list[Line]:
    """Neighbouring spans of a busy process joined until there are at most `limit`, shares averaged over time."""
    spans = sorted(spans, key=lambda span: span["start"])
    while len(spans) > limit:
        pairs = [spans[i : i + 2] for i in range(0, len(spans), 2)]
        spans = [_join(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return list(spans)


def _join(a: Line, b: Line) -> Line:
    lengths = [s["end"] - s["start"] for s in (a, b)]
    busy = sum(length * float(s.get("share", 1.0)) for length, s in zip(lengths, (a, b)))
    return {**a, "end": b["end"], "share": busy / max(b["end"] - a["start"], 1e-9)}


def _smooth(points: Sequence[tuple[int, float]], width: int = 5) -> list[tuple[float, float]]:
    """Running mean over `width` batches, centred."""
    half = width // 2
    rates = [rate for _, rate in points]
    return [
        (version, sum(near) / len(near))
        for index, (version, _) in enumerate(points)
        if (near := rates[max(0, index - half) : index + half + 1])
    ]


def _wide(svg: str) -> str:
    return f'<div class="wide">{svg}</div>'


def _outcome(name: str) -> str:
    return "o-" + name.replace(" ", "-")


def _floor10(value: float) -> int:
    return math.floor(math.log10(value))
