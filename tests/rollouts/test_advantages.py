"""Pins what a rollout is worth: each estimator against a slow reference over the survivors of random failures, exact
zeros without signal, and statistics from which failed members are absent."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.records import Outcome
from stretto.rollouts.advantages import advantages, estimate
from stretto.rollouts.batches import build
from stretto.rollouts.groups import Grant, Group, training_group

from .world import answer

ESTIMATORS = ("centred", "standardised", "reinforce++")
batches = st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=8), min_size=1, max_size=5)


def reference(groups: list[list[float]], estimator: str) -> list[list[float]]:
    centred = [[reward - statistics.fmean(rewards) for reward in rewards] for rewards in groups]
    if estimator == "centred":
        return centred
    if estimator == "standardised":
        return [[c / statistics.pstdev(rewards) for c in group] for group, rewards in zip(centred, groups, strict=True)]
    whole = math.sqrt(statistics.fmean([c * c for group in centred for c in group]))
    return [[c / whole for c in group] for group in centred]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(batches)
def test_against_a_slow_reference(estimator, groups):
    if any(statistics.pstdev(rewards) < 1e-3 for rewards in groups):
        return  # flat or nearly so: the next tests
    for found, expected in zip(estimate(groups, estimator), reference(groups, estimator), strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_GRP_9_equal_rewards_are_exactly_worth_nothing(estimator):
    """Seven times 0.1 sums to 0.7000000000000001: a deviation by rounding must not become an advantage of one."""
    flat = [0.1] * 7
    found = estimate([flat, [0.0, 1.0]], estimator)
    assert found[0] == [0.0] * 7 and found[1][1] > 0
    assert estimate([flat], estimator) == [[0.0] * 7]


def test_flat_groups_count_in_the_deviation_of_the_batch():
    alone, beside = (estimate(groups, "reinforce++")[0] for groups in ([[0.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]))
    assert alone == [-1.0, 1.0] and beside == pytest.approx([-math.sqrt(2), math.sqrt(2)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_reward_that_is_no_number_is_refused(bad, estimator):
    with pytest.raises(ValueError, match="a reward is"):
        estimate([[0.0, 1.0], [bad, 1.0]], estimator)


def group(ordinal: int, rewards: list[float], lost: set[int] = frozenset()) -> Group:  # type: ignore[assignment]
    """A finished group, its receipts arriving in a random order."""
    made = training_group(ordinal, "t/0", len(rewards))
    members = list(range(len(rewards)))
    random.Random(ordinal).shuffle(members)
    for member in members:
        name, attempt = made.next_rollout(member)
        grant = Grant(name, made.id, member, attempt, "w0", "http://e0", 0, 1e9)
        made.leased(grant)
        outcome = Outcome.INFRA if member in lost else Outcome.SCORED
        lease = type("L", (), {"rollout": name, "group": made.id, "purpose": "train", "version": 0, "engine": ""})
        made.closed(member, answer(lease, reward=rewards[member], outcome=outcome, solved=False))
    return made


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_GRP_1_advantages_are_those_of_the_survivors_by_group_id(estimator, seed):
    """Groups of unequal size after random failures: by id, against the reference over what is left."""
    draw = random.Random(seed)
    rewards = {ordinal: [draw.uniform(-1, 1) for _ in range(8)] for ordinal in range(4)}
    lost = {ordinal: set(draw.sample(range(8), draw.randrange(5))) for ordinal in rewards}
    batch = build("run", 0, [group(o, rewards[o], lost[o]) for o in rewards], 0, estimator=estimator)
    left = [[r for m, r in enumerate(rewards[o]) if m not in lost[o]] for o in rewards]
    expected = dict(zip((f"g{o:07d}" for o in rewards), reference(left, estimator), strict=True))
    for name, values in expected.items():
        items = [item for item in batch.items if item.group == name]
        assert [item.advantage for item in items] == pytest.approx(values)
        assert [item.reward for item in items] == left[int(name[1:])]


def test_GRP_2_eight_with_one_failure_train_seven():
    batch = build("run", 0, [group(0, [0.0, 1.0] * 4, lost={3})], 0)
    assert len(batch.items) == batch.rollouts == 7
    assert math.fsum(item.advantage for item in batch.items) == pytest.approx(0.0)


def test_GRP_3_a_failed_member_does_not_move_the_baseline():
    """Rejection precedes the mean: whatever stood in the reward of the lost member, the others' worth is the same."""
    worth = []
    for reward in (0.0, -100.0):
        batch = build("run", 0, [group(0, [0.0, 1.0, 1.0, reward], lost={3})], 0, estimator="standardised")
        worth.append([item.advantage for item in batch.items])
    assert worth[0] == worth[1] == pytest.approx(reference([[0.0, 1.0, 1.0]], "standardised")[0])


def test_GRP_9_the_solve_rate_is_taken_before_the_filter():
    batch = build("run", 0, [group(0, [1.0] * 4), group(1, [0.0, 1.0])], 0)
    assert batch.dropped_equal == 1 and batch.rollouts == 6 and len(batch.items) == 2


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=16))
def test_a_group_of_one_estimator_is_the_distance_to_the_mean(rewards):
    assert estimate([rewards], "centred") == [advantages(rewards)]
