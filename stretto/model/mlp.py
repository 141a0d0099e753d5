"""Dense SwiGLU (arXiv 2002.05202): the MLP of a dense layer, and of the experts that all tokens share."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), with Hugging Face parameter names."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
