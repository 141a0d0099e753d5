"""Every rollout has one outcome, and its reward can't be raised by ending badly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.config import GradingConfig
from stretto.grading.outcome import Grade, settle
from stretto.grading.reward import reward
from stretto.harness.ending import Ending
from stretto.records import Outcome


def test_a_submission_has_its_grade():
    grade = Grade(True, Outcome.SCORED, 24, 24)
    assert settle(Ending.SUBMITTED, grade) is grade


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        (Ending.TURNS, Outcome.TRUNCATED),
        (Ending.TOKENS, Outcome.TRUNCATED),
        (Ending.TIME, Outcome.TRUNCATED),
        (Ending.FAULT, Outcome.FAULT),
        (Ending.INFRA, Outcome.INFRA),
    ],
)
def test_other_endings_have_an_outcome_and_a_reason(ending: Ending, outcome: Outcome):
    settled = settle(ending)
    assert settled.outcome is outcome and not settled.solved and settled.reason
    assert settle(ending, reason="why").reason == "why"


def test_each_ending_is_covered():
    for ending in Ending:
        if ending is not Ending.SUBMITTED:
            settle(ending)


def test_grades_and_submissions_belong_together():
    with pytest.raises(ValueError, match="needs a grade"):
        settle(Ending.SUBMITTED)
    with pytest.raises(ValueError, match="has no grade"):
        settle(Ending.TURNS, Grade(True, Outcome.SCORED, 1, 1))


@given(st.sampled_from(Outcome), st.booleans(), st.integers(0, 1000))
def test_reward_is_bounded_and_only_scored_solutions_earn(outcome: Outcome, solved: bool, bad_calls: int):
    config = GradingConfig(bad_call_penalty=0.02)
    total = sum(reward(outcome, solved, bad_calls, config).values())
    assert math.isfinite(total) and -0.1 <= total <= 1
    assert (total > 0.5) == (outcome is Outcome.SCORED and solved)


def test_HCK_12_no_ending_pays_more_than_a_wrong_answer_with_the_same_calls():
    config = GradingConfig()
    for bad_calls in range(10):
        wrong = sum(reward(Outcome.SCORED, False, bad_calls, config).values())
        for outcome in (Outcome.TRUNCATED, Outcome.FAULT, Outcome.VOID):
            for solved in (False, True):
                assert sum(reward(outcome, solved, bad_calls, config).values()) <= wrong


def test_penalty_grows_by_call_and_stops_at_five():
    config = GradingConfig(bad_call_penalty=0.02)
    totals = [sum(reward(Outcome.SCORED, True, bad, config).values()) for bad in range(8)]
    assert totals == pytest.approx([1, 0.98, 0.96, 0.94, 0.92, 0.9, 0.9, 0.9])
    assert reward(Outcome.SCORED, True, 0, config) == {"correctness": 1.0, "bad_calls": 0.0}
