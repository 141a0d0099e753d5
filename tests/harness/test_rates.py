"""Pins: a sign that becomes common alarms once, and again only after it was gone; a steady share never does."""

from __future__ import annotations

import pytest

from stretto.harness.rates import SIGNS, Rates
from stretto.records import Outcome, Receipt


def receipt(outcome: Outcome = Outcome.SCORED, **behaviour: float) -> Receipt:
    names = {"rollout": "r", "group": "g", "purpose": "train", "worker": "w", "key": "k", "engine": "e"}
    counts = {"oldest_version": 0, "newest_version": 0, "tokens": 1, "sampled": 1, "turns": 1}
    return Receipt(**names, **counts, outcome=outcome, reward=0.0, solved=False, seconds=1.0, behaviour=dict(behaviour))


@pytest.mark.parametrize(
    ("odd", "sign"),
    [
        (receipt(questions=2.0), "ask the user"),
        (receipt(gave_up=1.0), "give up"),
        (receipt(bad_calls=1.0), "break tool calls"),
        (receipt(Outcome.FAULT), "end at fault"),
        (receipt(Outcome.INFRA), "leave the batch as infra"),
    ],
)
def test_HCK_12_HCK_13_what_a_policy_takes_to_is_told_once(odd: Receipt, sign: str) -> None:
    assert sign in SIGNS
    rates = Rates(block=20)

    def block(count: int) -> list[str]:
        return [text for n in range(20) for text in rates.add(odd if n < count else receipt())]

    assert block(1) == [] and block(1) == [], "5 %, as at first"
    (text,) = block(8)
    assert text.startswith(f"40% of the last 20 training rollouts {sign}; at first it was 5%")
    assert block(9) == [] and block(0) == []
    assert len(block(4)) == 1


def test_a_policy_that_was_always_so_does_not_alarm() -> None:
    rates = Rates(block=10)
    assert [text for _ in range(80) for text in rates.add(receipt(bad_calls=1.0))] == []
