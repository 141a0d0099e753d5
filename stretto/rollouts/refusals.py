"""What the orchestrator refuses, each with a sentence: messages that are wrong, unknown, or too early."""

from __future__ import annotations

import math

import msgspec

from stretto.records import Outcome, Receipt
from stretto.rollouts.groups import Grant


class Unknown(LookupError):
    """There is no such rollout or evaluation (404)."""


class Conflict(RuntimeError):
    """Well-formed, but not possible in the present state (409)."""


def checked(receipt: Receipt, grant: Grant) -> Receipt:
    """The receipt, if it fits its lease and itself; raises ValueError with a sentence (400) otherwise.

    A rollout without sampled tokens has the age of its lease.
    """
    name = f"receipt of {receipt.rollout}"
    if receipt.group != grant.group:
        raise ValueError(f"{name}: it belongs to group {grant.group}, not {receipt.group}")
    if not math.isfinite(receipt.reward):
        raise ValueError(f"{name}: reward is {receipt.reward}, it must be finite")
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
    return receipt
