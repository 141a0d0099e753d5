"""Which rows a step trains on: a pure function of the seed and two small counters, whatever the number of ranks.

Each domain's rows are visited in a new random order each epoch. Which domain a row comes from follows the mixture by
largest deficit, so that after n rows each domain has had its share of n to within one row. A batch is made for all
ranks together and then dealt out, hence the same documents at any world size (PITFALLS MID-1 to MID-4).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from stretto.midtrain.tokens.shards import Domain, Row


class Stream:
    """stream = Stream(shards.domains, seed=0)
    rows = stream.batch(8, {"python": 0.9, "transcript": 0.1})
    mine = rows[rank::world]
    state = stream.state()   # small JSON; `restore` goes on exactly there
    """

    def __init__(self, domains: Mapping[str, Domain], seed: int):
        self._domains = dict(sorted(domains.items()))
        self._seed = seed
        self._taken = dict.fromkeys(self._domains, 0)
        self._due = dict.fromkeys(self._domains, 0.0)
        self._orders: dict[str, tuple[int, np.ndarray]] = {}

    def batch(self, rows: int, weights: Mapping[str, float]) -> list[Row]:
        """The next rows. Raises ValueError for a mixture that names what is not there, or sums to nothing."""
        shares = normalised(weights, self._domains)
        found = []
        for _ in range(rows):
            for domain, share in shares.items():
                self._due[domain] += share
            domain = max(shares, key=lambda name: (self._due[name], name))
            self._due[domain] -= 1.0
            found.append(self._next(domain))
        return found

    def _next(self, domain: str) -> Row:
        rows = self._domains[domain]
        epoch, at = divmod(self._taken[domain], len(rows))
        if self._orders.get(domain, (-1, None))[0] != epoch:
            seed = [self._seed, zlib.crc32(domain.encode()), epoch]
            self._orders[domain] = (epoch, np.random.default_rng(seed).permutation(len(rows)))
        self._taken[domain] += 1
        return rows.row(int(self._orders[domain][1][at]))

    @property
    def epochs(self) -> dict[str, float]:
        """How often each domain has been read."""
        return {name: taken / len(self._domains[name]) for name, taken in self._taken.items()}

    def state(self) -> dict[str, Any]:
        return {"taken": dict(self._taken), "due": dict(self._due)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError when the state is of other shards."""
        if set(state["taken"]) != set(self._domains):
            raise ValueError(
                f"the state is of domains {sorted(state['taken'])}, these shards have {sorted(self._domains)}"
            )
        self._taken = dict(state["taken"])
        self._due = dict(state["due"])


def normalised(weights: Mapping[str, float], domains: Mapping[str, Any]) -> dict[str, float]:
    """Shares that sum to 1, in the order of names; raises ValueError."""
    unknown = sorted(set(weights) - set(domains))
    if unknown:
        raise ValueError(f"the mixture names {', '.join(unknown)}; the shards have {', '.join(sorted(domains))}")
    total = sum(weights.values())
    if min(weights.values(), default=0.0) < 0 or not 0 < total < float("inf"):
        raise ValueError(
            f"the mixture's weights must be no less than 0 and sum to more than 0; they are {dict(weights)}"
        )
    return {name: weights[name] / total for name in sorted(weights) if weights[name] > 0}


def annealed(start: Mapping[str, float], end: Mapping[str, float], progress: float) -> dict[str, float]:
    """A phase's mixture at `progress` (0 to 1): linear between the shares it begins and ends with."""
    names = set(start) | set(end)
    first, last = (sum(weights.values()) or 1.0 for weights in (start, end))
    return {
        name: (1 - progress) * start.get(name, 0.0) / first + progress * end.get(name, 0.0) / last
        for name in sorted(names)
    }
