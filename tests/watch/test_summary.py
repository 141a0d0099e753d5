"""summary.json: the numbers a run is judged by, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.config import Config, load_run
from stretto.watch import summary
from stretto.watch.metrics import read
from stretto.watch.statistics import paired_interval, rates

LINE = {"process": "p"}


def evaluation(name: str, solved: list[int], attempts: int = 4, **more: Any) -> dict[str, Any]:
    line = {"time": 1.0, "kind": "eval", "name": name, "split": "heldout", "version": 0, "temperature": 1.0}
    return {**LINE, **line, "solved": solved, "attempts": attempts, "valid": [attempts] * len(solved), **more}


def test_gain_and_its_paired_interval() -> None:
    """Every task gains one of four attempts: the gain is certain although the tasks differ widely."""
    tree = summary.build(
        [evaluation("before-heldout", [0, 1, 2, 3]), evaluation("after-heldout", [1, 2, 3, 4])], Config()
    )
    rate = tree["solve_rate"]
    assert (rate["before"], rate["after"], rate["gain"]) == (0.375, 0.625, 0.25)
    assert rate["ci95"] == (0.25, 0.25)
    assert rate["before_ci95"][0] < 0.25 and rate["before_ci95"][1] > 0.5
    assert rate["tasks"] == 4


def test_tasks_are_paired_by_id_and_infra_attempts_do_not_count() -> None:
    before = evaluation("before-heldout", [0, 2, 0], ids=["a", "b", "c"], valid=[4, 2, 0])
    after = evaluation("after-heldout", [4, 4, 4], ids=["b", "c", "a"])
    rate = summary.build([before, after], Config())["solve_rate"]
    assert rate["before"] == 0.5  # a 0 of 4, b 2 of 2, c has no valid attempt
    assert paired_interval(rates(before), rates(after)) == (0.0, 1.0)


def test_the_last_result_of_a_name_counts() -> None:
    lines = [evaluation("after-heldout", [0, 0]), evaluation("after-heldout", [4, 4])]
    assert summary.build(lines, Config())["solve_rate"]["after"] == 1.0


def test_time_between_two_launches_does_not_count() -> None:
    def at(time: float, kind: str = "stage", **values: Any) -> dict[str, Any]:
        return {**LINE, "time": time, "kind": kind, **values}

    def wait(start: float, end: float, process: str = "trainer", **values: Any) -> dict[str, Any]:
        return at(end, "busy", start=start, end=end, **{"what": "wait", **values}) | {"process": process}

    def step(time: float, version: int, ages: list[int]) -> dict[str, Any]:
        return at(time, "step", version=version, staleness=ages, seconds={"wait": 5.0})

    lines = [
        at(0, name="starting"),
        at(5, "service", name="e", role="engine", url="u", cluster="c"),
        wait(5, 12),  # two seconds of it in training
        at(10, name="training"),
        wait(10, 20, "e", share=0.5, what="engine"),
        step(20, 1, [0, 1]),
        at(30, name="stopping"),
        at(1000, name="starting"),
        at(1010, name="training"),
        step(1015, 1, [0, 1]),  # trained again after the restart: counts once
        step(1030, 2, [1, 3]),
        wait(1010, 1030, "e", share=1.0, what="engine"),
        at(1031, name="done"),
    ]
    tree = summary.build(lines, Config())
    assert tree["wall_s"] == 30 + 31
    assert tree["train_s"] == 10 + 20
    assert tree["steps"] == 2
    ages = {"0": 1, "1": 2, "3": 1}
    assert tree["staleness"] == {"mean": 1.25, "max": 3, "bound": 2, "max_over_bound": 1, "histogram": ages}
    assert tree["idle"]["trainer"] == pytest.approx(2 / 30)
    assert tree["idle"]["engine"] == pytest.approx(1 - 25 / 30)


def test_splits_that_were_not_evaluated_are_null() -> None:
    lines = [evaluation("before-new_templates", [1, 2]), evaluation("after-new_templates", [2, 2])]
    tree = summary.build(lines, Config())
    assert set(tree["solve_rate"].values()) == {None} == set(tree["solve_rate_greedy"].values())
    assert tree["solve_rate_new_templates"]["gain"] == 0.125 and tree["behaviour"] == {"before": {}, "after": {}}
    apart = [evaluation("before-heldout", [1], ids=["a"]), evaluation("after-heldout", [1], ids=["b"])]
    assert summary.build(apart, Config())["solve_rate"]["ci95"] is None  # no task was graded both times


def test_an_empty_run_has_a_summary() -> None:
    tree = summary.build([], Config())
    assert tree["steps"] == 0 and tree["solve_rate"]["gain"] is None and tree["staleness"]["max_over_bound"] is None


def test_a_whole_run(run: Path) -> None:
    lines, config = read(run / "metrics.jsonl"), load_run(run)
    summary.write(run)
    tree = json.loads((run / "summary.json").read_text())
    assert tree["steps"] == tree["version"] == 30 and tree["rollouts"] == 30 * 128 == tree["rollouts_trained"]
    low, high = tree["solve_rate"]["ci95"]
    assert 0 < low < tree["solve_rate"]["gain"] < high
    assert tree["solve_rate"]["pass_at_4_after"] > tree["solve_rate"]["after"]
    assert set(tree["behaviour"]["before"]) == {"read", "tested", "retried", "calls"}
    assert sum(tree["outcomes"].values()) == tree["rollouts"]
    assert tree["staleness"]["max_over_bound"] == 0
    assert tree["weights"]["versions"] == 31 and 3.5 < tree["weights"]["ratio_median"] < 5
    assert 0 < tree["idle"]["trainer"] < 0.3 and 0 < tree["idle"]["engine"] < 0.5
    assert tree["mismatch"]["k3"] < tree["mismatch"]["k3_without_replay"]
    assert tree["clusters"]["cluster-0"]["first_version"] == 0
    assert tree["clusters"]["cluster-1"]["first_version"] == 5
    assert sum(c["rollouts"] for c in tree["clusters"].values()) == len(summary.of_kind(lines, "rollout"))
    assert config.run.name == tree["name"]
