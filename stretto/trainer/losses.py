"""The policy-gradient loss: minus the sum over tokens of share * weight * advantage * log-prob.

The weight comes from `corrections.py` and carries no gradient (REINFORCE with importance weights). A batch makes
exactly one optimizer step, so there is no proximal policy in between and nothing for PPO's clip to do: on policy the
weight is 1 and the gradient is that of GRPO (arXiv 2402.03300, and 2503.20783 for its normalizer).

The share is the normalizer, fixed before the forward pass. It counts every sampled token, those included which the
correction later masks, so that it depends neither on the packing nor on the weights:

- `token`: 1 / sampled tokens of the batch's items; long rollouts weigh more;
- `sequence`: 1 / (rollouts * sampled tokens of this rollout); the segments of one rollout weigh 1 together;
- `constant`: 1 / (rollouts * token budget), as Dr. GRPO: no length bias.

"Rollouts" are those of all finished groups of the step, groups with equal rewards included, so that the last two don't
grow when groups go flat. `token` cannot count those: the trainer never fetches their tokens.

Left out: KL to a reference policy and entropy bonus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.trainer.corrections import Correction, log_ratio, weigh

Normalizer = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class BehaviourLogprobs:
    """float32 [N]: what the engine reported under the distribution it sampled from. A constant."""

    values_N: Tensor

    def __post_init__(self) -> None:
        if self.values_N.requires_grad:
            raise TypeError("behaviour log-probs carry a gradient: these are the current policy's, not the engine's")


@dataclass(frozen=True)
class CurrentLogprobs:
    """float32 [N]: the trained model's, under the same distribution, with gradient."""

    values_N: Tensor


@dataclass(frozen=True)
class Loss:
    """`total` is what to call backward on; the rest, detached, is for the metrics. [N] each."""

    total: Tensor
    log_ratio_N: Tensor
    weight_N: Tensor
    changed_N: Tensor


def token_share(normalizer: Normalizer, rollouts: int, sampled: int, sampled_here: int, budget: int) -> float:
    """Share of one token in the loss.

    `rollouts` counts those of all finished groups of the step, flat ones included; `sampled` are the sampled tokens of
    the batch's items, `sampled_here` those of this token's rollout over all its segments; `budget` is the largest
    number of tokens a rollout may have.
    """
    match normalizer:
        case "token":
            return 1.0 / max(sampled, 1)
        case "sequence":
            return 1.0 / (max(rollouts, 1) * max(sampled_here, 1))
        case "constant":
            return 1.0 / (max(rollouts, 1) * budget)
    raise ValueError(f"trainer.normalizer is {normalizer!r}; use token, sequence or constant")


def policy_loss(
    current: CurrentLogprobs,
    behaviour: BehaviourLogprobs,
    advantage_N: Tensor,
    share_N: Tensor,
    correction: Correction,
    cap: float,
) -> Loss:
    """Loss of some tokens of a batch; the losses of its micro-batches add up.

    Raises TypeError when the two kinds of log-probs are mixed up.
    """
    if not isinstance(current, CurrentLogprobs) or not isinstance(behaviour, BehaviourLogprobs):
        raise TypeError(
            "policy_loss takes CurrentLogprobs and BehaviourLogprobs, "
            f"not {type(current).__name__} and {type(behaviour).__name__}"
        )
    ratio_N = log_ratio(current.values_N, behaviour.values_N)
    weight_N, changed_N = weigh(ratio_N, correction, cap)
    # A token outside the current nucleus has no finite log-prob and no gradient; 0 * -inf would be nan.
    impossible_N = torch.isneginf(current.values_N.detach())
    logp_N = current.values_N.masked_fill(impossible_N, 0.0)
    total = -(share_N * weight_N * advantage_N * logp_N).sum()
    return Loss(total, ratio_N, weight_N, changed_N)
