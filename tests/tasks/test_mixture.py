"""Pins: a mixture asks in its proportions, everything once per epoch, the same after any restart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.records import Task
from stretto.rollouts.source import Prompts
from stretto.tasks.folder import TaskError
from stretto.tasks.mixture import Mixture, Order, Source, pattern, read_recipe


def tasks(source: str, count: int, weight: float, chance: float = 1.0) -> list[Task]:
    asked = {"source": source, "weight": weight, "chance": chance}
    return [
        Task(id=f"{source}/{n}", split="train", instruction="", files={}, grading={}, metadata={"asked": asked})
        for n in range(count)
    ]


def test_sources_come_in_their_proportions_and_each_task_once_per_epoch() -> None:
    prompts = Prompts(tasks("a", 7, 3.0) + tasks("b", 5, 1.0), seed=1)
    asked = [prompts.task(ordinal).id for ordinal in range(400)]
    assert Counter(id[0] for id in asked) == {"a": 300, "b": 100}
    for source, size in (("a", 7), ("b", 5)):
        own = [id for id in asked if id.startswith(source)]
        for start in range(0, len(own) - size, size):
            assert len(set(own[start : start + size])) == size
    assert own_order(asked, "a", 0, 7) != own_order(asked, "a", 1, 7)


def own_order(asked: list[str], source: str, epoch: int, size: int) -> list[str]:
    return [id for id in asked if id.startswith(source)][epoch * size : (epoch + 1) * size]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.floats(0.01, 100), st.floats(0.05, 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 500), min_size=1, max_size=8),
    st.integers(),
)
def test_what_an_ordinal_means_does_not_depend_on_what_was_asked_before(
    sources: list[tuple[int, float, float]], ordinals: list[int], seed: int
) -> None:
    mixture = Mixture(
        sources=[
            Source(name=str(n), weight=weight, chances={f"{n}/{k}": chance for k in range(size)})
            for n, (size, weight, chance) in enumerate(sources)
        ]
    )
    order = Order(seed, mixture)
    assert [order.task(n) for n in ordinals] == [Order(seed, mixture).task(n) for n in ordinals]


def test_tasks_that_are_too_easy_or_too_hard_come_less_often() -> None:
    prompts = Prompts(tasks("a", 10, 1.0) + tasks("a", 20, 1.0, chance=0.2)[10:], seed=0)
    asked = Counter(prompts.task(ordinal).id for ordinal in range(6000))
    rare = sum(asked[f"a/{n}"] for n in range(10, 20)) / 10
    often = sum(asked[f"a/{n}"] for n in range(10)) / 10
    assert 0.12 < rare / often < 0.28


def test_another_weight_is_another_stream() -> None:
    one, other = (Prompts(tasks("a", 3, 1.0) + tasks("b", 3, weight), seed=0) for weight in (1.0, 2.0))
    assert one.fingerprint() != other.fingerprint()
    with pytest.raises(ValueError, match="some tasks are of a mixture"):
        Prompts([*tasks("a", 2, 1.0), Task(id="x", split="", instruction="", files={}, grading={})], seed=0)


def test_turns_are_spread_evenly() -> None:
    turns = pattern([1.0, 1.0, 2.0])
    assert Counter(turns[:100]) == Counter({0: 25, 1: 25, 2: 50})
    assert pattern([1.0, 1e-9]).count(1) == 1


def test_a_recipe_marks_tasks(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text('{"a/0": 1.0, "a/1": 0.5}')
    (tmp_path / "mix.toml").write_text(
        '[[source]]\npath = "a"\nweight = 2\n[difficulty]\nrates = "rates.json"\nhigh = 0.9\noutside = 0.25\n'
    )
    recipe = read_recipe(tmp_path / "mix.toml")
    marked = [recipe.marked(task, "a").metadata["asked"] for task in tasks("a", 3, 1.0)]
    assert [mark["chance"] for mark in marked] == [0.25, 1.0, 1.0] and marked[0]["weight"] == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no"),
        ("[[source]]\nweight = 1\n", "has a path"),
        ('[[source]]\npath = "a"\nweight = 0\n', "a positive number"),
        ('[[source]]\npath = "a"\n[[source]]\npath = "a"\n', "twice"),
        ('[[source]]\npath = "a"\n[difficulty]\nlow = 2\n', "between 0 and 1"),
        ('[[source]]\npath = "a"\n[difficulty]\nrates = "absent.json"\n', "cannot be read"),
        ('weights = 1\n[[source]]\npath = "a"\n', "unknown key weights"),
        ("[[source\n", "cannot be read"),
    ],
)
def test_malformed_recipes_are_sentences(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mix.toml").write_text(text)
    with pytest.raises(TaskError, match=said):
        read_recipe(tmp_path / "mix.toml")
