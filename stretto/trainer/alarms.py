"""When the disagreement of trainer and engine is more than rounding: one home for the thresholds, and their sentences.

Thresholds follow what others report (verl warns at a mean |p - q| of 0.01; R3, arXiv 2510.11370, at F(2) of 0.1); the
replace rate was measured here, see docs/numerics.md. An alarm is said when it begins, not again while it lasts.
The gate is for the start: an engine with another temperature, other weights or broken positions is found in the first
batch, before anything of it is published.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from stretto.trainer.agreement import ALL, Bucket

REPLACED = 0.05
"""Share of known rows in which the plausibility filter replaced an expert."""
DISAGREEMENT = 0.3
"""The same for strict replay, which replaces nothing: share of known rows where the router would choose others."""
FAR = 0.1
"""Share of tokens whose ratio, or its inverse, exceeds 2."""
MEAN_DP = 0.01
"""Mean |p - q| at lag 0, where only numerics differ."""
COVERAGE = 0.999
"""Share of rows whose experts are known, with replay."""
JUMP, JUMP_FLOOR, JUMP_MEASURED = 10.0, 1e-5, 5
"""k3 of numerics (`mismatch.measure`) over its median of the last measurements; smaller ones are nobody's concern."""

GATE_TOKENS = 64
"""Tokens of lag 0 that the gate needs to judge."""
GATE_K3, GATE_DP, GATE_CORRELATION = 0.05, 0.05, 0.95

Buckets = Mapping[str, Bucket]


class Alarms:
    """Remembers what was said, and how large k3 has been."""

    def __init__(self) -> None:
        self._lasting: set[str] = set()
        self._k3: deque[float] = deque(maxlen=JUMP_MEASURED)

    def news(self, buckets: Buckets) -> list[str]:
        """Sentences for what begins with this step. No tokens, no news."""
        if not buckets:
            return []
        found = alarming(buckets)
        news = [sentence for name, sentence in found.items() if name not in self._lasting]
        self._lasting = set(found)
        return news

    def jump(self, k3: float) -> str | None:
        """A sentence when `k3` of rollouts recomputed under the very version that sampled them is not what it was.

        Tokens of lag 0 in a batch would not do: many follow a swap, and look at keys and values of older weights.
        """
        usual = statistics.median(self._k3) if self._k3 else k3
        self._k3.append(k3)
        if k3 <= max(JUMP * usual, JUMP_FLOOR):
            return None
        return (
            f"k3 of rollouts under the version that sampled them jumped to {k3:.1e} from {usual:.1e}: engine or "
            "trainer computes otherwise than before"
        )


def alarming(buckets: Buckets) -> dict[str, str]:
    """Name and sentence of each threshold that is passed."""
    found = {}
    everything = buckets[ALL]
    shares = everything.rows.shares() if everything.rows else {}
    replaced, disagreement, coverage = (shares.get(name) for name in ("replaced", "disagreement", "coverage"))
    if replaced is not None and replaced > REPLACED:
        found["misaligned"] = (
            f"the router refuses the replayed experts of {replaced:.1%} of rows (more than {REPLACED:.0%}): "
            "misalignment, these routes do not belong to these tokens"
        )
    elif disagreement is not None and disagreement > DISAGREEMENT:
        found["misaligned"] = (
            f"the router would choose other experts than the replayed ones in {disagreement:.1%} of rows (more than "
            f"{DISAGREEMENT:.0%}): misalignment, these routes do not belong to these tokens"
        )
    if coverage is not None and coverage < COVERAGE:
        found["coverage"] = (
            f"only {coverage:.1%} of rows came with their experts (less than {COVERAGE:.1%}): the others route freely"
        )
    if everything.divergence.f2 > FAR:
        found["far"] = (
            f"{everything.divergence.f2:.1%} of tokens are more than twice or less than half as likely to the trainer "
            f"as they were to the engine (more than {FAR:.0%})"
        )
    same = buckets.get("0")
    if same is not None and same.divergence.mean_dp > MEAN_DP:
        found["same"] = (
            f"under the version that sampled them, probabilities of tokens differ by {same.divergence.mean_dp:.3f} on "
            f"average between engine and trainer (more than {MEAN_DP:g}): that is not rounding"
        )
    return found


def refusal(bucket: Bucket) -> str | None:
    """Why training must not start from tokens of the very version that the trainer holds; None when it may."""
    d = bucket.divergence
    if d.tokens < GATE_TOKENS:
        return None
    uncorrelated = d.correlation is not None and d.correlation < GATE_CORRELATION
    if d.k3 <= GATE_K3 and d.mean_dp <= GATE_DP and d.f2 <= FAR and not uncorrelated:
        return None
    correlation = "undefined" if d.correlation is None else f"{d.correlation:.3f}"
    return (
        f"engine and trainer do not compute the same policy: on {d.tokens} tokens of the version held here, k3 is "
        f"{d.k3:.2g} (at most {GATE_K3:g}), probabilities differ by {d.mean_dp:.2g} on average (at most {GATE_DP:g}) "
        f"and correlate at {correlation} (at least {GATE_CORRELATION:g}), {d.f2:.1%} are off by more than a factor of "
        f"2 (at most {FAR:.0%}), the largest difference of log-probs is {d.max_dlogp:.2g}; compare temperature, top_p, "
        "weights and tokenizer of both sides"
    )
