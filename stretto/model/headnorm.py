"""RMSNorm of each head and its rotation in one pass, forward and backward: what Qwen3 does to queries and keys.

Heads are short rows, which plain loops leave to scalar code. One thread, float32; the width of a head is a multiple of
two vectors, so that each half of it is whole vectors.

Shapes: `T` tokens, `H` heads, `d` their width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.model.kernels import compiled, own_memory
from stretto.model.simd import LANES, add, add_lanes, fill, fma, load, mul, store, sub, zero


@compiled()
def _forward(x, weight_d, eps, cos, sin, heads, out, scale_N):
    width = len(weight_d)
    half = width // 2
    for n in range(len(scale_N)):
        at, angle = n * width, n // heads * width
        squares = zero()
        for i in range(0, width, LANES):
            squares = fma(load(x, at + i), load(x, at + i), squares)
        scale_N[n] = np.float32(1) / np.sqrt(add_lanes(squares) / np.float32(width) + np.float32(eps))
        scale = fill(scale_N[n])
        for i in range(0, half, LANES):
            j = half + i
            a = mul(mul(load(x, at + i), scale), load(weight_d, i))
            b = mul(mul(load(x, at + j), scale), load(weight_d, j))
            store(out, at + i, fma(b, load(sin, angle + i), mul(a, load(cos, angle + i))))
            store(out, at + j, fma(a, load(sin, angle + j), mul(b, load(cos, angle + j))))


@compiled()
def _backward(x, weight_d, cos, sin, heads, scale_N, dout, dx, dweight_d):
    width = len(weight_d)
    half = width // 2
    for n in range(len(scale_N)):
        at, angle = n * width, n // heads * width
        shared = zero()
        for i in range(0, half, LANES):  # turned back, times the weight
            j = half + i
            a, b = load(dout, at + i), load(dout, at + j)
            da = fma(b, load(sin, angle + j), mul(a, load(cos, angle + i)))
            db = fma(a, load(sin, angle + i), mul(b, load(cos, angle + j)))
            scale = fill(scale_N[n])
            store(dweight_d, i, fma(mul(da, load(x, at + i)), scale, load(dweight_d, i)))
            store(dweight_d, j, fma(mul(db, load(x, at + j)), scale, load(dweight_d, j)))
            da, db = mul(da, load(weight_d, i)), mul(db, load(weight_d, j))
            shared = add(shared, fma(da, load(x, at + i), mul(db, load(x, at + j))))
            store(dx, at + i, da)
            store(dx, at + j, db)
        scale = fill(scale_N[n])
        shrink = fill(add_lanes(shared) * scale_N[n] * scale_N[n] / np.float32(width))
        for i in range(0, width, LANES):
            store(dx, at + i, mul(sub(load(dx, at + i), mul(load(x, at + i), shrink)), scale))


def fits(width: int) -> bool:
    """Whether these loops are for heads of this width."""
    return width % (2 * LANES) == 0


class NormAndTurn(torch.autograd.Function):
    """`NormAndTurn.apply(x_THd, weight_d, eps, cos_T1d, sin_T1d)`: `rotary.rotate` of `RMSNorm`."""

    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, weight_d: Tensor, eps: float, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
        x_THd, heads = x_THd.contiguous(), x_THd.shape[1]
        out_THd, scale_N = torch.empty_like(x_THd), x_THd.new_empty(len(x_THd) * heads)
        x, weight, cos, sin, out, scale = map(_flat, (x_THd, weight_d, cos_T1d, sin_T1d, out_THd, scale_N))
        _forward(x, weight, eps, cos, sin, heads, out, scale)
        ctx.save_for_backward(x_THd, weight_d, cos_T1d, sin_T1d, scale_N)
        return out_THd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_THd, weight_d = ctx.saved_tensors[:2]
        dx_THd, dweight_d = torch.empty_like(x_THd), torch.zeros_like(weight_d)
        x, weight, cos, sin, scale, dout, dx, dweight = map(
            _flat, (*ctx.saved_tensors, grads[0].contiguous(), dx_THd, dweight_d)
        )
        _backward(x, weight, cos, sin, x_THd.shape[1], scale, dout, dx, dweight)
        return dx_THd, dweight_d, None, None, None


def _flat(x: Tensor) -> np.ndarray:
    return own_memory(x).reshape(-1)
