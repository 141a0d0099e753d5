"""What an off-policy token still counts: a weight from the ratio of current to behaviour probability.

One ratio covers both causes of mismatch, numerics (engine against trainer) and staleness (old against new weights).
All arithmetic is in log space and clamped before `exp`, so that no log-ratio overflows; the weights carry no gradient
and are exactly 1 where the two log-probs are equal.

- `tis`: token-level truncated importance sampling, min(ratio, cap) (Yao et al. 2025, "Your efficient RL framework
  secretly brings you off-policy RL training"; Espeholt et al. 2018, arXiv 1802.01561).
- `icepop`: the ratio inside [1/cap, cap], zero outside (Ring-1T report, arXiv 2510.18855).
- `none`: every token counts 1.

Sequence-level weights are left out: at agent lengths their variance is out of bounds.
Shape suffix: `N` sampled tokens.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Correction = Literal["tis", "icepop", "none"]

SMALLEST_LOG_RATIO = -20.0
LARGEST_LOG_RATIO = 20.0


class Weighed(NamedTuple):
    """`weight_N` float32 without gradient; `changed_N` bool: tokens whose ratio was truncated or masked."""

    weight_N: Tensor
    changed_N: Tensor


def log_ratio(current_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """log(current / behaviour), detached and clamped to [-20, 20]. A token the current policy cannot produce at all
    (log-prob -inf: outside its nucleus) gets the lower bound; nan stays nan, so that it is seen."""
    difference_N = current_N.detach().float() - behaviour_N.detach().float()
    return difference_N.clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO)


def truncated(log_ratio_N: Tensor, cap: float) -> Weighed:
    """min(ratio, cap)."""
    bound = math.log(cap)
    return Weighed(log_ratio_N.clamp(max=bound).exp(), log_ratio_N > bound)


def two_sided_mask(log_ratio_N: Tensor, cap: float) -> Weighed:
    """The ratio where 1/cap <= ratio <= cap, else 0."""
    bound = math.log(cap)
    outside_N = log_ratio_N.abs() > bound
    return Weighed(log_ratio_N.clamp(-bound, bound).exp().masked_fill(outside_N, 0.0), outside_N)


def uncorrected(log_ratio_N: Tensor) -> Weighed:
    return Weighed(torch.ones_like(log_ratio_N), torch.zeros_like(log_ratio_N, dtype=torch.bool))


def weigh(log_ratio_N: Tensor, correction: Correction, cap: float) -> Weighed:
    """The weight of each token under the named correction; `log_ratio_N` comes from `log_ratio`."""
    match correction:
        case "tis":
            return truncated(log_ratio_N, cap)
        case "icepop":
            return two_sided_mask(log_ratio_N, cap)
        case "none":
            return uncorrected(log_ratio_N)
    raise ValueError(f"trainer.correction is {correction!r}; use tis, icepop or none")
