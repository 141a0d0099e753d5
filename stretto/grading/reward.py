"""From outcome to reward: a dict of items whose sum is trained on.

Only a scored submission can earn anything; being truncated, at fault or voided is never better than being wrong.
Broken tool calls cost a bounded amount whatever else happened, since a policy that loses nothing by them learns to
make them.
"""

from __future__ import annotations

from stretto.config import GradingConfig
from stretto.records import Outcome

MAX_PENALISED = 5


def reward(outcome: Outcome, solved: bool, bad_calls: int, config: GradingConfig) -> dict[str, float]:
    """Items `correctness` (0 or 1) and `bad_calls` (<= 0). `infra` earns nothing and is not trained."""
    if outcome is Outcome.INFRA:
        return {"correctness": 0.0, "bad_calls": 0.0}
    correct = outcome is Outcome.SCORED and solved
    penalty = config.bad_call_penalty * min(bad_calls, MAX_PENALISED)
    return {"correctness": float(correct), "bad_calls": -penalty if penalty else 0.0}
