"""metrics.jsonl: lines of several processes never mix, and readers bear a file that is still being written."""

from __future__ import annotations

import enum
import json
import multiprocessing
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.watch.metrics import Metrics, Tail, plain, read


class Colour(enum.StrEnum):
    RED = "red"


def write_many(path: Path, name: str) -> None:
    with Metrics(path, name) as metrics:
        for number in range(300):
            metrics.log("n", number=number, filler="x" * (number * 7 % 5000))


def test_processes_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, f"p{n}")) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = read(path)
    assert len(lines) == 1200 == len(path.read_text().splitlines())
    for name in ("p0", "p1", "p2", "p3"):
        assert [line["number"] for line in lines if line["process"] == name] == list(range(300))


def test_a_line_says_when_who_and_what(tmp_path: Path) -> None:
    Metrics(tmp_path / "a" / "m.jsonl", "trainer", clock=lambda: 12.25).log("step", version=3)
    assert read(tmp_path / "a" / "m.jsonl") == [{"time": 12.25, "process": "trainer", "kind": "step", "version": 3}]


def test_the_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"time": 1, "kind": "a"}\n{"time": 2, "ki')
    assert [line["kind"] for line in tail.read()] == ["a"]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('nd": "b"}\nnot json\n[1]\n{"time": 3, "kind": "c"}\n')
    assert [line["kind"] for line in tail.read()] == ["b", "c"]


def test_a_line_cut_off_by_a_crash_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"time": 1, "kind": "a"}\n{"time": 2, "ki')
    Metrics(path, "p").log("b")
    Metrics(path, "p").log("c")
    assert [line["kind"] for line in read(path)] == ["a", "b", "c"]
    assert "\n\n" not in path.read_text()


def test_values_become_json() -> None:
    value = {
        "f": np.float32(0.5),
        "a": np.arange(3),
        "n": float("nan"),
        "i": np.int64(4),
        "c": Colour.RED,
        5: (1, None),
    }
    assert plain(value) == {"f": 0.5, "a": [0, 1, 2], "n": None, "i": 4, "c": "red", "5": [1, None]}
    assert plain(np.array([1.0, np.inf])) == [1.0, None]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_whatever_is_logged_can_be_read(value: object) -> None:
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == plain(value)


def test_a_line_that_lacks_what_its_kind_needs_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = {"time": 1.0, "process": "t", "kind": "step", "version": 3}
    bad = [{"time": 1.0, "kind": kind} for kind in ("step", "busy", "swap", "publish", "eval", "stage", "rollout")]
    bad += [{**good, "version": "three"}, {**good, "time": "now"}, {**good, "kind": 7}, {"time": 2.0}]
    path.write_text("\n".join(map(json.dumps, [*bad[:5], good, *bad[5:]])) + "\n")
    assert read(path) == [good]
