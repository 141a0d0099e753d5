"""Rotary positions: the angles of a pass, looked up, and the rotation of queries and keys by them.

YaRN (arXiv 2309.00071) reaches beyond the length a network was made for: slow frequencies are divided by `factor`, fast
ones stay, with a ramp between. The other kinds of scaling are refused by `spec.py`.

Shapes: `T` tokens, `H` heads, `d` the width that rotates, even.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stretto.model import kernels
from stretto.model.deepseek import Yarn
from stretto.model.numerics import PLAIN, Numerics

BLOCK = 1024
"""Positions whose angles are computed together. A position's angles thus never depend on the others of a pass."""


def rotary_angles(
    positions_T: Tensor, width: int, theta: float, dtype: torch.dtype, yarn: Yarn | None = None
) -> tuple[Tensor, Tensor]:
    """cos and signed sin [T, 1, d] of RoPE (arXiv 2104.09864), computed in float32 and looked up by position.

    The first half of the signed sin is negative, so that a rotation is `x * cos + roll(x, d/2) * sin`.
    """
    blocks = int(positions_T.max()) // BLOCK + 1 if len(positions_T) else 1
    cos_Md, sin_Md = _table(1 << (blocks - 1).bit_length(), width, theta, dtype, yarn)
    at = positions_T.to(cos_Md.device)
    cos, sin = (table_Md[at].unsqueeze(1).to(positions_T.device) for table_Md in (cos_Md, sin_Md))
    return cos, sin


@lru_cache(maxsize=16)
def _table(blocks: int, width: int, theta: float, dtype: torch.dtype, yarn: Yarn | None) -> tuple[Tensor, Tensor]:
    """cos and signed sin of the first `blocks` blocks of positions."""
    with torch.inference_mode(False), torch.no_grad():  # the engine's tables serve a trainer in the same process too
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        frequencies = 1.0 / theta**exponents
        if yarn is not None:
            frequencies = stretch(frequencies, yarn, width, theta)
        cos, sin = [], []
        for block in range(blocks):
            positions_M = torch.arange(block * BLOCK, (block + 1) * BLOCK, dtype=torch.float32)
            angles = positions_M.unsqueeze(1) * frequencies
            cos.append(angles.cos())
            sin.append(angles.sin())
        cos_Mh, sin_Mh = torch.cat(cos), torch.cat(sin)
        if yarn is not None:
            cos_Mh, sin_Mh = cos_Mh * yarn.amplitude, sin_Mh * yarn.amplitude
        return torch.cat((cos_Mh, cos_Mh), dim=-1).to(dtype), torch.cat((-sin_Mh, sin_Mh), dim=-1).to(dtype)


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


def rotate(x_THd: Tensor, cos: Tensor, sin: Tensor, numerics: Numerics = PLAIN) -> Tensor:
    """Rotate the pairs (x[i], x[i + d/2]) by the angles of each token."""
    if torch.is_grad_enabled():
        return _Rotate.apply(x_THd, cos, sin, numerics)
    return _rotate(x_THd, cos, sin, numerics)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation the other way."""

    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, cos: Tensor, sin: Tensor, numerics: Numerics) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.unrounded = Numerics(exact=numerics.exact or numerics.rounding, fused=numerics.fused)
        return _rotate(x_THd, cos, sin, numerics)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin, ctx.unrounded), None, None, None


def _rotate(x_THd: Tensor, cos: Tensor, sin: Tensor, numerics: Numerics) -> Tensor:
    if numerics.compiled(x_THd):
        return kernels.rotate(x_THd, cos, sin, numerics.rounding)
    return (x_THd * cos).add_(x_THd.roll(x_THd.shape[-1] // 2, dims=-1).mul_(sin))  # no fma: as transformers rounds
