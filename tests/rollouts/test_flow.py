"""The flow as a whole, in virtual time: the staleness bound holds and nothing is thrown away for it, whatever is slow,
dies or restarts."""

from __future__ import annotations

import pytest

from .world import Desk, World, configuration


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_bound_holds_without_discarding(tmp_path, bound, seed):
    desk = Desk(tmp_path, configuration(max_staleness=bound))
    world = World(desk, seed)
    world.run(steps=12)
    fates = desk.fates()
    assert not any(reason == "stale" for _, _, reason in fates.values())
    assert world.most_in_flight <= (bound + 1) * 3 + 3  # one more step's worth when everything has equal rewards
    accounted = set(fates) | {group.ordinal for group in desk.flow.training.values()}
    assert accounted == set(range(desk.flow.next_ordinal))
    desk.close()


def test_stale_rollouts_are_used_when_allowed(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=2))
    world = World(desk, seed=3)
    world.run(steps=12)
    ages = [age for batch in world.batches for age in batch.staleness]
    assert max(ages) >= 1
    desk.close()


@pytest.mark.parametrize("bound", [0, 2])
def test_dead_leases_and_a_restart(tmp_path, bound):
    desk = Desk(tmp_path, configuration(max_staleness=bound, deadline_seconds=40.0))
    world = World(desk, seed=4, dies=0.03)
    world.run(steps=10, restart_at=45.0)
    trained = [item.rollout for batch in world.batches for item in batch.items]
    assert len(trained) == len(set(trained))
    groups = [item.group for batch in world.batches for item in batch.items]
    assert all(sum(g == group for g in groups) <= 4 for group in set(groups))
    assert not any(reason == "stale" for _, _, reason in desk.fates().values())
    desk.close()
