"""The guard: steps become smaller when the policy runs away from its own rollouts.

A batch shows how far the last few versions have moved: the same tokens, their probability when they were sampled and
now. Where that distance is large, the gradient is an estimate of something else, and Adam, which scales any gradient to
the same step, walks on at full speed; a run then loses the format of its tool calls within a few steps and does not
come back. So the learning rate is multiplied by a scale, at most 1, which follows

    scale  <-  scale * limit / distance   where the distance is above the limit, at once
    scale  <-  scale * 1.1                else, until it is 1 again

    distance = mean over the batch's sampled tokens of min(|log-ratio|, 2)^2 / 2

The distance is the KL divergence to second order, bounded per token so that a few outliers don't decide (the correction
deals with those). It is the adaptive KL penalty of PPO (arXiv 1707.06347, section 4) with the learning rate as what is
adapted. The scale is part of the resume state. In healthy training it is 1 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 2.0
"""|log-ratio| that one token may contribute."""
RECOVERY = 1.1
SMALLEST = 1 / 64
"""Of the scale: training slows down, it does not end."""
KEY = "guard"
"""Of its tensor in a checkpoint."""


class Guard:
    """`limit` is `trainer.guard`; 0 never slows down. Per step: `begin`, `add` for each micro-batch, `settle`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.scale = 1.0
        self.begin()

    def begin(self) -> None:
        self._sum = 0.0
        self._tokens = 0

    def add(self, log_ratio_N: Tensor) -> None:
        """log(current / behaviour) of sampled tokens."""
        self._sum += float(log_ratio_N.double().clamp(-LARGEST, LARGEST).square().sum()) / 2
        self._tokens += len(log_ratio_N)

    @property
    def distance(self) -> float:
        return self._sum / max(self._tokens, 1)

    def settle(self) -> float:
        """The scale for the step about to be made, which is finite."""
        if self._limit:
            factor = self._limit / self.distance if self.distance > self._limit else RECOVERY
            self.scale = max(SMALLEST, min(1.0, self.scale * factor))
        return self.scale

    def state(self) -> dict[str, Tensor]:
        return {KEY: torch.tensor(self.scale, dtype=torch.float64)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Switched off, the guard forgets."""
        self.scale = float(tensors[KEY]) if KEY in tensors and self._limit else 1.0
