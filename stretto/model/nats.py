"""The sum of -log p of given tokens, with all logits kept: for a vocabulary small enough that this is no burden.

Forward and backward go over the logits in compiled loops, in place, so that nothing of their size is held beside them.
`logprobs.py` is the way for large vocabularies, temperatures and truncated supports.

Shapes: `N` tokens, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.model import grouped, kernels


class Nats(torch.autograd.Function):
    """`Nats.apply(hidden_ND, weight_VD, targets_N)`: a scalar, float32 on the CPU. Its gradient may be taken once."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        z_NV = _logits(hidden_ND, weight_VD)
        nats_N, total_N = kernels.softmax_(z_NV, targets_N)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, total_N)
        ctx.z_NV = z_NV
        return nats_N.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_ND, weight_VD, targets_N, total_N = ctx.saved_tensors
        z_NV, ctx.z_NV = ctx.z_NV, None
        if z_NV is None:
            raise RuntimeError("the gradient of this loss was taken before, and its logits are gone")
        kernels.softmax_slope_(z_NV, total_N, targets_N, float(grads[0]))
        if grouped.fits(*weight_VD.shape):
            dhidden_ND, dweight_1VD = grouped.slopes(hidden_ND, weight_VD.unsqueeze(0), [len(z_NV)], z_NV)
            return dhidden_ND, dweight_1VD[0], None
        return torch.mm(z_NV, weight_VD), torch.mm(z_NV.t(), hidden_ND), None


def _logits(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    if grouped.fits(*weight_VD.shape):
        return grouped.products(hidden_ND, weight_VD.unsqueeze(0), [len(hidden_ND)])
    return torch.mm(hidden_ND, weight_VD.t())
