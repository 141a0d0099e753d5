"""What a person sees while a run goes on: a picture in a terminal, lines elsewhere, and the table at the end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from stretto.config import load_run, parse
from stretto.records import Message, Rollout
from stretto.watch import closing, conversation, estimate, summary
from stretto.watch.display import Display, opening, size, sparkline
from stretto.watch.metrics import Metrics, read
from stretto.watch.state import RunState
from stretto.weights.store import Store


def console(terminal: bool, height: int = 60) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=110, height=height, color_system=None)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_first_line_says_what_and_how_long() -> None:
    config = parse({"trainer": {"steps": 30}})
    said = opening(config, 300)
    assert "30 steps of 128 rollouts" in said and "300 held-out tasks" in said
    assert f"About {estimate.in_words(estimate.seconds(config, 300))}" in said
    assert "no held-out tasks. About" in opening(config, 0)
    assert "Control run" in opening(parse({"grading": {"control": "shuffle"}}), 300)


@pytest.mark.parametrize(
    ("seconds", "words", "exact"),
    [(0.2, "1 s", "1 s"), (42, "42 s", "42 s"), (125, "2 min", "2 min 05 s"), (7300, "2 h 02 min", "2 h 02 min")],
)
def test_durations_in_words(seconds: float, words: str, exact: str) -> None:
    assert (estimate.in_words(seconds), estimate.exactly(seconds)) == (words, exact)


def test_the_picture_shows_what_the_run_does(run: Path) -> None:
    screen = console(True)
    display = Display(load_run(run), run, screen, 300)
    with display:
        display.stage("training")
        display.update({"in_flight": 77})
        display.refresh(force=True)
        screen.print(display.picture())
    shown = text(screen)
    for piece in (
        "✓ evaluation before",
        "version 30 of 30",
        "77 in flight",
        "max 2 of at most 2",
        "× smaller",
        "cluster-1",
    ):
        assert piece in shown, piece
    assert "▁" in shown or "█" in shown
    assert "→ read_file path=solution.py" in shown


def test_a_small_terminal_gets_no_conversation(run: Path) -> None:
    screen = console(True, height=24)
    display = Display(load_run(run), run, screen, 300)
    display.refresh(force=True)
    screen.print(display.picture())
    assert "a rollout" not in text(screen)


def test_plain_lines_come_with_stages_and_steps(tmp_path: Path) -> None:
    config = parse({"run": {"name": "r", "root": str(tmp_path)}, "trainer": {"steps": 2}})
    (tmp_path / "r").mkdir()
    screen = console(False)
    metrics = Metrics(tmp_path / "r" / "metrics.jsonl", "trainer")
    metrics.log("event", text="something of an earlier start")
    with Display(config, tmp_path / "r", screen, 300) as display:
        display.stage("training")
        metrics.log("event", text="a late cluster joined")
        metrics.log("step", version=2, solve_rate=0.5, staleness=[0, 1], seconds={"wait": 1.0, "compute": 1.0})
        display.refresh(force=True)
        display.refresh(force=True)
    lines = text(screen).splitlines()
    assert lines[0].startswith("Training the shipped nano model")
    assert "[training]" in lines
    assert lines.count("  a late cluster joined") == 1
    assert not any("earlier start" in line for line in lines)
    said = [line for line in lines if "version 2 of 2" in line]
    assert len(said) == 1 and "solve rate 50%" in said[0] and "staleness at most 1" in said[0]
    assert "\x1b" not in text(screen)


def test_the_state_is_the_same_line_by_line_and_at_once(run: Path) -> None:
    lines = read(run / "metrics.jsonl")
    whole, parts = RunState(), RunState()
    whole.absorb(lines)
    for line in lines:
        parts.absorb([line])
    assert whole == parts
    assert whole.version == 30 and len(whole.solve_rates) == 30
    assert whole.clusters["cluster-1"].version == 30
    assert whole.idle("trainer") is not None and whole.idle("nobody") is None


def test_the_closing_table(run: Path) -> None:
    config = load_run(run)
    tree = summary.build(read(run / "metrics.jsonl"), config)
    screen = console(False)
    closing.closing(screen, config, tree)
    said = text(screen)
    low, high = tree["solve_rate"]["ci95"]
    assert f"[{100 * low:+.1f}, {100 * high:+.1f}]" in said
    assert "held-out, pass@4" in said and "report.html" in said
    assert said.count("\n  stretto ") == 3
    screen = console(False)
    closing.closing(screen, config, summary.build([], config))
    assert "Nothing was evaluated" in text(screen) and "before" not in text(screen).splitlines()[0]


def test_a_conversation_in_pieces(make_rollout: Callable[[str, str, bool], Rollout]) -> None:
    found = conversation.pieces(make_rollout("r", "train", False).messages)
    assert [piece.kind for piece in found] == [
        "user", "call", "result", "call", "result", "call", "result", "broken", "result"
    ]  # fmt: skip
    assert found[1].head == "read_file path=solution.py"
    assert (found[3].head, found[3].body) == ("edit_file path=solution.py line=2", "    acc = n")
    assert found[7].head == "call (bad json)"
    mixed = Message(
        role="assistant", text='I look.\n<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call> done<|im_end|>'
    )
    assert [(p.kind, p.head, p.body) for p in conversation.pieces([mixed])] == [
        ("say", "agent", "I look."), ("call", "submit", ""), ("say", "agent", "done")
    ]  # fmt: skip
    assert conversation.pieces([Message(role="assistant", text="<|im_end|>")])[0].kind == "broken"


def test_a_long_conversation_is_cut_in_the_middle(make_rollout: Callable[[str, str, bool], Rollout]) -> None:
    shown = conversation.to_text(make_rollout("r", "train", True), width=40, lines=6).plain.splitlines()
    assert len(shown) == 7 and "lines …" in shown[3] and all(len(line) <= 40 for line in shown)


def test_escape_codes_of_the_policy_do_not_reach_the_terminal() -> None:
    messages = [Message(role="assistant", text="\x1b[2Jgone\x07\u009b1m"), Message(role="tool", text="a\x1bb\n\tc")]
    said = [(piece.head, piece.body) for piece in conversation.pieces(messages)]
    assert said == [("agent", "�[2Jgone��1m"), ("result", "a�b\n\tc")]


def test_a_payload_that_is_gone_or_broken_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("broken", b"\x81")
    assert [conversation.load(store, key) for key in ("gone", "broken", "", "../x")] == [None] * 4


def test_sizes_and_sparklines() -> None:
    assert [size(n) for n in (12, 4_700, 2_260_000, 1.1e12)] == ["12 B", "4.7 kB", "2.3 MB", "1100.0 GB"]
    assert sparkline([0.0, 0.25, 0.5], 9) == "▁▄█" and sparkline([], 5) == "" and sparkline([0, 0], 5) == "▁▁"
