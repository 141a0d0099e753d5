"""What may be said about solved counts: means over tasks, their uncertainty, pass@k. Pure.

Attempts at one task are not independent, so everything is computed over tasks. Intervals are 95 % percentile bootstraps
over tasks, 10,000 resamples, fixed seed; that of a gain resamples the same tasks before and after (paired). A result
is an `eval` line of metrics.jsonl: `solved[i]` of `valid[i]` attempts solved task i, and attempts that ended as `infra`
are not in `valid`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

RESAMPLES = 10_000
Z = 1.959964
"""Standard deviations of a normal distribution on either side that hold 95 % of it."""


def rates(line: Mapping[str, Any]) -> dict[str, float]:
    """Solved share of each task by its id; tasks without a valid attempt are left out."""
    solved = line["solved"]
    ids = line.get("ids") or [str(place) for place in range(len(solved))]
    return {id: count / tries for id, count, tries in zip(ids, solved, _valid(line)) if tries}


def mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)


def interval(values: Mapping[str, float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over tasks. Raises ValueError without tasks."""
    if not values:
        raise ValueError("an interval needs at least one task")
    array = np.fromiter(values.values(), float)
    draws = np.random.default_rng(0).integers(0, len(array), (RESAMPLES, len(array)))
    low, high = np.percentile(array[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def paired_interval(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean gain over the tasks in both. Raises ValueError when there are none."""
    return interval({id: after[id] - before[id] for id in before if id in after})


def wilson(successes: int, tries: int) -> tuple[float, float]:
    """95 % interval of a share of independent tries (Wilson 1927). Raises ValueError without tries."""
    if not 0 <= successes <= tries or not tries:
        raise ValueError(f"an interval needs tries, and no more successes than tries: got {successes} of {tries}")
    share, z2 = successes / tries, Z * Z
    middle = share + z2 / (2 * tries)
    reach = Z * math.sqrt(share * (1 - share) / tries + z2 / (4 * tries * tries))
    low, high = (middle - reach) / (1 + z2 / tries), (middle + reach) / (1 + z2 / tries)
    return max(0.0, low), min(1.0, high)


def pass_at_k(solved: int, valid: int, k: int) -> float:
    """Unbiased chance that at least one of `k` attempts solves the task, from `valid` >= k attempts of which `solved`
    did (arXiv 2107.03374, equation 1)."""
    if not 0 <= solved <= valid or not 1 <= k <= valid:
        raise ValueError(f"pass@{k} needs at least {k} attempts and 0 <= solved <= attempts, got {solved} of {valid}")
    return 1.0 - math.comb(valid - solved, k) / math.comb(valid, k)


def pass_at(k: int, line: Mapping[str, Any]) -> float | None:
    """Mean of `pass_at_k` over the tasks with at least `k` valid attempts; None where there are none."""
    values = [pass_at_k(count, tries, k) for count, tries in zip(line["solved"], _valid(line)) if tries >= k]
    return sum(values) / len(values) if values else None


def _valid(line: Mapping[str, Any]) -> list[int]:
    return line.get("valid") or [line["attempts"]] * len(line["solved"])
