"""Pins: Composer 2's effort penalty as published, bounds of every term, and that no shaping makes an unsolved rollout
worth as much as a solved one. HCK-13: a question has a term of its own."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config import ConfigError, Counted, GradingConfig, ShapingConfig, dump, parse
from stretto.grading.reward import concave, effort_charge, reward
from stretto.harness.behaviour import behaviour
from stretto.harness.effort import Effort
from stretto.records import CallStatus, Outcome, ToolCall

HARD = ShapingConfig(effort_weight=1.0, behaviour={"questions": -0.02, "abandoned_todos": -0.05, "bad_calls": -0.01})


@pytest.mark.parametrize(("k", "q"), [(0.1, 0.5), (1.0, 0.0), (2.0, 0.9), (0.5, 2.0)])
def test_the_form_is_the_published_one(k: float, q: float) -> None:
    for x in (0.0, 0.3, 5.0, 400.0):
        assert concave(x, k, q) == pytest.approx(((1 + k * x) ** (1 - q) - 1) / (k * (1 - q)), abs=1e-12)
    assert concave(1e-6, k, q) == pytest.approx(1e-6, rel=1e-4), "slope 1 at nothing"
    assert concave(10, k, 1.0) == pytest.approx(math.log(1 + 10 * k) / k)
    assert concave(10, k, 1 + 1e-7) == pytest.approx(concave(10, k, 1.0), rel=1e-5)


def test_x_sums_tokens_calls_and_turns_by_their_weights() -> None:
    effort = Effort(thinking=1000, calling=200, saying=300, reading=4000, calls=5, turns=4)
    shaping = ShapingConfig(effort_weight=0.01, effort_k=1.0, effort_q=0.0, effort_most=0.9)
    assert effort_charge(effort, shaping) == pytest.approx(0.01 * (1.0 + 0.2 + 0.3 + 2.0 + 0.1 + 0.2))
    assert effort_charge(effort, HARD) == HARD.effort_most
    apart, together = Effort(calling=90, calls=3, turns=3), Effort(calling=90, calls=3, turns=1)
    assert effort_charge(together, shaping) < effort_charge(apart, shaping), "parallel calls are cheaper"


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(Outcome),
    st.booleans(),
    st.integers(0, 99),
    st.builds(Effort, *(st.integers(0, 10**6) for _ in range(6))),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_HCK_13_a_solved_rollout_is_worth_more_than_any_other(outcome, solved, bad, effort, questions, todos) -> None:
    counted = {"questions": float(questions), "abandoned_todos": float(todos), "bad_calls": float(bad)}
    items = reward(outcome, solved, bad, GradingConfig(), HARD, effort, counted)
    total = sum(items.values())
    assert all(value <= 0 for name, value in items.items() if name != "correctness")
    if outcome is Outcome.SCORED and solved:
        assert 0 < 1 - HARD.effort_most - HARD.behaviour_most - 0.1 - 1e-9 <= total <= 1
    else:
        assert -HARD.behaviour_most - 0.1 - 1e-9 <= total <= 0 and "effort" not in items
    if questions and outcome is not Outcome.INFRA:
        assert items["questions"] == -min(0.02 * questions, HARD.behaviour_most)


def test_nothing_is_itemised_that_is_not_declared() -> None:
    counted = {"questions": 0.0, "calls": 9.0}
    items = reward(Outcome.SCORED, True, 0, GradingConfig(), ShapingConfig(), Effort(turns=9), counted)
    assert items == {"correctness": 1.0, "bad_calls": 0.0}


def test_what_can_be_charged_is_what_is_counted() -> None:
    assert set(get_args(Counted)) == set(behaviour([], False))


@pytest.mark.parametrize(
    ("shaping", "sentence"),
    [
        ({"behaviour": {"tested": 0.1}}, "would pay for behaviour"),
        ({"behaviour": {"asked": -0.1}}, "'read', 'tested'"),
        ({"effort_most": 0.6, "behaviour_most": 0.4}, "below 1 a solved task always earns more"),
        ({"effort_waight": 1}, "did you mean shaping.effort_weight"),
    ],
)
def test_mistakes_are_sentences(shaping: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse({"shaping": shaping})


def test_the_table_survives_its_own_file() -> None:
    import tomllib

    config = parse({"shaping": {"behaviour": {"questions": -0.1, "bad_calls": 0}}})
    assert parse(tomllib.loads(dump(config))) == config


def test_effort_counts_tokens_by_what_they_were_for() -> None:
    text = "<think>hm hm</think>ok<tool_call>x</tool_call>done"
    effort = Effort()
    ends = list(range(len(text) + 1))  # a token per character
    start, end = text.index("<tool_call>"), text.index("done")
    effort.turn(text, ends, len(text) + 1, [(start, end)])
    assert (effort.thinking, effort.calling, effort.saying) == (20, end - start, len("okdone") + 1)
    assert (effort.calls, effort.turns) == (1, 1)
    forced = Effort()  # the template opened the thinking
    forced.turn("hm</think>ok", list(range(13)), 13, [])
    assert (forced.thinking, forced.saying) == (10, 3)


def call(
    name: str, status: CallStatus = CallStatus.OK, observation: str = "ok", tool: str = "", **arguments
) -> ToolCall:
    return ToolCall(
        name=name, status=status, segment=0, start=0, end=0, arguments=arguments, observation=observation, tool=tool
    )


def test_behaviour_sees_through_new_names_and_counts_plans_and_tests() -> None:
    steps = [{"text": "a", "status": "done"}, {"text": "b", "status": "open"}]
    calls = [
        call("open", tool="read_file", file="a.py"),
        call("plan", tool="todo", steps=steps),
        call("edit_file", path="a.py", old="x", new="y"),
        call("shell", tool="run", cmd="python3 -m pytest -q", observation="1 failed\n[exit code 1]"),
        call("edit_file", path="a.py", old="y", new="z"),
        call("ask_user", question="?"),
        call("ask_user", CallStatus.FAILED, question="?"),
        call("ask_user", CallStatus.UNKNOWN_TOOL, question="?"),
        call("submit"),
    ]
    found = behaviour(calls, True)
    for flag in ("read", "tested", "retried", "ran", "submitted", "solved_after_retry"):
        assert found[flag] == 1, flag
    assert (found["questions"], found["abandoned_todos"], found["gave_up"]) == (2, 1, 0)
    assert behaviour([*calls[:-1], call("give_up", reason="no")], False)["abandoned_todos"] == 0
