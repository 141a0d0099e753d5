"""Dense SwiGLU (arXiv 2002.05202): the MLP of a dense layer, and of the experts that all tokens share.

Shapes: `N` rows, `W` inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.model import kernels
from stretto.model.linear import Linear
from stretto.model.numerics import PLAIN, Numerics


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), with Hugging Face parameter names."""

    def __init__(self, width: int, inner: int, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        self.numerics = numerics
        self.gate_proj = Linear(width, inner, numerics)
        self.up_proj = Linear(width, inner, numerics)
        self.down_proj = Linear(inner, width, numerics)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_NW, up_NW = self.gate_proj(x_TD), self.up_proj(x_TD)
        if self.numerics.compiled(gate_NW):
            return self.down_proj(SwiGLU.apply(torch.cat((gate_NW, up_NW), dim=1), self.numerics.rounding))
        return self.down_proj(F.silu(gate_NW) * up_NW)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up in compiled code, from rows [N, 2W] that hold the gate first."""

    @staticmethod
    def forward(ctx: Any, joint_N2W: Tensor, rounding: bool) -> Tensor:
        ctx.save_for_backward(joint_N2W)
        return kernels.swiglu(joint_N2W, rounding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (joint_N2W,) = ctx.saved_tensors
        return kernels.swiglu_backward(joint_N2W, grads[0]), None
