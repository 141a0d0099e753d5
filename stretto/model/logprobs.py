"""Log-probabilities of given tokens, and the entropy around them, without ever holding all the logits.

Works in chunks of tokens: the forward keeps two numbers a token, the backward computes the logits of a chunk again. So
memory is one chunk of logits whatever the number of tokens. All of it in float32.

Shapes: `N` tokens, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.model.transformer import Transformer

CHUNK_ELEMENTS = 1 << 19
"""Logits held at once when the caller does not say how many tokens a chunk has."""

NEGLIGIBLE = -200.0
"""A log-probability below which p is 0 in float32, so that p log p may use this instead of -inf."""


def token_logprobs(
    model: Transformer,
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """`(logp_N, entropy_N)`, float32, both differentiable in hidden states and head.

    The distribution is `softmax(logits / temperature)`, cut to `kept(...)` and renormalised when `top_p < 1` or
    `top_k > 0`. A target outside the kept set counts as kept: the engine did sample it, and rounding or newer weights
    may have moved the border. `hidden_ND` are rows of `Output.hidden_TD` that predict `targets_N`. `chunk` is in
    tokens; 0 chooses it.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature} has no log-probabilities; it must be positive")
    chunk = chunk or max(1, CHUNK_ELEMENTS // model.spec.vocab_size)
    return _TokenLogprobs.apply(hidden_ND, model.head_weight, targets_N, temperature, top_p, top_k, chunk)


def kept(scaled_NV: Tensor, top_p: float, top_k: int = 0) -> Tensor:
    """bool [N, V]: tokens that may be sampled, given logits already divided by the temperature.

    First the `top_k` most likely (0: all). Of these, renormalised, the shortest prefix in order of probability whose
    mass reaches `top_p`: a token stays when the mass *before* it is below `top_p`. Ties go to the lowest id.
    """
    sorted_NV, order_NV = torch.sort(scaled_NV, dim=-1, descending=True, stable=True)
    if top_k > 0:
        sorted_NV[:, top_k:] = -torch.inf
    keep_NV = sorted_NV > -torch.inf
    if top_p < 1.0:
        p_NV = torch.softmax(sorted_NV, dim=-1)
        keep_NV &= p_NV.cumsum(dim=-1) - p_NV < top_p
        keep_NV[:, 0] = True
    return torch.zeros_like(keep_NV).scatter_(1, order_NV, keep_NV)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        top_p: float,
        top_k: int,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.settings = (temperature, top_p, top_k, chunk)
        logp_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
        entropy_N = torch.empty_like(logp_N)
        weight = weight_VD.float()
        for start in range(0, len(targets_N), chunk):
            span = slice(start, start + chunk)
            logp_NV, p_NV = _distribution(hidden_ND[span].float(), weight, targets_N[span], *ctx.settings[:3])
            logp_N[span] = logp_NV.gather(1, targets_N[span, None]).squeeze(1)
            entropy_N[span] = -_expectation(p_NV, logp_NV)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        temperature, top_p, top_k, chunk = ctx.settings
        dlogp_N, dentropy_N = grads
        with_entropy = bool(dentropy_N.any())
        weight = weight_VD.float()
        dhidden_ND = torch.empty_like(hidden_ND)
        dweight_VD = torch.zeros_like(weight)
        for start in range(0, len(targets_N), chunk):
            span = slice(start, start + chunk)
            hidden, target = hidden_ND[span].float(), targets_N[span, None]
            logp_NV, p_NV = _distribution(hidden, weight, targets_N[span], temperature, top_p, top_k)
            dlogp = dlogp_N[span, None]
            if with_entropy:  # dH/dz = -p (log p + H)
                entropy = -_expectation(p_NV, logp_NV).unsqueeze(1)
                slope_NV = logp_NV.clamp_(min=NEGLIGIBLE).add_(entropy).mul_(dentropy_N[span, None])
                dz_NV = p_NV.mul_(slope_NV.add_(dlogp)).neg_()
            else:
                dz_NV = p_NV.mul_(-dlogp)
            dz_NV.scatter_add_(1, target, dlogp)
            dz_NV.div_(temperature)
            dhidden_ND[span] = torch.mm(dz_NV, weight)
            dweight_VD.addmm_(dz_NV.t(), hidden)
        return dhidden_ND, dweight_VD.to(weight_VD.dtype), None, None, None, None, None


def _distribution(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """log p and p, [N, V]; -inf and 0 outside the kept set."""
    z_NV = torch.mm(hidden_ND, weight_VD.t())
    if temperature != 1.0:
        z_NV.div_(temperature)
    if top_p < 1.0 or top_k > 0:
        keep_NV = kept(z_NV, top_p, top_k).scatter_(1, targets_N[:, None], True)
        z_NV.masked_fill_(~keep_NV, -torch.inf)
    logp_NV = torch.log_softmax(z_NV, dim=-1)
    return logp_NV, logp_NV.exp()


def _expectation(p_NV: Tensor, logp_NV: Tensor) -> Tensor:
    """sum p log p, with 0 log 0 = 0."""
    finite_NV = logp_NV.clamp(min=NEGLIGIBLE)
    return torch.bmm(p_NV.unsqueeze(1), finite_NV.unsqueeze(2)).view(-1)
