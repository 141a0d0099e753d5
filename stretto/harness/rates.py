"""Alarms for policies that learn to get around the work: they ask, give up, break calls, or leave the batch more often
than they did. Pure; a worker feeds it the receipts of its training rollouts.

Each sign's share is taken over blocks of `BLOCK` rollouts. The first block is the baseline; a later one alarms when its
share is at least `LEAST` and `TIMES` the baseline's, once until it falls below again.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.records import Outcome, Receipt

BLOCK = 200
LEAST = 0.1
TIMES = 2.0

SIGNS: dict[str, Callable[[Receipt], bool]] = {
    "ask the user": lambda receipt: receipt.behaviour.get("questions", 0) > 0,
    "give up": lambda receipt: receipt.behaviour.get("gave_up", 0) > 0,
    "break tool calls": lambda receipt: receipt.behaviour.get("bad_calls", 0) > 0,
    "end at fault": lambda receipt: receipt.outcome is Outcome.FAULT,
    "are truncated": lambda receipt: receipt.outcome is Outcome.TRUNCATED,
    "leave the batch as infra": lambda receipt: receipt.outcome is Outcome.INFRA,
}


class Rates:
    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._seen = 0
        self._counts = dict.fromkeys(SIGNS, 0)
        self._baseline: dict[str, float] = {}
        self._alarmed: set[str] = set()

    def add(self, receipt: Receipt) -> list[str]:
        """A sentence for each sign whose share has risen, when a block is full."""
        self._seen += 1
        for sign, shows in SIGNS.items():
            self._counts[sign] += shows(receipt)
        if self._seen < self._block:
            return []
        shares = {sign: count / self._seen for sign, count in self._counts.items()}
        self._seen, self._counts = 0, dict.fromkeys(SIGNS, 0)
        if not self._baseline:
            self._baseline = shares
            return []
        risen = {sign for sign, share in shares.items() if share >= max(LEAST, TIMES * self._baseline[sign])}
        news, self._alarmed = risen - self._alarmed, risen
        return [
            f"{shares[sign]:.0%} of the last {self._block} training rollouts {sign}; at first it was "
            f"{self._baseline[sign]:.0%}. Look at some before the policy learns more of it"
            for sign in SIGNS
            if sign in news
        ]
