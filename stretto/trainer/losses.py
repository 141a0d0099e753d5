"""The policy-gradient loss: minus the sum over tokens of share * coefficient * advantage * log-prob.

The coefficient comes from `corrections.py` and carries no gradient. Where a paper writes a surrogate (the clipped ratio
of PPO, GSPO's sequence ratio), this form has the surrogate's gradient, not its value: the tests hold the two against
each other. Three policies may be in play:

    behaviour  sampled the tokens, in one or several versions; its log-probs came with them
    proximal   the centre of a clip: the behaviour policy itself, or a moving average of the weights (arXiv 2110.00641)
    current    is trained

A batch makes exactly one optimizer step, hence one version. What a clip bounds is therefore the distance that
asynchrony has put between the other two policies and the current one, not that of several steps over one batch.

    objective reinforce     coefficient = correction(current / behaviour)
    any other               coefficient = correction(proximal / behaviour) * clip(current / proximal)

The share is the normalizer, fixed before the forward pass. It counts every sampled token, those included which the
correction later masks, so that it depends neither on the packing nor on the weights:

- `token`: 1 / sampled tokens of the batch's items; long rollouts weigh more;
- `sequence`: 1 / (rollouts * sampled tokens of this rollout); the segments of one rollout weigh 1 together;
- `constant`: 1 / (rollouts * token budget), as Dr. GRPO (arXiv 2503.20783): no length bias.

"Rollouts" are those of all finished groups of the step, groups with equal rewards included, so that the last two don't
grow when groups go flat. `token` cannot count those: the trainer never fetches their tokens.

KL to a reference is a penalty on k1 = log(current / reference), taken off each token's advantage. As a term of the loss
k1 would have a gradient of mean zero; as a reward, its gradient is that of the KL of the next token at each sampled
state. Rollouts without an advantage are not trained on, hence not held to the reference either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.config import TrainerConfig
from stretto.trainer import corrections
from stretto.trainer.corrections import Sequences, Weighed, log_ratio

Normalizer = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class _Constant:
    """float32 [N], without gradient."""

    values_N: Tensor

    def __post_init__(self) -> None:
        if self.values_N.requires_grad:
            raise TypeError(f"{type(self).__name__} carry a gradient: these are the current policy's log-probs")


class BehaviourLogprobs(_Constant):
    """float32 [N]: what the engine reported under the distribution it sampled from. A constant."""


class ProximalLogprobs(_Constant):
    """float32 [N]: those of the clip's centre, where that is not the behaviour policy. A constant."""


class ReferenceLogprobs(_Constant):
    """float32 [N]: those of the policy that `trainer.kl` holds to. A constant."""


@dataclass(frozen=True)
class CurrentLogprobs:
    """float32 [N]: the trained model's, under the same distribution, with gradient."""

    values_N: Tensor


@dataclass(frozen=True)
class Loss:
    """`total` is what to call backward on; the rest, detached, is for the metrics. [N] each; the ratio is current to
    behaviour, `k1_N` None without a reference."""

    total: Tensor
    log_ratio_N: Tensor
    weight_N: Tensor
    changed_N: Tensor
    k1_N: Tensor | None


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
    sequences: Sequences,
    settings: TrainerConfig,
    proximal: ProximalLogprobs | None = None,
    reference: ReferenceLogprobs | None = None,
) -> Loss:
    """Loss of some whole sequences of a batch; the losses of its micro-batches add up.

    Raises TypeError when the kinds of log-probs are mixed up.
    """
    if not isinstance(current, CurrentLogprobs) or not isinstance(behaviour, BehaviourLogprobs):
        raise TypeError(
            "policy_loss takes CurrentLogprobs and BehaviourLogprobs, "
            f"not {type(current).__name__} and {type(behaviour).__name__}"
        )
    ratio_N = log_ratio(current.values_N, behaviour.values_N)
    k1_N = None
    shaped_N = advantage_N
    if reference is not None:
        k1_N = log_ratio(current.values_N, reference.values_N)
        shaped_N = advantage_N - settings.kl * k1_N
    if settings.objective == "reinforce":
        weight_N, changed_N = _corrected(ratio_N, sequences, settings)
    else:
        weight_N, changed_N = _clipped(current, proximal or behaviour, shaped_N, sequences, settings)
        if proximal is not None:
            between = _corrected(log_ratio(proximal.values_N, behaviour.values_N), sequences, settings)
            weight_N, changed_N = weight_N * between.weight_N, changed_N | between.changed_N
    if settings.off_policy_mask:
        masked_N = corrections.off_policy(ratio_N, advantage_N, sequences, settings.off_policy_mask)
        weight_N, changed_N = weight_N.masked_fill(masked_N, 0.0), changed_N | masked_N
    # A token outside the current nucleus has no finite log-prob and no gradient; 0 * -inf would be nan.
    impossible_N = torch.isneginf(current.values_N.detach())
    logp_N = current.values_N.masked_fill(impossible_N, 0.0)
    total = -(share_N * weight_N * shaped_N * logp_N).sum()
    return Loss(total, ratio_N, weight_N, changed_N, k1_N)


def _corrected(log_ratio_N: Tensor, sequences: Sequences, settings: TrainerConfig) -> Weighed:
    floor, cap = settings.correction_floor, settings.correction_cap
    match settings.correction:
        case "none":
            return corrections.uncorrected(log_ratio_N)
        case "tis":
            return corrections.truncated(log_ratio_N, cap)
        case "sequence-tis":
            return corrections.truncated_sequences(log_ratio_N, sequences, cap)
        case "icepop":
            return corrections.two_sided_mask(log_ratio_N, floor, cap)
        case "sequence-mask":
            return corrections.sequence_mask(log_ratio_N, sequences, floor, cap)
        case "geometric-mask":
            return corrections.geometric_mask(log_ratio_N, sequences, floor, cap)


def _clipped(
    current: CurrentLogprobs,
    proximal: BehaviourLogprobs | ProximalLogprobs,
    advantage_N: Tensor,
    sequences: Sequences,
    settings: TrainerConfig,
) -> Weighed:
    ratio_N = log_ratio(current.values_N, proximal.values_N)
    bounds = (settings.clip_low, settings.clip_high, settings.clip_dual)
    match settings.objective:
        case "ppo":
            return corrections.clipped(ratio_N, advantage_N, bounds)
        case "gspo":
            return corrections.clipped_sequences(ratio_N, advantage_N, sequences, bounds)
        case "cispo":
            return corrections.truncated(ratio_N, 1.0 + settings.clip_high)
        case "dppo":
            return corrections.bounded_change(ratio_N, current.values_N, proximal.values_N, advantage_N, bounds)
        case "reinforce":
            raise AssertionError("reinforce has no clip")
