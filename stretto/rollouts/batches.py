"""The cut of a batch: which finished groups the next optimizer step trains, and what each rollout is worth.

Oldest groups first. A batch is the `groups_per_step` oldest finished groups, those with equal rewards included: they
have no gradient, so their rollouts are left out, but they are counted, also in the loss's denominators: a step does not
get larger because a group has nothing to teach. Three exceptions, all rare:

- None of them has signal: younger groups join up to the first that has. If no finished group has any, the cut waits
  until `admission.ROUNDS` times the usual number are there, and is then legal and empty.
- What would be left could not all be trained in time: the batch takes more finished groups.
- An unfinished group could not be trained in time after this cut: the cut waits for it. Leases expire, so this ends.

Groups that are too old all the same (an engine served an older version than it said) are dropped as `stale`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.records import Batch, BatchItem
from stretto.rollouts.admission import ROUNDS, Admission
from stretto.rollouts.advantages import Estimator, estimate, shuffled
from stretto.rollouts.groups import Group
from stretto.rollouts.seeds import derive
from stretto.rollouts.staleness import age, fits, last_step


def stale(groups: Sequence[Group], version: int, max_staleness: int) -> list[Group]:
    """Finished groups that neither this step nor any later one may train."""
    return [group for group in groups if group.finished and last_step(_oldest(group), max_staleness) < version]


def choose(groups: Sequence[Group], version: int, admission: Admission) -> list[Group] | None:
    """The groups for the step that updates `version`, oldest first, out of all live ones; None: not yet."""
    bound, size = admission.max_staleness, admission.groups_per_step
    ready = [group for group in groups if group.finished and fits(version, _oldest(group), bound)]
    ready.sort(key=lambda group: (_oldest(group), group.ordinal))
    chosen = {group.id for group in ready}
    others = [group for group in groups if group.id not in chosen]
    first_signal = next((place for place, group in enumerate(ready) if group.signal), None)
    if len(ready) < size or (first_signal is None and len(ready) < ROUNDS * size):
        return None

    def overdue(take: int) -> int | None:
        left = [last_step(_oldest(group), bound) for group in ready[take:] + others if group.oldest_version is not None]
        return admission.overdue(version + 1, left)

    take = max(size, ROUNDS * size if first_signal is None else first_signal + 1)
    while take < len(ready) and overdue(take) is not None:
        take += 1
    limit = overdue(take)
    if limit is not None and any(_waits(group, limit, bound) for group in others):
        return None
    return ready[:take]


def build(
    run: str,
    version: int,
    chosen: Sequence[Group],
    seed: int,
    control: str = "none",
    estimator: Estimator = "centred",
) -> Batch:
    """Advantages of the chosen groups. `control` is `grading.control`; shuffling is seeded by the group. `estimator` is
    `trainer.advantage`."""
    given = [_rewards(group, seed, control) for group in chosen]
    items = [
        BatchItem(
            rollout=receipt.rollout,
            group=group.id,
            key=receipt.key,
            reward=reward,
            advantage=advantage,
            oldest_version=receipt.oldest_version,
        )
        for group, rewards, worth in zip(chosen, given, estimate(given, estimator), strict=True)
        if group.signal
        for receipt, reward, advantage in zip(group.survivors, rewards, worth, strict=True)
    ]
    solved = [receipt.solved for group in chosen for receipt in group.survivors]
    return Batch(
        run=run,
        version=version,
        items=items,
        groups=len(chosen),
        rollouts=len(solved),
        dropped_equal=sum(not group.signal for group in chosen),
        solve_rate=sum(solved) / max(1, len(solved)),
        staleness=[age(version, item.oldest_version) for item in items],
    )


def _rewards(group: Group, seed: int, control: str) -> list[float]:
    """Of the group's survivors."""
    rewards = [receipt.reward for receipt in group.survivors]
    return shuffled(rewards, derive(seed, "shuffle", group.id)) if control == "shuffle" else rewards


def _oldest(group: Group) -> int:
    assert group.oldest_version is not None, f"{group.id} has no survivor: it should have been dropped as infra"
    return group.oldest_version


def _waits(group: Group, limit: int, bound: int) -> bool:
    return not group.finished and group.oldest_version is not None and last_step(group.oldest_version, bound) <= limit
