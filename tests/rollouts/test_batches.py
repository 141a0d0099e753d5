"""Groups, advantages and the cut: infra members leave the statistics, equal rewards are cut from the
loss but counted, solve rate taken before, what is too old is dropped with its reason."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.records import Outcome
from stretto.rollouts.advantages import advantages, has_signal, shuffled
from stretto.rollouts.groups import MAX_FAILED
from stretto.rollouts.seeds import derive

from .world import Desk, answer, configuration

rewards = st.lists(st.floats(-2, 2, allow_nan=False), min_size=1, max_size=16)


@given(rewards)
def test_advantages_are_the_distance_to_the_mean(values):
    found = advantages(values)
    assert math.isclose(math.fsum(found), 0.0, abs_tol=1e-9)
    assert all(math.isclose(a - b, x - y, abs_tol=1e-9) for a, x in zip(found, values) for b, y in zip(found, values))


@given(st.floats(-2, 2, allow_nan=False), st.integers(1, 16))
def test_equal_rewards_have_exactly_no_advantage(value, size):
    assert not has_signal([value] * size)
    assert advantages([value] * size) == [0.0] * size


def test_the_smallest_difference_is_signal():
    assert has_signal([1.0, 1.0 + 2**-52])
    assert not has_signal([0.1 + 0.2, 0.1 + 0.2])


@given(rewards, st.integers(0, 2**48))
def test_shuffling_gives_the_same_rewards_to_other_members(values, seed):
    assert sorted(shuffled(values, seed)) == sorted(values)
    assert shuffled(values, seed) == shuffled(values, seed)


def test_shuffles_differ_between_groups():
    values = [float(number) for number in range(16)]
    assert len({tuple(shuffled(values, derive(0, "shuffle", f"g{number}"))) for number in range(20)}) == 20


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0, groups_per_step=2))
    desk.begin()
    yield desk
    desk.close()


def play(desk, change=lambda lease: {}):
    for lease in desk.flow.lease("w0", 100):
        desk.flow.receive(answer(lease, **change(lease)))


def until_the_deadline(desk):
    """Groups that still miss members are cut with those they have."""
    desk.clock.now += desk.config.rollouts.group_seconds
    desk.flow.tick()


def test_infra_leaves_the_group_and_its_mean(desk):
    lost = "g0000000-01"
    play(desk, lambda lease: {"outcome": Outcome.INFRA, "reward": 0.0} if lease.rollout == lost else {})
    assert desk.batch(0) is None  # it may still be replaced
    until_the_deadline(desk)
    batch = desk.batch(0)
    assert batch is not None
    members = [item for item in batch.items if item.group == "g0000000"]
    assert [item.rollout for item in members] == ["g0000000-00", "g0000000-02", "g0000000-03"]
    assert [item.advantage for item in members] == pytest.approx([1 / 3, 1 / 3, -2 / 3])  # rewards 1, 1, 0
    assert len(batch.items) == batch.rollouts == 7
    assert batch.solve_rate == pytest.approx(4 / 7)


def test_a_member_that_ends_as_infra_is_replaced(desk):
    play(desk, lambda lease: {"outcome": Outcome.INFRA} if lease.rollout == "g0000000-01" else {})
    replaced = desk.flow.lease("w1", 100)
    assert [lease.rollout for lease in replaced] == ["g0000000-01r1"]
    desk.flow.receive(answer(replaced[0], "w1"))
    batch = desk.batch(0)
    assert batch is not None and len(batch.items) == 8
    assert "g0000000-01r1" in {item.rollout for item in batch.items}


def test_a_member_that_always_ends_as_infra_is_not_replaced_for_ever(desk):
    play(desk, lambda lease: {"outcome": Outcome.INFRA} if lease.rollout == "g0000000-01" else {})
    for _ in range(20):
        desk.clock.now += 1.0
        play(desk, lambda lease: {"outcome": Outcome.INFRA} if lease.group == "g0000000" else {})
    group = desk.flow.training["g0000000"]
    assert group.finished and not group.short and group.slots[1].attempts == MAX_FAILED


def test_other_outcomes_stay(desk):
    outcomes = [Outcome.SCORED, Outcome.TRUNCATED, Outcome.FAULT, Outcome.VOID]
    play(desk, lambda lease: {"outcome": outcomes[int(lease.rollout[-2:])]})
    batch = desk.batch(0)
    assert batch is not None and len(batch.items) == 8


def test_too_few_survivors_drop_the_group_and_its_place_is_filled(desk):
    play(desk, lambda lease: {"outcome": Outcome.INFRA} if lease.rollout[:-1] == "g0000001-0" else {})
    until_the_deadline(desk)
    assert desk.fates() == {1: ("dropped", None, "deadline")}
    play(desk)
    batch = desk.batch(0)
    assert batch is not None and {item.group for item in batch.items} == {"g0000000", "g0000002"}


def test_equal_rewards_are_counted_not_trained(desk):
    play(desk, lambda lease: {"reward": 1.0, "solved": True} if lease.group == "g0000000" else {})
    batch = desk.batch(0)
    assert batch is not None
    assert {item.group for item in batch.items} == {"g0000001"}
    assert (batch.groups, batch.dropped_equal, batch.rollouts, len(batch.items)) == (2, 1, 8, 4)
    assert batch.solve_rate == pytest.approx(6 / 8)
    assert desk.fates() == {0: ("batched", 0, ""), 1: ("batched", 0, "")}


def test_ASY_8_all_equal_waits_for_signal(desk):
    play(desk, lambda lease: {"reward": 1.0})
    assert desk.batch(0) is None
    play(desk)  # two more are let in
    batch = desk.batch(0)
    assert batch is not None
    assert (batch.groups, batch.dropped_equal, len(batch.items)) == (4, 2, 8)
    desk.commit(0)
    desk.engine(1)
    assert len(desk.flow.lease("w0", 100)) == 8  # the next step has its usual size


def test_no_signal_at_all_is_an_empty_batch_in_the_end(desk):
    for _ in range(4):
        assert desk.batch(0) is None
        play(desk, lambda lease: {"reward": 0.0})
    batch = desk.batch(0)
    assert batch is not None
    assert (batch.groups, batch.dropped_equal, batch.rollouts, batch.items) == (8, 8, 32, [])
    desk.commit(0)
    assert desk.flow.version == 1


def test_older_than_the_lease_said_is_dropped_as_stale(desk):
    play(desk)
    assert desk.batch(0) is not None
    desk.commit(0)
    desk.engine(1)
    lied = "g0000002"
    play(desk, lambda lease: {"oldest_version": 0, "newest_version": 1} if lease.group == lied else {})
    assert desk.batch(1) is None
    assert desk.fates()[2] == ("dropped", None, "stale")
    play(desk)
    batch = desk.batch(1)
    assert batch is not None and {item.group for item in batch.items} == {"g0000003", "g0000004"}
    assert batch.staleness == [0] * 8


def test_oldest_first(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=1, groups_per_step=1))
    desk.begin()
    first = desk.flow.lease("w0", 100)
    assert len(first) == 8
    for lease in first[:4]:
        desk.flow.receive(answer(lease))
    assert desk.batch(0) is not None
    desk.commit(0)
    desk.engine(1)
    second = desk.flow.lease("w0", 100)
    for lease in second:
        desk.flow.receive(answer(lease))
    assert desk.batch(1) is None  # the one from version 0 must be trained now, so the cut waits for it
    for lease in first[4:]:
        desk.flow.receive(answer(lease))
    batch = desk.batch(1)
    assert batch is not None and {item.group for item in batch.items} == {"g0000001"}
    assert batch.staleness == [1] * 4
    desk.close()


def test_GRP_10_no_two_members_draw_alike(tmp_path):
    """Neither within a group, nor in two groups, nor for two workers: and each draws the same in another run."""
    drawn = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        desk = Desk(tmp_path / name, configuration(max_staleness=0, groups_per_step=4, group_size=8))
        desk.begin()
        leases = desk.flow.lease("w0", 16) + desk.flow.lease("w1", 16)
        drawn.append({lease.rollout: lease.sampling.seed for lease in leases})
        desk.close()
    assert len(drawn[0]) == 32 == len(set(drawn[0].values())) and drawn[0] == drawn[1]


def test_shuffled_control_keeps_the_group_and_moves_the_rewards(tmp_path):
    config = configuration(max_staleness=0, groups_per_step=2, group_size=8)
    config = config.model_copy(update={"grading": config.grading.model_copy(update={"control": "shuffle"})})
    desk = Desk(tmp_path, config)
    desk.begin()
    play(desk)
    batch = desk.batch(0)
    assert batch is not None
    rewards = [[item.reward for item in batch.items if item.group == group] for group in ("g0000000", "g0000001")]
    assert all(sorted(values) == [0.0] * 4 + [1.0] * 4 for values in rewards)
    assert any(values != [1.0, 0.0] * 4 for values in rewards)
    assert all(item.advantage == item.reward - 0.5 for item in batch.items)
    assert batch.solve_rate == 0.5
    desk.close()
