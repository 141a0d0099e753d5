"""What an off-policy token still counts: a coefficient on its log-prob's gradient, from the ratio of two policies.

Every objective of this room is REINFORCE with a coefficient, the gradient of its paper's surrogate:

    minus sum over tokens of   share * coefficient * advantage * log-prob      (losses.py)

Two questions, two families of functions. *Corrections* ask what a token is worth that another policy sampled:

- `tis`: min(ratio, cap), per token (Espeholt et al. 2018, arXiv 1802.01561; Yao et al. 2025, "Your efficient RL
  framework secretly brings you off-policy RL training").
- `sequence-tis`: min(product of the sequence's ratios, cap): unbiased up to the cap, of large variance on long ones.
- `icepop`: the ratio inside [floor, cap], else 0 (Ring-1T, arXiv 2510.18855).
- `sequence-mask`: the product inside [floor, cap], else 0 for the whole sequence (masked importance sampling: Liu et
  al. 2025, "When speed kills stability"; Zheng et al. 2025, arXiv 2512.01374).
- `geometric-mask`: 1 where the geometric mean of the sequence's ratios is inside [floor, cap], else 0: the bound does
  not tighten with length (same text by Liu et al.).
- `none`: 1.

*Clips* ask whether a step has already gone far enough from the proximal policy:

- `ppo`: the ratio, 0 where a clip has cut the gradient off (arXiv 1707.06347; asymmetric: DAPO, 2503.14476; dual:
  1912.09729).
- `gspo`: the same, with one ratio for the sequence, the geometric mean (arXiv 2507.18071).
- `cispo`: min(ratio, 1 + high), every token keeps its gradient (MiniMax-M1, arXiv 2506.13585).
- `dppo`: the ratio, 0 where the token's probability has moved by more than a bound (binary total variation: arXiv
  2602.04879).

And one mask goes with any of them, `off_policy`: sequences with a negative advantage that have become unlikely count 0
(DeepSeek-V3.2, arXiv 2512.02556).

A *sequence* is one segment: an append-only run of tokens, which lies whole in one micro-batch. All arithmetic is in log
space and clamped before `exp`, so that nothing overflows; results carry no gradient and are exactly 1 where the two
policies agree. Shape suffix: `N` sampled tokens.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Correction = Literal["none", "tis", "sequence-tis", "icepop", "sequence-mask", "geometric-mask"]
Objective = Literal["reinforce", "ppo", "cispo", "gspo", "dppo"]

SMALLEST_LOG_RATIO = -20.0
LARGEST_LOG_RATIO = 20.0


class Weighed(NamedTuple):
    """`weight_N` float32 without gradient; `changed_N` bool: tokens whose ratio was truncated or masked."""

    weight_N: Tensor
    changed_N: Tensor


def log_ratio(current_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """log(current / behaviour), detached and clamped to [-20, 20]. A token the current policy cannot produce at all
    (log-prob -inf: outside its nucleus) gets the lower bound; nan stays nan, so that it is seen."""
    return _clamped(current_N.detach().float() - behaviour_N.detach().float())


class Sequences:
    """Which sequence each token belongs to. `index_N` int64 in [0, count)."""

    def __init__(self, index_N: Tensor, count: int) -> None:
        self._index_N = index_N
        self._lengths = torch.bincount(index_N, minlength=count).double()

    @classmethod
    def of_lengths(cls, lengths: list[int]) -> Sequences:
        return cls(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long)), len(lengths))

    def sum(self, values_N: Tensor) -> Tensor:
        """The sum over each token's sequence, again per token. In float64, so that a sequence's sum does not depend on
        what it is packed with."""
        sums = torch.zeros_like(self._lengths).index_add_(0, self._index_N, values_N.double())
        return sums[self._index_N]

    def mean(self, values_N: Tensor) -> Tensor:
        return self.sum(values_N) / self._lengths[self._index_N]


# Corrections


def uncorrected(log_ratio_N: Tensor) -> Weighed:
    return Weighed(torch.ones_like(log_ratio_N), torch.zeros_like(log_ratio_N, dtype=torch.bool))


def truncated(log_ratio_N: Tensor, cap: float) -> Weighed:
    """min(ratio, cap)."""
    bound = math.log(cap)
    return Weighed(log_ratio_N.clamp(max=bound).exp(), log_ratio_N > bound)


def truncated_sequences(log_ratio_N: Tensor, sequences: Sequences, cap: float) -> Weighed:
    """min(product of the sequence's ratios, cap)."""
    return truncated(_clamped(sequences.sum(log_ratio_N)).float(), cap)


def two_sided_mask(log_ratio_N: Tensor, floor: float, cap: float) -> Weighed:
    """The ratio where floor <= ratio <= cap, else 0."""
    low, high = math.log(floor), math.log(cap)
    outside_N = (log_ratio_N < low) | (log_ratio_N > high)
    return Weighed(log_ratio_N.clamp(low, high).exp().masked_fill(outside_N, 0.0), outside_N)


def sequence_mask(log_ratio_N: Tensor, sequences: Sequences, floor: float, cap: float) -> Weighed:
    """The product of the sequence's ratios where floor <= product <= cap, else 0."""
    return two_sided_mask(_clamped(sequences.sum(log_ratio_N)).float(), floor, cap)


def geometric_mask(log_ratio_N: Tensor, sequences: Sequences, floor: float, cap: float) -> Weighed:
    """1 where floor <= geometric mean of the sequence's ratios <= cap, else 0; nan where the mean is nan."""
    mean_N = sequences.mean(log_ratio_N).float()
    outside_N = two_sided_mask(mean_N, floor, cap).changed_N
    ones_N = torch.ones_like(mean_N).masked_fill(mean_N.isnan(), math.nan)
    return Weighed(ones_N.masked_fill(outside_N, 0.0), outside_N)


# Clips


def clipped(log_ratio_N: Tensor, advantage_N: Tensor, bounds: tuple[float, float, float]) -> Weighed:
    """PPO's clip as a coefficient: the ratio; 0 where it has passed 1 + high at a positive advantage or fallen below
    1 - low at a negative one (the minimum of the surrogate is then constant), and above `dual` at any. Bounds are (low,
    high, dual)."""
    low, high, dual = bounds
    over_N = (log_ratio_N > math.log1p(high)) & (advantage_N > 0)
    under_N = (log_ratio_N < (math.log1p(-low) if low < 1 else -math.inf)) & (advantage_N < 0)
    cut_N = over_N | under_N | (log_ratio_N > math.log(dual))
    return Weighed(log_ratio_N.exp().masked_fill(cut_N, 0.0), cut_N)


def clipped_sequences(
    log_ratio_N: Tensor, advantage_N: Tensor, sequences: Sequences, bounds: tuple[float, float, float]
) -> Weighed:
    """`clipped`, for the geometric mean of the sequence's ratios."""
    return clipped(sequences.mean(log_ratio_N).float(), advantage_N, bounds)


def bounded_change(
    log_ratio_N: Tensor, current_N: Tensor, proximal_N: Tensor, advantage_N: Tensor, bounds: tuple[float, float, float]
) -> Weighed:
    """The ratio; 0 where the probability has risen by more than `high` at a positive advantage or fallen by more than
    `low` at a negative one, and where the ratio is above `dual`. `current_N`, `proximal_N` are log-probs; bounds are
    (low, high, dual)."""
    low, high, dual = bounds
    change_N = current_N.detach().float().exp() - proximal_N.detach().float().exp()
    cut_N = ((change_N > high) & (advantage_N > 0)) | ((change_N < -low) & (advantage_N < 0))
    cut_N |= log_ratio_N > math.log(dual)
    return Weighed(log_ratio_N.exp().masked_fill(cut_N, 0.0), cut_N)


def off_policy(log_ratio_N: Tensor, advantage_N: Tensor, sequences: Sequences, bound: float) -> Tensor:
    """bool: tokens of sequences with a negative advantage whose mean log-prob has fallen by more than `bound`."""
    return (sequences.mean(-log_ratio_N) > bound) & (advantage_N < 0)


def _clamped(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO)
