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

from stretto.model import grouped, kernels, slots
from stretto.model.linear import ROWS, product
from stretto.model.mlp import Mlp, SwiGLU
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.residual import add
from stretto.model.router import Selection, grouped_ranks, select
from stretto.model.spec import ModelSpec


class Experts(nn.Module):
    """`E` SwiGLU MLPs. Parameters: `gate_up_proj` [E, 2F, D] (gate rows first), `down_proj` [E, D, F]."""

    def __init__(self, spec: ModelSpec, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        self.numerics = numerics
        experts, inner, width = spec.experts, spec.expert_size, spec.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        numerics = self.numerics
        plan = Plan(experts_TK, len(self.gate_up_proj), ROWS if numerics.exact else 1)
        x_ND = Dispatch.apply(x_TD, plan, numerics)
        joint_N2F = _Grouped.apply(x_ND, self.gate_up_proj, plan.sizes, numerics)
        if numerics.compiled(joint_N2F):
            inner_NF = SwiGLU.apply(joint_N2F, numerics.rounding)
        else:
            gate_NF, up_NF = joint_N2F.chunk(2, dim=-1)
            inner_NF = F.silu(gate_NF) * up_NF
        y_ND = _Grouped.apply(inner_NF, self.down_proj, plan.sizes, numerics)
        return Combine.apply(y_ND, gates_TK, plan, numerics)


class Routed(NamedTuple):
    """How one layer routed its tokens."""

    logits_TE: Tensor  # with gradient; their softmax is the router's probability of each expert
    choice: Selection


class SoftmaxGate(nn.Linear):
    """The router of Qwen3: one logit per expert, in the dtype of the network; never rounded."""

    def __init__(self, width: int, experts: int, numerics: Numerics = PLAIN) -> None:
        super().__init__(width, experts, bias=False)
        self.numerics = numerics

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, None, self.numerics.exact)


class SigmoidGate(SoftmaxGate):
    """The router of DeepSeek-V3, in float32 whatever the dtype of the network.

    `e_score_correction_bias` [E] helps to select and never weighs: pre-training moves it to balance the experts
    (arXiv 2408.15664), nothing here does. It has no gradient and stays float32, in files and on the wire too, because
    bf16 would change the choice.
    """

    def __init__(self, width: int, experts: int, numerics: Numerics = PLAIN) -> None:
        super().__init__(width, experts, numerics)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, input: Tensor) -> Tensor:
        return product(input.float(), self.weight.float(), None, self.numerics.exact)


class MoE(nn.Module):
    """Router and experts of one layer. `gate.weight` is [E, D]."""

    def __init__(self, spec: ModelSpec, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        self.numerics = numerics
        self.k, self.normalize, self.grouping = spec.experts_per_token, spec.norm_topk_prob, spec.grouping
        if spec.grouping is None:
            self.gate = SoftmaxGate(spec.hidden_size, spec.experts, numerics)
        else:
            self.gate = SigmoidGate(spec.hidden_size, spec.experts, numerics)
            self.shared_experts = Mlp(spec.hidden_size, spec.shared_experts * spec.expert_size, numerics)
        self.experts = Experts(spec, numerics)

    def forward(
        self, x_TD: Tensor, replayed_TK: Tensor | None, ratio: float = 0.0, used: list[Tensor] | None = None
    ) -> tuple[Tensor, Routed]:
        """`used` is for activation recomputation: the first call puts the experts it used there, the next, which starts
        from the same input, takes them as they are."""
        if used:
            replayed_TK, ratio = used[0], 0.0
        y_TD, routed = self._route(x_TD, replayed_TK, ratio)
        if used is not None and not used:
            used.append(routed.choice.experts_TK)
        return y_TD, routed

    def _route(self, x_TD: Tensor, replayed_TK: Tensor | None, ratio: float) -> tuple[Tensor, Routed]:
        logits_TE = self.gate(x_TD)
        if self.numerics.tiled(logits_TE) and replayed_TK is None and self.grouping is None:
            experts_TK, gates_TK = slots.TopGates.apply(logits_TE, self.k, self.normalize)
            choice = Selection(experts_TK, gates_TK, None, None)
            return self.experts(x_TD, experts_TK, gates_TK), Routed(logits_TE, choice)
        if isinstance(self.gate, SigmoidGate):
            return self._grouped(x_TD, logits_TE, self.gate.e_score_correction_bias, replayed_TK, ratio)
        scores_TE = torch.softmax(logits_TE.float(), dim=-1)
        choice = select(scores_TE, self.k, replayed_TK, ratio, self.normalize)
        return self.experts(x_TD, choice.experts_TK, choice.gates_TK), Routed(logits_TE, choice)

    def _grouped(
        self, x_TD: Tensor, logits_TE: Tensor, bias_E: Tensor, replayed_TK: Tensor | None, ratio: float
    ) -> tuple[Tensor, Routed]:
        assert self.grouping is not None
        compiled = self.numerics.compiled(logits_TE)
        scores_TE = _Sigmoid.apply(logits_TE) if compiled else logits_TE.sigmoid()
        ranks = grouped_ranks(scores_TE, bias_E, self.grouping, ratio)
        choice = select(scores_TE, self.k, replayed_TK, ratio, self.normalize, ranks)
        y_TD = self.experts(x_TD, choice.experts_TK, choice.gates_TK * self.grouping.scale)
        # softmax of log-sigmoids is the sigmoid scores over their sum: the probabilities of arXiv 2412.19437, eq. 19
        return add(y_TD, self.shared_experts(x_TD), self.numerics), Routed(F.logsigmoid(logits_TE), choice)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = kernels.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grads[0] * y * (1 - y)


class Plan:
    """The permutation that sorts (token, slot) pairs by expert, its inverse, and how many pairs each expert has.

    The pairs of each expert are filled up to a multiple of `multiple` with pairs that no token looks at: token 0, with
    gate 0. `order_N` has the number of real pairs there.
    """

    def __init__(self, experts_TK: Tensor, experts: int, multiple: int = 1) -> None:
        flat_N = experts_TK.reshape(-1)
        pairs, self.k = len(flat_N), experts_TK.shape[1]
        self.filled = multiple > 1
        if flat_N.device.type == "cpu" and not self.filled:
            self.order_N, self.place_N, self.sizes = slots.sort(flat_N, experts)
            self.token_N = self.order_N // self.k
            return
        order_N = torch.argsort(flat_N, stable=True)
        place_N = torch.arange(pairs, device=flat_N.device)
        sizes_E = torch.bincount(flat_N, minlength=experts)
        if self.filled:
            missing_E = -sizes_E % multiple
            place_N = place_N + (missing_E.cumsum(0) - missing_E).index_select(0, flat_N.index_select(0, order_N))
            sizes_E = sizes_E + missing_E
        self.sizes = sizes_E.tolist()
        self.order_N = order_N
        if self.filled:
            self.order_N = order_N.new_full((sum(self.sizes),), pairs)
            self.order_N[place_N] = order_N
        self.place_N = torch.empty_like(order_N)
        self.place_N[order_N] = place_N
        self.token_N = self.order_N // self.k
        if self.filled:
            self.token_N[self.order_N == pairs] = 0

    def sorted_gates(self, gates_TK: Tensor) -> Tensor:
        """[N, 1]."""
        gates_N = gates_TK.reshape(-1)
        if self.filled:
            gates_N = F.pad(gates_N, (0, 1))
        return gates_N.index_select(0, self.order_N).unsqueeze(1)


class Dispatch(torch.autograd.Function):
    """x_TD -> x_ND, the token of each sorted pair."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: Plan, numerics: Numerics = PLAIN) -> Tensor:
        ctx.plan, ctx.fused = plan, numerics.tiled(x_TD)
        return x_TD.index_select(0, plan.token_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.fused:
            return slots.add_slots(grads[0], ctx.plan.place_N.view(-1, ctx.plan.k)), None, None
        return _slots(grads[0], ctx.plan).sum(dim=1), None, None


class _Grouped(torch.autograd.Function):
    """y = x @ W[e]^T on the slice of each expert. Shapes: x [N, A], W [E, B, A], y [N, B]; `sizes` sums to N."""

    @staticmethod
    def forward(ctx: Any, x_NA: Tensor, weight_EBA: Tensor, sizes: list[int], numerics: Numerics) -> Tensor:
        ctx.save_for_backward(x_NA, weight_EBA)
        ctx.sizes = sizes
        ctx.fused = numerics.tiled(x_NA) and grouped.fits(*weight_EBA.shape[1:])
        if ctx.fused:
            return grouped.products(x_NA, weight_EBA, sizes)
        y_NB = x_NA.new_empty(len(x_NA), weight_EBA.shape[1])
        for weight_BA, x, y in zip(weight_EBA.unbind(), x_NA.split(sizes), y_NB.split(sizes), strict=True):
            torch.mm(x, weight_BA.t(), out=y)
        if numerics.rounding and numerics.compiled(y_NB):
            kernels.round_(y_NB)
        return y_NB

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_NA, weight_EBA = ctx.saved_tensors
        if ctx.fused:
            return *grouped.slopes(x_NA, weight_EBA, ctx.sizes, grads[0]), None, None
        dy_NB = grads[0].contiguous()
        dx_NA, dweight_EBA = torch.empty_like(x_NA), torch.empty_like(weight_EBA)
        slices = (t.split(ctx.sizes) for t in (x_NA, dy_NB, dx_NA))
        for weight, dweight, x, dy, dx in zip(weight_EBA.unbind(), dweight_EBA.unbind(), *slices, strict=True):
            torch.mm(dy, weight, out=dx)
            torch.mm(dy.t(), x, out=dweight)
        return dx_NA, dweight_EBA, None, None


class Combine(torch.autograd.Function):
    """sum over slots, in slot order, of gate * y; float32 inside, rounded once."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, gates_TK: Tensor, plan: Plan, numerics: Numerics) -> Tensor:
        if numerics.compiled(y_ND):
            ctx.save_for_backward(y_ND, gates_TK)
            ctx.plan, ctx.fused = plan, numerics.tiled(y_ND)
            return kernels.combine(y_ND, plan.place_N.view(-1, plan.k), gates_TK, numerics.rounding)
        y_TKD = _slots(y_ND, plan)
        ctx.save_for_backward(y_TKD, gates_TK)
        ctx.plan, ctx.fused = plan, False
        return _weighted_sum(y_TKD, gates_TK).to(y_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, gates_TK = ctx.saved_tensors
        dout_TD, plan = grads[0], ctx.plan
        if ctx.fused:
            return *slots.combine_backward(y, plan.place_N.view(-1, plan.k), gates_TK, dout_TD), None, None
        y_TKD = y if y.dim() == 3 else _slots(y, plan)
        dgates_TK = torch.bmm(y_TKD.float(), dout_TD.float().unsqueeze(2)).squeeze(2)
        dy_ND = dout_TD.index_select(0, plan.token_N) * plan.sorted_gates(gates_TK).to(dout_TD.dtype)
        return dy_ND, dgates_TK, None, None


def _slots(y_ND: Tensor, plan: Plan) -> Tensor:
    """Sorted pairs back in token order: [T, K, D]."""
    return y_ND.index_select(0, plan.place_N).view(-1, plan.k, y_ND.shape[1])


def _weighted_sum(y_TKD: Tensor, gates_TK: Tensor) -> Tensor:
    y_TKD = y_TKD.float()
    out_TD = y_TKD[:, 0] * gates_TK[:, 0, None]
    for slot in range(1, gates_TK.shape[1]):
        out_TD.addcmul_(y_TKD[:, slot], gates_TK[:, slot, None])
    return out_TD
