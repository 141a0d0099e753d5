"""Attention over a packed token axis: projections, head norms, rotary positions, and who may look at whom.

The module computes q, k, v for all tokens at once and hands them to an `Attend`, which alone knows which tokens belong
together: `PackedCausal` for training, the engine's slot cache for decoding. Nothing else in the network mixes tokens.

Shapes: `T` tokens, `D` width, `H` query heads, `G` key/value heads, `d` head width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.model.norm import RMSNorm
from stretto.model.spec import ModelSpec


class Attend(Protocol):
    """Mixes tokens. `layer` counts all layers from 0; scores are scaled by `d ** -0.5`."""

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor: ...


class PackedCausal:
    """Causal attention inside each of several sequences laid end to end: `lengths` sums to T.

    One call of the fused kernel per sequence, on views. On a CPU that beats padding sequences into groups by a third
    or more from 30 to 600 tokens each, and nothing is computed for padding.

    >>> attend = PackedCausal([3, 5])  # tokens 0-2 are one sequence, 3-7 another
    """

    def __init__(self, lengths: list[int]) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths of packed sequences must be positive, got {lengths}")
        self.lengths = [int(length) for length in lengths]
        self.tokens = sum(self.lengths)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        if len(q_THd) != self.tokens:
            raise ValueError(f"lengths sum to {self.tokens} tokens, but {len(q_THd)} were given")
        packed = zip(*(x.split(self.lengths) for x in (q_THd, k_TGd, v_TGd)), strict=True)
        return torch.cat([_causal(q, k, v) for q, k, v in packed])


def _causal(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THd, k_TGd, v_TGd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).squeeze(0).transpose(0, 1)


class Attention(nn.Module):
    """Grouped-query attention with Hugging Face parameter names; q and k are normalised per head in Qwen3."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, spec.head_dim
        width, bias = spec.hidden_size, spec.attention_bias
        self.q_proj = nn.Linear(width, spec.heads * spec.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=bias)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = (len(x_TD), -1, self.head_dim)
        q_THd, k_TGd, v_TGd = (p(x_TD).view(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = self.q_norm(q_THd), self.k_norm(k_TGd)
        q_THd, k_TGd = rotate(q_THd, *rotary), rotate(k_TGd, *rotary)
        return self.o_proj(attend(self.layer, q_THd, k_TGd, v_TGd).reshape(len(x_TD), -1))


def rotary_angles(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin [T, 1, d] of RoPE (arXiv 2104.09864), computed in float32 once per forward pass.

    The first half of the signed sin is negative, so that a rotation is `x * cos + roll(x, d/2) * sin`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    angles = (positions_T.float().unsqueeze(1) * (1.0 / theta**exponents)).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


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
