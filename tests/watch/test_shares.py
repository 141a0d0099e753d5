"""Where the time went, step by step, from metrics lines."""

from __future__ import annotations

import pytest

from stretto.watch.shares import Shares, busy_shares


def line(time: float, kind: str, process: str = "trainer", **values) -> dict:
    return {"time": time, "kind": kind, "process": process, **values}


LINES = [
    line(10.0, "stage", "launcher", name="training"),
    line(12.0, "busy", start=10.0, end=12.0, what="wait"),
    line(13.0, "busy", "cluster-0-engine", start=10.0, end=13.0, share=0.5),
    line(13.5, "queue", "orchestrator", in_flight=12, ready_groups=3, capacity=4, version=0),
    line(14.0, "busy", start=12.0, end=14.0, what="compute"),
    line(14.0, "step", version=1, staleness=[0, 0, 1]),
    line(14.4, "busy", "cluster-0-engine", start=13.0, end=14.4, share=1.0),
    line(15.0, "busy", start=14.0, end=14.5, what="publish"),
    line(15.8, "busy", start=14.0, end=15.0, what="wait"),
    line(16.0, "step", version=2, staleness=[]),
    line(19.0, "event", "launcher", text="later"),
]


def test_each_step_has_the_shares_of_its_own_time():
    first, second = Shares().absorb(LINES)
    assert first["busy"] == {"cluster-0-engine": pytest.approx((3 * 0.5 + 1.0) / 4), "trainer": 0.5}
    assert first["queue"] == {"in_flight": 12, "ready_groups": 3, "capacity": 4}
    assert first["staleness"] == {"0": 2, "1": 1}
    assert second["busy"] == {"cluster-0-engine": pytest.approx(0.2), "trainer": 0.5} and second["staleness"] == {}


def test_line_by_line_is_the_same_and_a_restarted_launcher_repeats_nothing():
    shares = Shares()
    found = [record for one in LINES for record in shares.absorb([one])]
    assert found == Shares().absorb(LINES)
    again = Shares().absorb([*LINES[:6], line(15.6, "shares", "launcher", version=1), *LINES[6:]])
    assert [record["version"] for record in again][-1] == 2


def test_a_span_without_length_has_no_shares():
    assert busy_shares(LINES[1:3], [(5.0, 5.0)]) == {}
