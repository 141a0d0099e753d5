"""Pins that an alarm of a run is seen: while it runs, in its summary, its closing words and its report."""

from __future__ import annotations

import io

from rich.console import Console

from stretto.config import Config
from stretto.watch import closing, report, summary
from stretto.watch.state import RunState

LINES = [
    {"time": 1.0, "process": "trainer", "kind": "event", "text": "a late cluster joined"},
    {"time": 2.0, "process": "trainer", "kind": "event", "text": "step to version 3: <misalignment>", "alarm": True},
    *({"time": 3.0 + n, "process": "trainer", "kind": "event", "text": f"news {n}"} for n in range(6)),
]


def test_an_alarm_outlives_the_events_after_it():
    state = RunState()
    state.absorb(LINES)
    assert list(state.alarms) == ["step to version 3: <misalignment>"]
    assert state.alarms[0] not in state.events


def test_summary_closing_words_and_report_hold_it():
    config = Config()
    tree = summary.build(LINES, config)
    assert tree["alarms"] == ["step to version 3: <misalignment>"]
    assert any("1 alarm; the last: step to version 3" in sentence for sentence in closing.sentences(tree))
    page = report.page(LINES, config, tree, [])
    assert "<h2>Alarms" in page and "step to version 3: &lt;misalignment&gt;" in page


def test_a_run_without_alarms_says_nothing_of_them():
    tree = summary.build(LINES[:1], Config())
    assert tree["alarms"] == [] and not any("alarm" in sentence for sentence in closing.sentences(tree))
    assert "Alarms" not in report.page(LINES[:1], Config(), tree, [])


def test_the_live_picture_shows_it(tmp_path):
    from stretto.watch.display import Display

    out = Console(file=io.StringIO(), width=120, height=40)
    display = Display(Config(), tmp_path, out, 0)
    display.state.absorb(LINES)
    out.print(display.picture())
    assert "! step to version 3: <misalignment>" in out.file.getvalue()  # type: ignore[attr-defined]
