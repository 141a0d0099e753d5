"""Mixture of experts on a packed token axis: sort by expert, one matmul per expert, combine in a fixed order.

Weights of all experts are stacked. (token, slot) pairs are sorted by expert, so that each expert works on one
contiguous slice; the K results of a token are then added in slot order in float32, whatever the order of computation
was. Gradients are written out because the sort is a permutation, whose transpose is a gather too (autograd would
scatter-add). DeepSeek-V3 differs in its router (`SigmoidGate`) and in shared experts, which see every token. Left out:
capacity limits and dropped tokens; every chosen expert computes.

Shapes: `T` tokens, `D` width, `F` expert width, `E` experts, `K` experts per token, `N = T * K` pairs sorted by expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.model.mlp import Mlp
from stretto.model.router import disagreement, grouped_ranks, select, select_sigmoid
from stretto.model.spec import ModelSpec


class Experts(nn.Module):
    """`E` SwiGLU MLPs. Parameters: `gate_up_proj` [E, 2F, D] (gate rows first), `down_proj` [E, D, F]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        experts, inner, width = spec.experts, spec.expert_size, spec.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        plan = _Plan(experts_TK, len(self.gate_up_proj))
        x_ND = _Dispatch.apply(x_TD, plan)
        gate_NF, up_NF = _Grouped.apply(x_ND, self.gate_up_proj, plan.sizes).chunk(2, dim=-1)
        y_ND = _Grouped.apply(F.silu(gate_NF) * up_NF, self.down_proj, plan.sizes)
        return _Combine.apply(y_ND, gates_TK, plan)


class Routed(NamedTuple):
    """How one layer routed its tokens."""

    logits_TE: Tensor  # with gradient; their softmax is the router's probability of each expert
    experts_TK: Tensor  # really used
    differs_T: Tensor | None  # bool: the router itself would have chosen another set; None without replay


class SigmoidGate(nn.Linear):
    """The router of DeepSeek-V3, in float32 whatever the dtype of the network.

    `e_score_correction_bias` [E] helps to select and never weighs: pre-training moves it to balance the experts
    (arXiv 2408.15664), nothing here does. It has no gradient and stays float32, in files and on the wire too, because
    bf16 would change the choice.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__(width, experts, bias=False)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.float(), self.weight.float())


class MoE(nn.Module):
    """Router and experts of one layer. `gate.weight` is [E, D]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.k, self.normalize, self.grouping = spec.experts_per_token, spec.norm_topk_prob, spec.grouping
        if spec.grouping is None:
            self.gate = nn.Linear(spec.hidden_size, spec.experts, bias=False)
        else:
            self.gate = SigmoidGate(spec.hidden_size, spec.experts)
            self.shared_experts = Mlp(spec.hidden_size, spec.shared_experts * spec.expert_size)
        self.experts = Experts(spec)

    def forward(self, x_TD: Tensor, replayed_TK: Tensor | None) -> tuple[Tensor, Routed]:
        logits_TE = self.gate(x_TD)
        if isinstance(self.gate, SigmoidGate):
            return self._grouped(x_TD, logits_TE, self.gate.e_score_correction_bias, replayed_TK)
        experts_TK, gates_TK = select(logits_TE, self.k, replayed_TK, self.normalize)
        differs_T = None if replayed_TK is None else disagreement(logits_TE, replayed_TK)
        return self.experts(x_TD, experts_TK, gates_TK), Routed(logits_TE, experts_TK, differs_T)

    def _grouped(
        self, x_TD: Tensor, logits_TE: Tensor, bias_E: Tensor, replayed_TK: Tensor | None
    ) -> tuple[Tensor, Routed]:
        assert self.grouping is not None
        ranks_TE = grouped_ranks(logits_TE, bias_E, self.grouping)
        experts_TK, gates_TK = select_sigmoid(logits_TE, ranks_TE, self.k, replayed_TK, self.normalize)
        differs_T = None if replayed_TK is None else disagreement(ranks_TE, replayed_TK)
        y_TD = self.experts(x_TD, experts_TK, gates_TK * self.grouping.scale) + self.shared_experts(x_TD)
        # softmax of log-sigmoids is the sigmoid scores over their sum: the probabilities of arXiv 2412.19437, eq. 19
        return y_TD, Routed(F.logsigmoid(logits_TE), experts_TK, differs_T)


class _Plan:
    """The permutation that sorts (token, slot) pairs by expert, its inverse, and how many pairs each expert has."""

    def __init__(self, experts_TK: Tensor, experts: int) -> None:
        flat_N = experts_TK.reshape(-1)
        self.k = experts_TK.shape[1]
        self.order_N = torch.argsort(flat_N, stable=True)
        self.place_N = torch.empty_like(self.order_N)
        self.place_N[self.order_N] = torch.arange(len(flat_N), device=flat_N.device)
        self.token_N = self.order_N // self.k
        self.sizes = torch.bincount(flat_N, minlength=experts).tolist()


class _Dispatch(torch.autograd.Function):
    """x_TD -> x_ND, the token of each sorted pair."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        return x_TD.index_select(0, plan.token_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _slots(grads[0], ctx.plan).sum(dim=1), None


class _Grouped(torch.autograd.Function):
    """y = x @ W[e]^T on the slice of each expert. Shapes: x [N, A], W [E, B, A], y [N, B]; `sizes` sums to N."""

    @staticmethod
    def forward(ctx: Any, x_NA: Tensor, weight_EBA: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x_NA, weight_EBA)
        ctx.sizes = sizes
        y_NB = x_NA.new_empty(len(x_NA), weight_EBA.shape[1])
        for weight_BA, x, y in zip(weight_EBA.unbind(), x_NA.split(sizes), y_NB.split(sizes), strict=True):
            torch.mm(x, weight_BA.t(), out=y)
        return y_NB

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_NA, weight_EBA = ctx.saved_tensors
        dy_NB = grads[0].contiguous()
        dx_NA, dweight_EBA = torch.empty_like(x_NA), torch.empty_like(weight_EBA)
        slices = (t.split(ctx.sizes) for t in (x_NA, dy_NB, dx_NA))
        for weight, dweight, x, dy, dx in zip(weight_EBA.unbind(), dweight_EBA.unbind(), *slices, strict=True):
            torch.mm(dy, weight, out=dx)
            torch.mm(dy.t(), x, out=dweight)
        return dx_NA, dweight_EBA, None


class _Combine(torch.autograd.Function):
    """sum over slots, in slot order, of gate * y; float32 inside."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, gates_TK: Tensor, plan: _Plan) -> Tensor:
        y_TKD = _slots(y_ND, plan)
        ctx.save_for_backward(y_TKD, gates_TK)
        ctx.plan = plan
        return _weighted_sum(y_TKD, gates_TK).to(y_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        y_TKD, gates_TK = ctx.saved_tensors
        dout_TD, plan = grads[0], ctx.plan
        dgates_TK = torch.bmm(y_TKD.float(), dout_TD.float().unsqueeze(2)).squeeze(2)
        gates_N1 = gates_TK.reshape(-1, 1).index_select(0, plan.order_N)
        dy_ND = dout_TD.index_select(0, plan.token_N) * gates_N1.to(dout_TD.dtype)
        return dy_ND, dgates_TK, None


def _slots(y_ND: Tensor, plan: _Plan) -> Tensor:
    """Sorted pairs back in token order: [T, K, D]."""
    return y_ND.index_select(0, plan.place_N).view(-1, plan.k, y_ND.shape[1])


def _weighted_sum(y_TKD: Tensor, gates_TK: Tensor) -> Tensor:
    y_TKD = y_TKD.float()
    out_TD = y_TKD[:, 0] * gates_TK[:, 0, None]
    for slot in range(1, gates_TK.shape[1]):
        out_TD.addcmul_(y_TKD[:, slot], gates_TK[:, slot, None])
    return out_TD
