"""report.html: one file that needs nothing else, at any state of a run."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stretto.watch import figures, report, summary
from stretto.watch.charts import decades, ticks, whole
from stretto.watch.metrics import Metrics

VOID = {"meta", "link", "img", "br", "input", "circle", "line", "rect", "path", "polyline"}


class Checker(HTMLParser):
    """Every tag is closed in order; remembers attributes that would load something, and the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loads == []
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", _without_data(page))
    return checker


def _without_data(page: str) -> str:
    """The page without what the run itself says (configuration, numbers, rollouts), where a URL is only text."""
    return re.sub(r"<pre>.*?</pre>", "", page, flags=re.S)


def test_a_finished_run(run: Path) -> None:
    summary.write(run)
    path = report.write(run)
    page = path.read_text()
    found = checked(page)
    assert found.tags.count("svg") == 8
    for heading in ("Solve rate", "Staleness", "Bytes per version", "Pause per swap", "Before and after", "Behaviour"):
        assert f">{heading}</h" in page
    for title in ("The first rollout", "A typical failure before training", "A success after training"):
        assert title in page
    assert len(page) < 600_000
    assert "nan" not in re.sub(r"<pre>.*?</pre>|[a-z]*nan[a-z]+", "", page, flags=re.S)


def test_numbers_in_the_page_are_those_of_the_summary(run: Path) -> None:
    summary.write(run)
    tree = json.loads((run / "summary.json").read_text())
    page = report.write(run).read_text()
    assert f"{100 * tree['solve_rate']['gain']:+.1f} points" in page
    assert f"{tree['rollouts_trained']:,}" in page


@pytest.mark.parametrize("keep", [0, 1, 5, 40, 400, 2000])
def test_an_unfinished_run(run: Path, tmp_path: Path, keep: int) -> None:
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:keep]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"time": 17')
    summary.write(tmp_path)
    checked(report.write(tmp_path).read_text())


def test_a_run_without_held_out_tasks(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes((run / "config.toml").read_bytes())
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if '"kind":"eval"' not in line))
    summary.write(tmp_path)
    page = report.write(tmp_path).read_text()
    checked(page)
    assert "Before and after" not in page and ">Solve rate</h" in page and "30 steps on 3,840 rollouts" in page


def test_a_version_with_a_delta_and_an_anchor_shows_both() -> None:
    def publish(version: int, form: str, count: float) -> dict:
        line = {"time": 1.0, "process": "trainer", "kind": "publish", "version": version, "form": form, "changed": 0.5}
        return {**line, "bytes": count, "bytes_full": 1e6}

    lines = [publish(0, "anchor", 1e6), publish(1, "delta", 2e5), publish(2, "delta", 1e5), publish(2, "anchor", 1e6)]
    page = figures.bytes_per_version(lines)
    tips = re.findall(r'data-tip="(version [^:]*)', page)
    assert tips == [
        "version 0, anchor",
        "version 1, delta",
        "version 2, anchor",
        "version 2, delta",
    ]  # in drawing order


def test_text_of_a_run_is_not_markup(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        (run / "config.toml").read_text().replace('system_prompt = ""', 'system_prompt = "<script>alert(1)</script>"')
    )
    swaps = Metrics(tmp_path / "metrics.jsonl", "follower")
    swaps.log("swap", cluster='"><script>', version=1, pause_s=0.01)
    summary.write(tmp_path)
    page = report.write(tmp_path).read_text()
    assert "<script>alert" not in page and '"><script>' not in page
    assert checked(page).tags.count("script") == 1


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.37), (0, 30), (3, 1234), (-1, 1), (0, 2.3e6), (0, 1e-7)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 3 <= len(found) <= 8 and low <= found[0] and found[-1] <= high * (1 + 1e-9)
    steps = {round((b - a) / (found[1] - found[0]), 6) for a, b in itertools.pairwise(found)}
    assert steps == {1.0}


def test_ticks_of_degenerate_ranges() -> None:
    assert ticks(2, 2) == [2] and whole(0, 1) == [0, 1] and whole(0, 3) == [0, 1, 2, 3]
    assert whole(0, 30) == [0, 10, 20, 30] and whole(0, 30, 11) == [0, 5, 10, 15, 20, 25, 30]
    assert decades(1e-3, 10) == pytest.approx([1e-3, 1e-2, 0.1, 1, 10])
