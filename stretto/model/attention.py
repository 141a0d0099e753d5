"""Attention over a packed token axis: projections, head norms, and who may look at whom.

The module computes q, k, v for all tokens at once and hands them to an `Attend`, which alone knows which tokens belong
together: `PackedCausal` for training, the engine's slot cache for decoding. Nothing else in the network mixes tokens.

DeepSeek-V3's attention is in `latent.py`; its values may be narrower or wider (`e`) than its queries and keys (`d`).

Shapes: `T` tokens, `D` width, `H` query heads, `G` key/value heads, `d` head width.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from stretto.model import headnorm, kernels
from stretto.model.linear import Linear
from stretto.model.norm import RMSNorm
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.packed import Causal
from stretto.model.rotary import rotate
from stretto.model.spec import ModelSpec


class Attend(Protocol):
    """Mixes tokens. `layer` counts all layers from 0; scores are scaled by `d ** -0.5`; the result is as wide as v.

    With `exact` a token's result depends on its own query and the keys it sees, and on nothing else.
    """

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, exact: bool = False) -> Tensor: ...


class PackedCausal:
    """Causal attention inside each of several sequences laid end to end: `lengths` sums to T.

    One call of the fused kernel per sequence, on views. On a CPU that beats padding sequences into groups by a third
    or more from 30 to 600 tokens each, and nothing is computed for padding. With `fused` (`Numerics.fused`) one
    compiled loop does all sequences, in half the time of those calls.

    >>> attend = PackedCausal([3, 5])  # tokens 0-2 are one sequence, 3-7 another
    """

    def __init__(self, lengths: list[int], fused: bool = False) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths of packed sequences must be positive, got {lengths}")
        self.lengths = [int(length) for length in lengths]
        self.tokens = sum(self.lengths)
        self._fused = fused

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, exact: bool = False) -> Tensor:
        if len(q_THd) != self.tokens:
            raise ValueError(f"lengths sum to {self.tokens} tokens, but {len(q_THd)} were given")
        if self._fused and not exact and q_THd.dtype == torch.float32 and q_THd.device.type == "cpu":
            return Causal.apply(q_THd, k_TGd, v_TGe, np.array(self.lengths))
        packed = zip(*(x.split(self.lengths) for x in (q_THd, k_TGd, v_TGe)), strict=True)
        mix = exact_causal if exact else _causal
        return torch.cat([mix(q, k, v) for q, k, v in packed])


def _causal(q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THd, k_TGd, v_TGe))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).squeeze(0).transpose(0, 1)


def exact_causal(q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor) -> Tensor:
    """Causal attention of the last `T` of `S` tokens, by the very loop that decodes from a KV cache."""
    if torch.is_grad_enabled():
        return _ExactCausal.apply(q_THd, k_SGd, v_SGe)
    return _exact_causal(q_THd, k_SGd, v_SGe)


class _ExactCausal(torch.autograd.Function):
    """Its gradient is that of the fused kernel, computed from the inputs again: that need only be repeatable."""

    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor) -> Tensor:
        ctx.save_for_backward(q_THd, k_SGd, v_SGe)
        return _exact_causal(q_THd, k_SGd, v_SGe)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v = inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        group = q.shape[1] // k.shape[1]
        with torch.enable_grad():
            wide = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
            heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, *wide))
            mask = causal_lower_right(len(q), len(k))
            out = F.scaled_dot_product_attention(*heads, attn_mask=mask).squeeze(0).transpose(0, 1)
            return torch.autograd.grad(out, inputs, grads[0])


def _exact_causal(q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor) -> Tensor:
    total = len(k_SGd)
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k_SGd, v_SGe))
    return kernels.attend(q_THd, k, v, np.zeros(len(q_THd), np.int64), np.arange(total - len(q_THd), total))


class Attention(nn.Module):
    """Grouped-query attention with Hugging Face parameter names; q and k are normalised per head in Qwen3."""

    def __init__(self, spec: ModelSpec, layer: int, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        self.layer, self.head_dim, self.numerics = layer, spec.head_dim, numerics
        width, bias = spec.hidden_size, spec.attention_bias
        self.q_proj = Linear(width, spec.heads * spec.head_dim, numerics, bias)
        self.k_proj = Linear(width, spec.kv_heads * spec.head_dim, numerics, bias)
        self.v_proj = Linear(width, spec.kv_heads * spec.head_dim, numerics, bias)
        self.o_proj = Linear(spec.heads * spec.head_dim, width, numerics, bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, numerics) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, numerics) if spec.qk_norm else None

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = (len(x_TD), -1, self.head_dim)
        q_THd, k_TGd, v_TGd = (p(x_TD).view(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        q_THd, k_TGd = self._turned(q_THd, self.q_norm, rotary), self._turned(k_TGd, self.k_norm, rotary)
        return self.o_proj(mixed(attend, self.layer, q_THd, k_TGd, v_TGd, self.numerics))

    def _turned(self, x_THd: Tensor, norm: RMSNorm | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        if norm is None:
            return rotate(x_THd, *rotary, self.numerics)
        if self.numerics.tiled(x_THd) and headnorm.fits(self.head_dim):
            return headnorm.NormAndTurn.apply(x_THd, norm.weight, norm.eps, *rotary)
        return rotate(norm(x_THd), *rotary, self.numerics)


def mixed(attend: Attend, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, numerics: Numerics) -> Tensor:
    """What attention gives for each token, [T, H * e], rounded where the network rounds."""
    out_TX = attend(layer, q_THd, k_TGd, v_TGe, numerics.exact).reshape(len(q_THd), -1)
    if numerics.rounding and numerics.compiled(out_TX):
        kernels.round_(out_TX)
    return out_TX
