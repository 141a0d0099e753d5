"""The prompt stream: every task once an epoch, from an ordinal alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rollouts.source import Prompts

from .world import tasks


def test_each_epoch_visits_every_task_in_another_order():
    prompts = Prompts(tasks(10), seed=3)
    epochs = [[prompts.task(10 * epoch + place).id for place in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(prompts.by_id) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@given(st.integers(0, 10**6), st.integers(0, 100))
def test_the_stream_resumes_from_an_ordinal_alone(ordinal, seed):
    prompts = Prompts(tasks(10), seed)
    prompts.task(3)
    assert prompts.task(ordinal) == Prompts(tasks(10)[::-1], seed).task(ordinal)


def test_samples_are_nested():
    prompts = Prompts(tasks(10), seed=0)
    assert prompts.first(7)[:3] == prompts.first(3)
    assert sorted(prompts.first(None)) == sorted(prompts.by_id)


def test_duplicate_and_missing_tasks_are_refused():
    with pytest.raises(ValueError, match="same id"):
        Prompts(tasks(1) * 2, seed=0)
    with pytest.raises(ValueError, match="no tasks"):
        Prompts([], seed=0)
