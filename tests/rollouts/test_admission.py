"""Admission and the cut together keep the bound without throwing anything away, in any order of events and across
restarts. Pure: groups in memory, no ledger, no clock."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.records import Outcome, Receipt
from stretto.rollouts import batches
from stretto.rollouts.admission import ROUNDS, Admission
from stretto.rollouts.groups import Grant, Group, training_group
from stretto.rollouts.staleness import age, fits, last_step


def receipt(group: Group, member: int, reward: float, version: int) -> Receipt:
    return Receipt(
        rollout=f"{group.id}-{member:02d}",
        group=group.id,
        purpose="train",
        worker="w",
        outcome=Outcome.SCORED,
        reward=reward,
        solved=reward > 0,
        key="k",
        oldest_version=version,
        newest_version=version,
        tokens=2,
        sampled=1,
        turns=1,
        seconds=0.0,
        engine="e",
    )


def started(ordinal: int, version: int) -> Group:
    group = training_group(ordinal, "t", 2)
    for member in range(2):
        group.leased(Grant(f"{group.id}-{member:02d}", group.id, member, 0, "w", "e", version, 0.0))
    return group


def finish(group: Group, signal: bool) -> None:
    for member, slot in enumerate(group.slots):
        assert slot.version is not None
        group.closed(member, receipt(group, member, float(member) if signal else 1.0, slot.version))


def test_age_counts_from_the_oldest_token_to_the_version_being_updated():
    assert age(7, 5) == 2
    assert fits(7, 5, 2) and not fits(7, 4, 2)
    assert not fits(7, 8, 2)  # tokens from the future belong to a later step
    assert last_step(5, 2) == 7


def test_synchronous_at_zero():
    admission = Admission(max_staleness=0, groups_per_step=8)
    assert admission.capacity(version=3, next_step=3, live=0) == 8
    assert admission.capacity(version=3, next_step=3, live=8) == 0
    assert admission.capacity(version=3, next_step=4, live=0) == 0  # cut, not trained yet
    assert admission.capacity(version=4, next_step=4, live=0) == 8


def test_a_whole_window_of_equal_rewards_admits_more_up_to_a_limit():
    admission = Admission(max_staleness=0, groups_per_step=2)
    assert [admission.capacity(0, 0, live, flat=True) for live in (2, 4, 6, 8)] == [2, 2, 2, 0]
    assert admission.capacity(0, 0, live=2, flat=False) == 0


def test_lead_is_counted_from_the_newest_version_and_never_beyond_the_bound():
    admission = Admission(max_staleness=4, groups_per_step=2, lead=1)
    assert admission.capacity(version=3, next_step=3, live=0) == 4  # this step and one more
    assert admission.capacity(version=2, next_step=3, live=0, newest=3) == 4  # an engine that lags a little
    assert Admission(4, 2).capacity(version=3, next_step=3, live=0) == 10
    assert Admission(1, 2, lead=1).capacity(version=0, next_step=3, live=0, newest=3) == -2  # too old whatever the lead
    assert Admission(4, 2, lead=0).capacity(version=3, next_step=4, live=0) == 0  # cut, not trained yet


def test_nothing_starts_for_steps_after_the_last_one():
    admission = Admission(max_staleness=4, groups_per_step=2, steps=6)
    assert admission.capacity(version=1, next_step=1, live=0) == 10  # steps 1 to 5, all there are
    assert admission.capacity(version=4, next_step=4, live=3) == 1
    assert admission.capacity(version=6, next_step=6, live=0) == 0
    assert admission.capacity(version=5, next_step=5, live=2, flat=True) == 2  # the last step still waits for signal


@pytest.mark.parametrize("bound", range(4))
@pytest.mark.parametrize("size", [1, 3])
def test_capacity_is_exactly_the_number_of_groups_that_can_be_trained_in_time(bound, size):
    """Against the definition, over every small case: a group may start if, with all that live before it, the batch it
    falls into is not later than its version allows, and not further ahead than the lead."""
    for lead in (None, *range(bound + 1)):
        admission = Admission(bound, size, lead)
        for version, late, next_step, live in product(range(4), range(3), range(6), range(3 * size)):
            newest = version + late
            room = admission.capacity(version, next_step, live, newest=newest)

            latest = min(last_step(version, bound), version + bound if lead is None else newest + lead)
            places = range(live, 99)  # in the order in which batches take groups
            count = sum(next_step + place // size <= latest for place in places)
            assert max(0, room) == count, (lead, version, newest, next_step, live)


def test_overdue_counts_what_later_steps_can_train():
    admission = Admission(max_staleness=2, groups_per_step=2)
    assert admission.overdue(5, [5, 5, 6, 6]) is None
    assert admission.overdue(5, [5, 5, 5]) == 5
    assert admission.overdue(5, [6, 6, 6, 6, 6]) == 6
    assert admission.overdue(5, [4]) == 4  # its time is over


@settings(max_examples=150, deadline=None)
@given(
    bound=st.integers(0, 4),
    size=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    flat=st.sampled_from([0.0, 0.3, 0.9]),
    lag=st.integers(0, 3),
    lead=st.none() | st.integers(0, 4),
)
def test_ASY_1_nothing_is_too_old_and_nothing_is_discarded(bound, size, seed, flat, lag, lead):
    draw = random.Random(seed)
    admission = Admission(bound, size, lead)
    live: list[Group] = []
    ordinal = version = next_step = 0
    for _ in range(400):
        event = draw.choice(["start", "start", "finish", "finish", "cut", "commit", "restart"])
        if event == "start":
            serving = max(0, version - draw.randint(0, lag))
            quiet = bool(live) and all(group.finished and not group.signal for group in live)
            room = admission.capacity(serving, next_step, len(live), quiet, version)
            if fits(next_step, serving, bound):
                for _ in range(min(room, draw.randint(1, 3))):
                    live.append(started(ordinal, serving))
                    ordinal += 1
        elif event == "finish":
            waiting = [group for group in live if not group.finished]
            if waiting:
                finish(draw.choice(waiting[-4:]), signal=draw.random() > flat)  # late ones overtake
        elif event == "cut":
            assert batches.stale(live, next_step, bound) == []
            chosen = batches.choose(live, next_step, admission)
            if chosen is not None and version == next_step:
                batch = batches.build("r", next_step, chosen, seed)
                assert all(0 <= a <= bound for a in batch.staleness)
                assert size <= len(chosen)
                assert batch.items or len(chosen) >= ROUNDS * size
                live = [group for group in live if group not in chosen]
                next_step += 1
        elif event == "commit":
            version = next_step
        else:  # everything but the counts is forgotten
            admission = Admission(bound, size, lead)
    # And it always goes on: when all that is live ends and engines are up to date, there is a batch before long.
    version = next_step
    for _ in range(ROUNDS + bound + 2):
        for group in live:
            if not group.finished:
                finish(group, signal=True)
        chosen = batches.choose(live, next_step, admission)
        if chosen is not None:
            return
        quiet = bool(live) and all(group.finished and not group.signal for group in live)
        for _ in range(admission.capacity(version, next_step, len(live), quiet)):
            live.append(started(ordinal, version))
            ordinal += 1
    raise AssertionError("no batch")
