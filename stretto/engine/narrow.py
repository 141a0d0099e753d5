"""Weights as the bits of bf16, for products of few rows: these take as long as their weights take to read.

Whatever serves holds bf16 values in float32 (`docs/weights.md`), so that half of each number says nothing. A narrow
weight is the other half, a second copy beside the float32 one that larger products and loads work on.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Narrow:
    """A weight, flat, as compiled products take it: `bits` are uint16, or the float32 themselves where a value has
    more bits than bf16. Products give the same either way, to the bit. After a write into the weight `refresh` is due.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()
        self.refresh()

    def refresh(self) -> None:
        bits = narrowed(self._weight)
        same = torch.equal(self._weight.view(-1).view(torch.int32), torch.from_numpy(bits.astype(np.int32)) << 16)
        self.bits = bits if same else self._weight.numpy().reshape(-1)


def narrowed(weight: Tensor) -> np.ndarray:
    """uint16, flat: the bits of the nearest bf16 numbers."""
    return weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy().reshape(-1)
