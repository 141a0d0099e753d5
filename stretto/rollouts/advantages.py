"""What each member of a group is worth, compared with its siblings: Dr. GRPO (arXiv 2503.20783).

Advantage = reward - mean reward of the group. No division by the standard deviation, which would weigh tasks by how
nearly solved they are. Members that ended as `infra` must be left out by the caller before the mean is taken.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def has_signal(rewards: Sequence[float]) -> bool:
    """Do the rewards differ at all? Exact comparison: a float deviation of 1e-17 is not signal."""
    return any(reward != rewards[0] for reward in rewards)


def advantages(rewards: Sequence[float]) -> list[float]:
    """One advantage per reward; exactly zero for all when the rewards are equal."""
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def shuffled(rewards: Sequence[float], seed: int) -> list[float]:
    """The control run (`grading.control = "shuffle"`): the same rewards, given to random members of the group."""
    order = list(rewards)
    random.Random(seed).shuffle(order)
    return order
