"""Log-probabilities of given tokens, and the entropy around them, without ever holding all the logits.

Works in chunks of tokens: the forward keeps two numbers a token, the backward computes the logits of a chunk again. So
memory is one chunk of logits whatever the number of tokens. All of it in float32.

Shapes: `N` tokens, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.model.linear import product
from stretto.model.transformer import Transformer
from stretto.support import Support

CHUNK_ELEMENTS = 1 << 19
"""Logits held at once when the caller does not say how many tokens a chunk has."""

NEGLIGIBLE = -200.0
"""A log-probability below which p is 0 in float32, so that p log p may use this instead of -inf."""


def token_logprobs(
    model: Transformer,
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    support: Support | None = None,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """`(logp_N, entropy_N)`, float32, both differentiable in hidden states and head.

    The distribution is `softmax(logits / temperature)`, renormalised over `support` where there is one: the sets that
    the engine drew from, not new ones. `hidden_ND` are rows of `Output.hidden_TD` that predict `targets_N`. `chunk` is
    in tokens; 0 chooses it.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature} has no log-probabilities; it must be positive")
    if support is not None and (len(support), support.vocab) != (len(targets_N), model.spec.vocab_size):
        raise ValueError(
            f"{len(targets_N)} tokens of a vocabulary of {model.spec.vocab_size} can't be normalised over "
            f"{len(support)} supports in one of {support.vocab}"
        )
    chunk = chunk or max(1, CHUNK_ELEMENTS // model.spec.vocab_size)
    return _TokenLogprobs.apply(hidden_ND, model.head_weight, targets_N, temperature, support, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        support: Support | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.settings = (temperature, support, chunk)
        logp_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
        entropy_N = torch.empty_like(logp_N)
        weight = weight_VD.float()
        for start in range(0, len(targets_N), chunk):
            span = slice(start, start + chunk)
            logp_NV, p_NV = _distribution(hidden_ND[span].float(), weight, temperature, support, span)
            logp_N[span] = logp_NV.gather(1, targets_N[span, None]).squeeze(1)
            entropy_N[span] = -_expectation(p_NV, logp_NV)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        temperature, support, chunk = ctx.settings
        dlogp_N, dentropy_N = grads
        with_entropy = bool(dentropy_N.any())
        weight = weight_VD.float()
        dhidden_ND = torch.empty_like(hidden_ND)
        dweight_VD = torch.zeros_like(weight)
        for start in range(0, len(targets_N), chunk):
            span = slice(start, start + chunk)
            hidden, target = hidden_ND[span].float(), targets_N[span, None]
            logp_NV, p_NV = _distribution(hidden, weight, temperature, support, span)
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
        return dhidden_ND, dweight_VD.to(weight_VD.dtype), None, None, None, None


def _distribution(
    hidden_ND: Tensor, weight_VD: Tensor, temperature: float, support: Support | None, span: slice
) -> tuple[Tensor, Tensor]:
    """log p and p, [N, V], of the tokens `span`, whose hidden states these are; -inf and 0 outside the support."""
    z_NV = product(hidden_ND, weight_VD, None, exact=True)  # the last chunk of tokens as every other
    if temperature != 1.0:
        z_NV.div_(temperature)
    if support is not None:
        outside_NV = ~support.mask(span.start, span.start + len(z_NV))
        z_NV.masked_fill_(torch.from_numpy(outside_NV).to(z_NV.device), -torch.inf)
    logp_NV = torch.log_softmax(z_NV, dim=-1)
    return logp_NV, logp_NV.exp()


def _expectation(p_NV: Tensor, logp_NV: Tensor) -> Tensor:
    """sum p log p, with 0 log 0 = 0."""
    finite_NV = logp_NV.clamp(min=NEGLIGIBLE)
    return torch.bmm(p_NV.unsqueeze(1), finite_NV.unsqueeze(2)).view(-1)
