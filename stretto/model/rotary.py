"""Rotary positions: the angles of a pass, computed once, and the rotation of queries and keys by them.

YaRN (arXiv 2309.00071) reaches beyond the length a network was made for: slow frequencies are divided by `factor`, fast
ones stay, with a ramp between. The other kinds of scaling are refused by `spec.py`.

Shapes: `T` tokens, `H` heads, `d` the width that rotates, even.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stretto.model.deepseek import Yarn


def rotary_angles(
    positions_T: Tensor, width: int, theta: float, dtype: torch.dtype, yarn: Yarn | None = None
) -> tuple[Tensor, Tensor]:
    """cos and signed sin [T, 1, d] of RoPE (arXiv 2104.09864), computed in float32 once per forward pass.

    The first half of the signed sin is negative, so that a rotation is `x * cos + roll(x, d/2) * sin`.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions_T.device) / width
    frequencies = 1.0 / theta**exponents
    if yarn is not None:
        frequencies = stretch(frequencies, yarn, width, theta)
    angles = (positions_T.float().unsqueeze(1) * frequencies).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    if yarn is not None:
        cos, sin = cos * yarn.amplitude, sin * yarn.amplitude
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def stretch(frequencies: Tensor, yarn: Yarn, width: int, theta: float) -> Tensor:
    """YaRN's frequencies [d/2]: those that turn more than `beta_fast` times in the original length stay as they are,
    those that turn less than `beta_slow` times are divided by `factor`, and a linear ramp lies between."""

    def dimension(turns: float) -> float:
        return width * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32, device=frequencies.device) - low) / (high - low or 0.001)
    slow = ramp.clamp(0, 1)
    return frequencies / yarn.factor * slow + frequencies * (1 - slow)


def rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + d/2]) by the angles of each token."""
    return _Rotate.apply(x_THd, cos, sin) if torch.is_grad_enabled() else _rotate(x_THd, cos, sin)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation the other way."""

    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x_THd, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x_THd * cos).addcmul_(x_THd.roll(x_THd.shape[-1] // 2, dims=-1), sin)
