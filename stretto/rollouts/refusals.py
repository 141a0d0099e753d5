"""What the orchestrator refuses, each with a sentence: messages that are wrong, unknown, or too early."""

from __future__ import annotations

import math

import msgspec

from stretto.records import Outcome, Receipt
from stretto.rollouts.groups import Grant

MOST_REWARD = 1e6
"""Sums and squares of rewards up to this size stay finite and exact enough in every estimator."""


class Unknown(LookupError):
    """There is no such rollout or evaluation (404)."""


class Conflict(RuntimeError):
    """Well-formed, but not possible in the present state (409)."""


def checked(receipt: Receipt, grant: Grant, newest: int) -> Receipt:
    """The receipt, if it fits its lease and itself; raises ValueError with a sentence (400) otherwise. `newest` is the
    newest version there can be.

    A rollout without sampled tokens has the age of its lease.
    """
    name = f"receipt of {receipt.rollout}"
    if receipt.group != grant.group:
        raise ValueError(f"{name}: it belongs to group {grant.group}, not {receipt.group}")
    if not math.isfinite(receipt.reward):
        raise ValueError(f"{name}: reward is {receipt.reward}, it must be finite")
    if abs(receipt.reward) > MOST_REWARD:
        raise ValueError(f"{name}: reward is {receipt.reward:g}, more than {MOST_REWARD:g} in size: scale it down")
    numbers = {"seconds": receipt.seconds, "turns": receipt.turns, **receipt.behaviour}
    for what, number in numbers.items():
        if not math.isfinite(number) or (what in ("seconds", "turns") and number < 0):
            raise ValueError(f"{name}: {what} is {number}, it must be finite and no less than 0")
    if not 0 <= receipt.sampled <= receipt.tokens:
        raise ValueError(f"{name}: {receipt.sampled} sampled of {receipt.tokens} tokens is impossible")
    if receipt.outcome is not Outcome.INFRA and not receipt.key:
        raise ValueError(f"{name}: no key, but every rollout that is not infra has a payload in the store")
    if receipt.sampled == 0:
        return msgspec.structs.replace(receipt, oldest_version=grant.version, newest_version=grant.version)
    if not 0 <= receipt.oldest_version <= receipt.newest_version:
        raise ValueError(
            f"{name}: versions {receipt.oldest_version} to {receipt.newest_version} are no range of policy versions"
        )
    if receipt.newest_version > newest:
        raise ValueError(
            f"{name}: version {receipt.newest_version} does not exist; the newest there can be is {newest}"
        )
    return receipt
