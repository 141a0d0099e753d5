"""Root-mean-square normalisation (arXiv 1910.07467), in float32 whatever the dtype of its input.

The gradient is written out: autograd would keep and read every intermediate step of a chain that memory already bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Normalise.apply(x, self.weight, self.eps)
        return _normalise(x, self.weight, self.eps)[0]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
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
        return dx_ND.view(x.shape).to(x.dtype), dweight_D.to(weight.dtype), None


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and 1 / sqrt(mean(x^2) + eps) with a last axis of 1."""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(len(weight)).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight.float()).to(x.dtype), scale
