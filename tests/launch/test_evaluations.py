"""Which evaluations a run asks for, and which are left after a restart."""

from __future__ import annotations

from stretto.config import parse
from stretto.launch import evaluations

SIZES = {"train": 99, "heldout": 20, "new_templates": 10}


def config(**sections: dict):
    return parse(sections)


def test_before_and_after_are_the_same_tasks_sampled_and_greedy() -> None:
    before, after = (evaluations.full(config(), SIZES, phase) for phase in ("before", "after"))
    assert [e.name for e in before] == [
        "before-heldout", "before-new_templates", "before-heldout-greedy", "before-new_templates-greedy"
    ]  # fmt: skip
    assert [(e.split, e.attempts, e.temperature, e.tasks) for e in before] == [
        (e.split, e.attempts, e.temperature, e.tasks) for e in after
    ]
    assert [(e.attempts, e.temperature) for e in before] == [(4, 1.0), (4, 1.0), (1, 0.0), (1, 0.0)]


def test_a_split_without_tasks_is_not_evaluated() -> None:
    names = [e.name for e in evaluations.full(config(), {"heldout": 5, "new_templates": 0}, "before")]
    assert names == ["before-heldout", "before-heldout-greedy"]
    assert evaluations.full(config(), {"train": 5}, "before") == [] and evaluations.held({"train": 5}) == 0
    assert evaluations.held(SIZES) == 30


def test_what_was_evaluated_before_a_restart_is_kept() -> None:
    lines = [{"kind": "eval", "name": "before-heldout"}, {"kind": "eval", "name": "during-000010"}, {"kind": "step"}]
    done = evaluations.finished(lines, "before")
    assert "before-heldout" not in [e.name for e in evaluations.full(config(), SIZES, "before", done)]
    assert len(evaluations.full(config(), SIZES, "before", done)) == 3


def test_short_evaluations_come_every_so_many_versions() -> None:
    asked: list[str] = []
    settings = config(eval={"every": 10, "during_tasks": 8}, trainer={"steps": 30})
    for version in range(31):
        due = evaluations.during(settings, SIZES, version, asked)
        if due:
            asked.append(due.name)
            assert (due.split, due.attempts, due.tasks) == ("heldout", 1, 8)
    assert asked == ["during-000010", "during-000020"]
    assert evaluations.during(settings, SIZES, 13, []) is not None  # the launcher looked late
    assert evaluations.during(config(eval={"every": 0}), SIZES, 10) is None
    assert evaluations.during(config(), {"train": 5}, 10) is None
    few = evaluations.during(config(), {"heldout": 3}, 10)
    assert few is not None and few.tasks == 3  # as many as were laid, not as many as were asked for
