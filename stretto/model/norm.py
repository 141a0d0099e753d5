"""Root-mean-square normalisation (arXiv 1910.07467), in float32 whatever the dtype of its input.

The gradient is written out: autograd would keep and read every intermediate step of a chain that memory already bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stretto.model import kernels
from stretto.model.numerics import PLAIN, Numerics


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""

    def __init__(self, width: int, eps: float, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        self.eps, self.numerics = eps, numerics
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Normalise.apply(x, self.weight, self.eps, self.numerics)
        return _normalise(x, self.weight, self.eps, self.numerics)[0]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, numerics: Numerics) -> Tensor:
        y, scale = _normalise(x, weight, eps, numerics)
        ctx.save_for_backward(x, weight, scale)
        ctx.fused = numerics.fused
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        if ctx.fused and x.dtype == torch.float32 and x.device.type == "cpu":
            return *kernels.rms_norm_backward(x, weight, scale, grads[0]), None, None
        width = len(weight)
        x_ND, dy_ND = x.float().reshape(-1, width), grads[0].float().reshape(-1, width)
        scale_N, weight_D = scale.reshape(-1), weight.float()
        product_ND = dy_ND * x_ND
        shrink_N = torch.mv(product_ND, weight_D).mul_(scale_N.pow(3)).div_(width)
        dweight_D = torch.mv(product_ND.t(), scale_N)
        dx_ND = (
            torch.mul(dy_ND, weight_D, out=product_ND)
            .mul_(scale_N[:, None])
            .addcmul_(x_ND, shrink_N[:, None], value=-1)
        )
        return dx_ND.view(x.shape).to(x.dtype), dweight_D.to(weight.dtype), None, None


def _normalise(x: Tensor, weight: Tensor, eps: float, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """The result, and 1 / sqrt(mean(x^2) + eps) with a last axis of 1."""
    if numerics.compiled(x):
        return kernels.rms_norm(x, weight, eps, numerics.rounding)
    wide = x.float()
    scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()  # to the bit what transformers computes
    return (wide * scale).mul_(weight.float()).to(x.dtype), scale
