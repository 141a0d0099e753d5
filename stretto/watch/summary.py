"""`summary.json`: what a run came to, computed from metrics.jsonl and config.toml alone.

What was not measured is null: a split without tasks, a run that is not finished, pass@k with fewer than k attempts. How
rates, intervals and pass@k are computed: `statistics.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.config import Config, load_run
from stretto.watch.large_model import large_model_rate
from stretto.watch.metrics import plain, read
from stretto.watch.shares import busy_shares
from stretto.watch.statistics import interval, mean, paired_interval, pass_at, rates

Line = dict[str, Any]


def write(run: Path) -> Line:
    """Build and write `summary.json`; also measures the codec on the last checkpoint (`large_model`)."""
    tree = build(read(run / "metrics.jsonl"), load_run(run))
    tree["weights"]["large_model_rate"] = large_model_rate(run)
    (run / "summary.json").write_text(json.dumps(plain(tree), indent=2) + "\n")
    return tree


def build(lines: Sequence[Line], config: Config) -> Line:
    """The summary of a run, finished or not; what is not known yet is None."""
    steps = last_of_version(of_kind(lines, "step"))
    training = [line for line in of_kind(lines, "rollout") if line.get("purpose") == "train"]
    spans = training_spans(lines)
    return {
        "name": config.run.name,
        "seed": config.run.seed,
        "control": config.grading.control,
        "wall_s": wall_seconds(lines),
        "train_s": sum(end - start for start, end in spans),
        "steps": len(steps),
        "version": max((step["version"] for step in steps), default=None),
        "rollouts": len(training),
        "rollouts_trained": sum(int(step.get("rollouts") or 0) for step in steps),
        "tokens_trained": sum(int(step.get("trained_tokens") or 0) for step in steps),
        "solve_rate": _solve_rate(lines, "heldout", passes=True),
        "solve_rate_greedy": _solve_rate(lines, "heldout-greedy"),
        "solve_rate_new_templates": _solve_rate(lines, "new_templates", passes=True),
        "solve_rate_new_templates_greedy": _solve_rate(lines, "new_templates-greedy"),
        "behaviour": {when: _behaviour(lines, when) for when in ("before", "after")},
        "outcomes": dict(Counter(str(line.get("outcome")) for line in training)),
        "staleness": _staleness(steps, config.rollouts.max_staleness),
        "busy": busy_shares(of_kind(lines, "busy"), spans),
        "idle": {"trainer": _idle_trainer(lines, spans), "engine": _idle_engine(lines, spans)},
        "weights": _weights(lines),
        "mismatch": {
            tokens + key: _mean(line.get(tokens + key) for line in of_kind(lines, "mismatch"))
            for tokens in ("", "stale_")
            for key in ("k3", "k3_without_replay", "disagreement")
        },
        "alarms": [str(line.get("text")) for line in of_kind(lines, "event") if line.get("alarm")],
        "clusters": clusters(lines),
    }


# Solve rates


def evaluation(lines: Sequence[Line], name: str) -> Line | None:
    """The last result of an evaluation: `before-heldout`, `after-new_templates-greedy`, `during-000010`."""
    found = [line for line in of_kind(lines, "eval") if line.get("name") == name and rates(line)]
    return found[-1] if found else None


def _solve_rate(lines: Sequence[Line], split: str, passes: bool = False) -> Line:
    before, after = evaluation(lines, f"before-{split}"), evaluation(lines, f"after-{split}")
    tree: Line = {"before": None, "after": None, "gain": None, "ci95": None, "tasks": None}
    for when, line in (("before", before), ("after", after)):
        if line:
            tree[when] = mean(rates(line))
            tree[f"{when}_ci95"] = interval(rates(line))
            tree["tasks"], tree["attempts"] = len(line["solved"]), line["attempts"]
        if passes:
            tree[f"pass_at_4_{when}"] = pass_at(4, line) if line else None
    if before and after:
        tree["gain"] = tree["after"] - tree["before"]
        if rates(before).keys() & rates(after).keys():
            tree["ci95"] = paired_interval(rates(before), rates(after))
    return tree


def _behaviour(lines: Sequence[Line], when: str) -> Line:
    line = evaluation(lines, f"{when}-heldout")
    return dict(line.get("behaviour") or {}) if line else {}


# Time


def wall_seconds(lines: Sequence[Line]) -> float:
    """From start to end; where a run was resumed, the time between does not count."""
    total, start, last = 0.0, None, None
    for line in lines:
        if line["kind"] == "stage" and line.get("name") == "starting" and start is not None and last is not None:
            total += last - start
            start = None
        start = line["time"] if start is None else start
        last = line["time"]
    return total + (last - start if start is not None and last is not None else 0.0)


def training_spans(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """[start, end) of each stretch of training, unix seconds: one, or more where the run was resumed."""
    steps = of_kind(lines, "step")
    spans: list[tuple[float, float]] = []
    start: float | None = None
    for line in lines:
        if line["kind"] != "stage":
            continue
        if line.get("name") == "training":
            start = line["time"]
        elif start is not None:
            spans.append((start, line["time"]))
            start = None
    if start is not None:
        spans.append((start, lines[-1]["time"]))
    if not spans and steps:
        spans = [(steps[0]["time"] - _seconds(steps[0]), steps[-1]["time"])]
    # a stretch ends with its last step: what follows is waiting for the end
    return [(a, max([s["time"] for s in steps if a <= s["time"] <= b], default=a)) for a, b in spans]


def _seconds(step: Line) -> float:
    return sum(value or 0.0 for value in (step.get("seconds") or {}).values())


def _idle_trainer(lines: Sequence[Line], spans: Sequence[tuple[float, float]]) -> float | None:
    """Share of training time in which the trainer waited for a batch."""
    waits = [line for line in of_kind(lines, "busy") if line["process"] == "trainer" and line.get("what") == "wait"]
    total = sum(b - a for a, b in spans)
    return sum(_overlap(line, spans) for line in waits) / total if waits and total else None


def _idle_engine(lines: Sequence[Line], spans: Sequence[tuple[float, float]]) -> float | None:
    """Mean share of training time in which the engines computed nothing, each from when it first served."""
    busy: dict[str, float] = {}
    first: dict[str, float] = {}
    engines = {line["name"] for line in of_kind(lines, "service") if line.get("role") == "engine"}
    for line in of_kind(lines, "busy"):
        name = line["process"]
        if name in engines or (not engines and "engine" in name):
            first.setdefault(name, line["start"])
            busy[name] = busy.get(name, 0.0) + _overlap(line, spans) * float(line.get("share", 1.0))
    present = {name: sum(max(0.0, b - max(a, first[name])) for a, b in spans) for name in busy}
    total = sum(present.values())
    return max(0.0, 1.0 - sum(busy.values()) / total) if total else None


def _overlap(line: Line, spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of [start, end) that lie in the spans."""
    return sum(max(0.0, min(line["end"], b) - max(line["start"], a)) for a, b in spans)


# The rest


def _staleness(steps: Sequence[Line], bound: int) -> Line:
    ages = [int(age) for step in steps for age in step.get("staleness") or []]
    oldest = max(ages, default=None)
    return {
        "mean": _mean(ages),
        "max": oldest,
        "bound": bound,
        "max_over_bound": None if oldest is None else oldest - bound,
        "histogram": {str(age): count for age, count in sorted(Counter(ages).items())},
    }


def _weights(lines: Sequence[Line]) -> Line:
    published = of_kind(lines, "publish")
    deltas = [line for line in published if line.get("form") == "delta" and line.get("bytes")]
    pauses = [float(line["pause_s"]) for line in of_kind(lines, "swap") if line.get("pause_s") is not None]
    return {
        "versions": len({line["version"] for line in published}),
        "bytes_full": published[-1].get("bytes_full") if published else None,
        "bytes_delta_median": float(np.median([line["bytes"] for line in deltas])) if deltas else None,
        "ratio_median": float(np.median([line["bytes_full"] / line["bytes"] for line in deltas])) if deltas else None,
        "pause_s_p50": float(np.median(pauses)) if pauses else None,
    }


def clusters(lines: Sequence[Line]) -> dict[str, Line]:
    """Per cluster: the first and last version it served, and the rollouts it served."""
    urls = {line["url"]: str(line["cluster"]) for line in of_kind(lines, "service") if line.get("role") == "engine"}
    tree: dict[str, Line] = {}
    for line in of_kind(lines, "swap"):
        entry = tree.setdefault(str(line["cluster"]), {"first_version": line["version"], "rollouts": 0})
        entry["last_version"] = line["version"]
    for line in of_kind(lines, "rollout"):
        cluster = urls.get(str(line.get("engine")))
        if cluster in tree:
            tree[cluster]["rollouts"] += 1
    return dict(sorted(tree.items()))


def of_kind(lines: Iterable[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def last_of_version(lines: Iterable[Line]) -> list[Line]:
    """One line per version, in order: a step repeated after a restart counts once."""
    return [line for _, line in sorted({int(line["version"]): line for line in lines}.items())]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None
