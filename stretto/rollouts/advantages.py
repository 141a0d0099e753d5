"""What each member of a group is worth, compared with its siblings (`trainer.advantage`).

- `centred`: reward - mean reward of the group: Dr. GRPO (arXiv 2503.20783). No division by the standard deviation:
  that would weigh tasks by how nearly solved they are.
- `standardised`: that, over the group's standard deviation: GRPO (arXiv 2402.03300).
- `reinforce++`: that, over the standard deviation of the whole batch: REINFORCE++ with a group baseline (arXiv
  2501.03262). All tasks weigh alike, and the scale of rewards drops out.

Members that ended as `infra` must be left out by the caller before any mean is taken. Groups whose rewards are equal
have advantages of exactly zero under each, and count in the batch's standard deviation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

Estimator = Literal["centred", "standardised", "reinforce++"]


def has_signal(rewards: Sequence[float]) -> bool:
    """Do the rewards differ at all? Exact comparison: a float deviation of 1e-17 is not signal."""
    return any(reward != rewards[0] for reward in rewards)


def estimate(groups: Sequence[Sequence[float]], estimator: Estimator) -> list[list[float]]:
    """One advantage per reward, group by group, of all groups of a batch. Raises ValueError for a reward that is not
    finite."""
    for rewards in groups:
        for reward in rewards:
            if not math.isfinite(reward):
                raise ValueError(f"a reward is {reward}: no advantage can be taken from it")
    centred = [advantages(rewards) for rewards in groups]
    match estimator:
        case "centred":
            return centred
        case "standardised":
            return [_over(_deviation(group), group) for group in centred]
        case "reinforce++":
            whole = _deviation([value for group in centred for value in group])
            return [_over(whole, group) for group in centred]
    raise ValueError(f"trainer.advantage is {estimator!r}; use centred, standardised or reinforce++")


def advantages(rewards: Sequence[float]) -> list[float]:
    """`centred`, of one group; exactly zero for all when the rewards are equal."""
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _deviation(centred: Sequence[float]) -> float:
    """Of values whose mean is zero; the population's, as one group is all there is of it."""
    return math.sqrt(math.fsum(value * value for value in centred) / max(len(centred), 1))


def _over(deviation: float, centred: Sequence[float]) -> list[float]:
    """Nothing is added to the deviation, as is often done: where it is zero, every value is."""
    return [value / deviation for value in centred] if deviation else list(centred)


def shuffled(rewards: Sequence[float], seed: int) -> list[float]:
    """The control run (`grading.control = "shuffle"`): the same rewards, given to random members of the group."""
    order = list(rewards)
    random.Random(seed).shuffle(order)
    return order
