"""From outcome to reward: a dict of items whose sum is trained on.

Only a scored submission can earn anything; being truncated, at fault or voided is never better than being wrong.
Broken tool calls cost a bounded amount whatever else happened, since a policy that loses nothing by them learns to
make them. Shaping (`[shaping]`) takes off more, within declared bounds that leave every solved rollout above every
unsolved one:

    effort       Composer 2's form, C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), over tokens, calls and turns
    behaviour    a charge per count of what `harness/behaviour.py` counts, e.g. questions to the user

Effort is charged to solved rollouts alone: charged to others, an early end would beat a long try that fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from stretto.config import GradingConfig, ShapingConfig
from stretto.harness.effort import Effort
from stretto.records import Outcome

MAX_PENALISED = 5


def reward(
    outcome: Outcome,
    solved: bool,
    bad_calls: int,
    config: GradingConfig,
    shaping: ShapingConfig | None = None,
    effort: Effort | None = None,
    behaviour: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Items `correctness` (0 or 1), `bad_calls` (<= 0) and those of `shaping` that are not zero, each <= 0. `infra`
    earns nothing and is not trained."""
    if outcome is Outcome.INFRA:
        return {"correctness": 0.0, "bad_calls": 0.0}
    correct = outcome is Outcome.SCORED and solved
    penalty = config.bad_call_penalty * min(bad_calls, MAX_PENALISED)
    items = {"correctness": float(correct), "bad_calls": -penalty if penalty else 0.0}
    if shaping is None:
        return items
    if effort is not None and correct and (charge := effort_charge(effort, shaping)):
        items["effort"] = -charge
    left = shaping.behaviour_most
    for name, weight in shaping.behaviour.items():
        charge = min(-weight * (behaviour or {}).get(name, 0.0), left)
        if charge > 0:
            items[name] = items.get(name, 0.0) - charge
            left -= charge
    return items


def effort_charge(effort: Effort, shaping: ShapingConfig) -> float:
    """What a rollout's effort costs: `effort_weight` times C(x), at most `effort_most`."""
    x = sum(getattr(shaping, f"effort_{name}") * count for name, count in vars(effort).items())
    return min(shaping.effort_weight * concave(x, shaping.effort_k, shaping.effort_q), shaping.effort_most)


def concave(x: float, k: float, q: float) -> float:
    """((1 + k x)^(1 - q) - 1) / (k (1 - q)), its limit log(1 + k x) / k at q = 1: slope 1 at 0, then ever less."""
    if math.isclose(q, 1.0):
        return math.log1p(k * x) / k
    return math.expm1((1 - q) * math.log1p(k * x)) / (k * (1 - q))
