"""`report.html`: a run as one page to send to somebody. No network, no library: inline SVG, CSS, 20 lines of JS.

Drawn from metrics.jsonl, config.toml, summary.json and three rollouts of the store; what was not measured is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from stretto.config import Config, dump, load_run
from stretto.records import Rollout
from stretto.watch import conversation, estimate, figures
from stretto.watch.closing import rows, sentences
from stretto.watch.display import pause, size
from stretto.watch.metrics import read
from stretto.watch.summary import Line, of_kind
from stretto.weights.store import Store

SOURCES = 12
"""How many rollouts are tried, at most, to find one whose payload is still there."""


def write(run: Path) -> Path:
    """Draw the report of a run, finished or not; `summary.json` must be there. Returns the page's path."""
    config = load_run(run)
    tree = json.loads((run / "summary.json").read_text())
    path = run / "report.html"
    lines = read(run / "metrics.jsonl")
    path.write_text(page(lines, config, tree, rollouts(lines, Store(config.store_url))))
    return path


def page(lines: Sequence[Line], config: Config, summary: dict[str, Any], talks: Sequence[tuple[str, Rollout]]) -> str:
    parts = [
        _head(lines, config, summary),
        _alarms(summary["alarms"]),
        figure(
            "Solve rate",
            "Held-out tasks with 95 % intervals over tasks; the batches trained on, behind them.",
            figures.solve_rate(lines),
        ),
        figure(
            "Rollouts, learning and delivery overlap",
            "Each lane is a process. Engines generate while the trainer learns; new weights arrive between two tokens.",
            figures.timeline(lines),
        ),
        pairs(_small(lines, config, summary)),
        _table(summary),
        _talks(talks),
        _foot(config, summary),
    ]
    return document(f"Stretto · {config.run.name}", "".join(parts))


def document(title: str, body: str) -> str:
    """A whole page around the parts of a report."""
    files = resources.files("stretto.watch")
    title = escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{(files / 'report.css').read_text()}</style></head>\n<body><main>\n{body}\n</main>"
        f'<div id="tip" role="tooltip"></div><script>{(files / "report.js").read_text()}</script></body></html>\n'
    )


def rollouts(lines: Sequence[Line], store: Store) -> list[tuple[str, Rollout]]:
    """Three to read, with a title each: the first, a typical failure, a success after training."""
    lines = of_kind(lines, "rollout")
    before = [line for line in lines if str(line.get("purpose")).startswith("before")]
    early = before or lines[: len(lines) // 3 + 1]
    after = [line for line in lines if str(line.get("purpose")).startswith("after")]
    failures = [line for line in early if not line.get("solved") and line.get("outcome") != "infra"]
    middle = sorted(line.get("turns") or 0 for line in failures)[len(failures) // 2] if failures else 0
    failures.sort(key=lambda line: (line.get("outcome") != "scored", abs((line.get("turns") or 0) - middle)))
    successes = [line for line in after or lines[2 * len(lines) // 3 :] if line.get("solved")]
    successes.sort(key=lambda line: -(line.get("behaviour") or {}).get("retried", 0))  # one that recovered, if any
    found: list[tuple[str, Rollout]] = []
    for title, choice in (
        ("The first rollout", lines),
        ("A typical failure before training", failures),
        ("A success after training", successes),
    ):
        seen = {rollout.id for _, rollout in found}
        for line in [line for line in choice if line.get("rollout") not in seen][:SOURCES]:
            rollout = conversation.load(store, str(line.get("key", "")))
            if rollout is not None and rollout.messages:
                found.append((title, rollout))
                break
    return found


# Parts of the page


def _head(lines: Sequence[Line], config: Config, summary: dict[str, Any]) -> str:
    rate = summary["solve_rate"]
    when = f"{datetime.fromtimestamp(lines[0]['time']):%d %B %Y}" if lines else ""
    control = "" if config.grading.control == "none" else f" · control run: rewards {config.grading.control}d"
    hero = ""
    if rate["before"] is not None and rate["after"] is not None:
        interval = ""
        if rate["ci95"]:
            low, high = rate["ci95"]
            interval = f'<span class="muted">95 % interval {100 * low:+.1f} to {100 * high:+.1f}</span>'
        hero = (
            f'<div class="rate">{_number(rate["before"])}<span class="arrow">→</span>'
            f"<b>{_number(rate['after'])}</b></div>"
            f'<div class="gain">of {rate["tasks"]} held-out tasks solved: <b>{100 * rate["gain"]:+.1f} points</b> '
            f"{interval}</div>"
        )
    elif summary["steps"]:
        hero = f'<div class="rate"><b>{summary["steps"]}</b> <small>of {config.trainer.steps} steps</small></div>'
    tiles = "".join(
        f'<div class="tile"><b>{value}</b><span>{escape(text)}</span></div>' for value, text in _tiles(summary)
    )
    return (
        f"<header><h1>Stretto <span class='muted'>· {escape(config.run.name)} · {when}{control}</span></h1>"
        f'<button id="theme" type="button">light / dark</button></header>'
        f'<section class="hero"><div>{hero}</div><div class="tiles">{tiles}</div></section>\n'
    )


def _alarms(alarms: Sequence[str]) -> str:
    """What the run complained about, each once; nothing where it did not."""
    items = "".join(f"<li>{escape(text)}</li>" for text in dict.fromkeys(alarms))
    return figure("Alarms", "What was not as it should be, in order.", f"<ul>{items}</ul>" if items else "")


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str]]:
    tiles: list[tuple[str, str]] = []
    if summary["steps"]:
        tiles.append((f"{summary['rollouts_trained']:,}", f"rollouts trained on in {summary['steps']} steps"))
    if summary["train_s"]:
        tiles.append(
            (estimate.exactly(summary["train_s"]), f"of training, {estimate.exactly(summary['wall_s'])} in all")
        )
    idle, staleness, weights = summary["idle"], summary["staleness"], summary["weights"]
    if idle["trainer"] is not None and idle["engine"] is not None:
        tiles.append((f"{idle['trainer']:.0%} · {idle['engine']:.0%}", "idle: trainer · engines"))
    if staleness["max"] is not None:
        tiles.append(
            (f"{staleness['max']} ≤ {staleness['bound']}", f"oldest rollout in versions; mean {staleness['mean']:.2f}")
        )
    if weights["ratio_median"] is not None:
        tiles.append((f"{weights['ratio_median']:.1f} ×", f"smaller: {size(weights['bytes_delta_median'])} a version"))
    if weights["pause_s_p50"] is not None:
        tiles.append((pause(weights["pause_s_p50"]), "pause per swap of weights, median"))
    return tiles


def _small(lines: Sequence[Line], config: Config, summary: dict[str, Any]) -> list[str]:
    share = summary["mismatch"].get("stale_disagreement")
    disagree = f" Without replay {share:.1%} of their rows would choose other experts." if share else ""
    bound = config.rollouts.max_staleness
    cards = [
        ("Staleness", "Age of each rollout at its step, queueing included.", figures.staleness(lines, bound)),
        ("Outcomes", "How each training rollout ended. Only infra leaves the batch.", figures.outcomes(lines)),
        ("Bytes per version", "Only what changed travels, losslessly.", figures.bytes_per_version(lines)),
        ("Pause per swap", "How long generation stood still; the rest happens beside it.", figures.pauses(lines)),
        (
            "Engine against trainer",
            "KL of the same tokens. Under the version that sampled them, both sides compute in float32 here and only "
            f"rounding is left; for older tokens the weights have moved as well.{disagree}",
            figures.mismatch(lines),
        ),
        ("Behaviour", "Shares of held-out rollouts, sampled.", figures.behaviour(summary["behaviour"])),
        (
            "The same codec at the learning rates of large models",
            "Simulated steps on this run's last weights: the smaller the step, the fewer bf16 values change.",
            _rate_table(summary["weights"].get("large_model_rate") or []),
        ),
    ]
    return [figure(title, caption, body, small=True) for title, caption, body in cards]


def figure(title: str, caption: str, body: str, small: bool = False) -> str:
    """A card with a picture; nothing where there is none."""
    if not body:
        return ""
    heading = "h3" if small else "h2"
    return (
        f'<section class="card"><figure><{heading}>{escape(title)}</{heading}>'
        f"<figcaption>{escape(caption)}</figcaption>{body}</figure></section>\n"
    )


def pairs(cards: Sequence[str]) -> str:
    """Cards side by side."""
    return f'<div class="two">{"".join(card for card in cards if card)}</div>\n' if any(cards) else ""


def _rate_table(found: Sequence[dict[str, Any]]) -> str:
    body = "".join(
        f"<tr><td>{row['lr']:.0e}</td><td>{row['changed']:.1%}</td><td>{size(row['bytes'])}</td>"
        f"<td><b>{row['ratio']:.0f} ×</b></td></tr>"
        for row in found
    )
    head = "<tr><th>learning rate</th><th>values changed</th><th>bytes a version</th><th>smaller</th></tr>"
    return f'<div class="scroll"><table>{head}{body}</table></div>' if body else ""


def _table(summary: dict[str, Any]) -> str:
    body = []
    for what, before, after, gain in rows(summary):
        points, _, bounds = gain.partition("  ")
        sign = "up" if points.startswith("+") and points[1:4] != "0.0" else "down" if points.startswith("-") else ""
        interval = f'<span class="ci">{escape(bounds)}</span>' if bounds else ""
        cells = f'<td>{before}</td><td><b>{after}</b></td><td><span class="{sign}">{points}</span>{interval}</td>'
        body.append(f"<tr><td>{escape(what)}</td>{cells}</tr>")
    said = " ".join(sentences(summary))
    if not body:  # no split was evaluated
        return (
            f'<section class="card"><h2>The run in words</h2><p class="sub">{escape(said)}</p></section>\n'
            if said
            else ""
        )
    head = "<tr><th></th><th>before</th><th>after</th><th>gain</th></tr>"
    return (
        '<section class="card"><h2>Before and after</h2>'
        '<p class="sub">Brackets: 95 % interval of the gain, paired bootstrap over tasks.</p>'
        f'<div class="scroll"><table>{head}{"".join(body)}</table></div>'
        f'<p class="sub" style="margin-top:16px">{escape(said)}</p></section>\n'
    )


def _talks(talks: Sequence[tuple[str, Rollout]]) -> str:
    if not talks:
        return ""
    cards = []
    for title, rollout in talks:
        badge = (
            f'<span class="badge {"yes" if rollout.solved else "no"}">{escape(conversation.verdict(rollout))}</span>'
        )
        said = "".join(
            f'<div class="say {piece.kind}"><span>{escape(piece.head)}</span>'
            f"{f'<pre>{escape(piece.body)}</pre>' if piece.body else ''}</div>"
            for piece in conversation.pieces(rollout.messages)
        )
        cards.append(
            f'<section class="card talk"><h3>{escape(title)}</h3><p class="sub">{escape(rollout.task)}, '
            f"{rollout.turns} turns</p>{badge}{said}</section>"
        )
    return f'<h2 style="margin:34px 0 14px">Three rollouts to read</h2><div class="talks">{"".join(cards)}</div>\n'


def _foot(config: Config, summary: dict[str, Any]) -> str:
    served = ", ".join(
        f"{name} from version {entry['first_version']} ({entry['rollouts']:,} rollouts)"
        for name, entry in summary["clusters"].items()
    )
    return (
        f"<footer>{f'<p>Clusters: {escape(served)}.</p>' if served else ''}"
        f"<details><summary>Configuration</summary><pre>{escape(dump(config))}</pre></details>"
        f"<details><summary>summary.json</summary><pre>{escape(json.dumps(summary, indent=2))}</pre></details></footer>"
    )


def _number(rate: float) -> str:
    return f"{100 * rate:.0f}<small> %</small>"
