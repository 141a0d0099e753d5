"""Statistics over solved counts: pass@k against counting, means without infra, intervals that cover and repeat."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.watch.statistics import interval, mean, paired_interval, pass_at, pass_at_k, rates


def result(solved: list[int], valid: list[int], **more: Any) -> dict[str, Any]:
    return {"solved": solved, "valid": valid, "attempts": max(valid), **more}


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_success(attempts: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, attempts)), data.draw(st.integers(1, attempts))
    choices = list(itertools.combinations([True] * solved + [False] * (attempts - solved), k))
    assert pass_at_k(solved, attempts, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_refuses_too_few_attempts() -> None:
    with pytest.raises(ValueError, match="at least 3 attempts"):
        pass_at_k(1, 2, 3)


@pytest.mark.parametrize(
    ("solved", "attempts", "expected"),
    [([4, 0], 4, 0.5), ([1, 1], 4, 1.0), ([1], 8, 0.5), ([2], 8, 1 - 15 / 70), ([1], 2, None)],
)
def test_pass_at_4(solved: list[int], attempts: int, expected: float | None) -> None:
    found = pass_at(4, result(solved, [attempts] * len(solved)))
    assert found == expected if expected is None else found == pytest.approx(expected)


def test_means_leave_infra_out() -> None:
    line = result([1, 0, 2], [2, 0, 4], ids=["a", "b", "c"])
    assert rates(line) == {"a": 0.5, "c": 0.5} and mean(rates(line)) == 0.5
    assert pass_at(2, line) == pytest.approx((1 + 5 / 6) / 2)


def test_an_interval_covers_and_repeats() -> None:
    values = rates(result([0, 1, 2, 3, 4] * 20, [4] * 100))
    low, high = interval(values)
    assert low < 0.5 < high and 0.1 < high - low < 0.18
    assert interval(values) == (low, high)
    assert interval(rates(result([4] * 10, [4] * 10))) == (1.0, 1.0)


def test_a_gain_is_compared_task_by_task() -> None:
    """Every task gains one of four attempts: that is certain, although the tasks differ widely."""
    before, after = rates(result([0, 1, 2, 3], [4] * 4)), rates(result([1, 2, 3, 4], [4] * 4))
    assert paired_interval(before, after) == (0.25, 0.25)
    with pytest.raises(ValueError, match="at least one task"):
        paired_interval({"a": 1.0}, {"b": 1.0})
