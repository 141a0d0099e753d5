"""One micro-batch on several ranks: tokens split over the ranks, heads split in attention, experts split in the MoE.

    tokens of rank r ── all-to-all ──▶ all tokens, heads of rank r ── attend ── all-to-all ──▶ tokens of rank r
    pairs of rank r  ── all-to-all ──▶ pairs of the experts of rank r ── SwiGLU ── all-to-all ──▶ pairs of rank r

Attention is DeepSpeed-Ulysses (arXiv 2309.14509): each rank attends over the *whole* axis with some of the heads, so
that any `Attend` works unchanged, trees included, and each head computes what it would compute alone. Experts are
GShard's (arXiv 2006.16668) without capacity: nothing is dropped. Every other layer works on its own tokens.

What travels with a token keeps its name: each pair carries the row it came from and brings it home, where it is
compared. A row that comes back to another place is an error, not a gradient.

The loss of a micro-batch is the sum over ranks, so gradients of replicated parameters are summed (`sum_gradients`);
those of sharded experts are whole as they are. Works with gloo and nccl; untested on GPU.

Shapes: `T` tokens of this rank, `U` of all ranks, `H` heads, `D` width, `E` experts, `K` per token, `N = T * K` pairs,
`M` pairs that this rank's experts compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.model.attention import Attend
from stretto.model.moe import Combine, Dispatch, Experts, MoE, Plan
from stretto.model.transformer import Transformer


class RowsMixedUp(AssertionError):
    """A token's rows did not come back to where they left: routes and tokens no longer belong together."""


def spans(tokens: int, ranks: int) -> list[slice]:
    """Contiguous parts of an axis of `tokens`, one per rank, as equal as can be."""
    edges = [tokens * rank // ranks for rank in range(ranks + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


class SplitHeads:
    """An `Attend` for one rank's tokens: `attend` sees the tokens of all ranks, but only this rank's heads.

    `counts` are the tokens of each rank, in order of rank. Heads and key/value heads must divide by the ranks.
    """

    def __init__(self, attend: Attend, counts: list[int], group: dist.ProcessGroup) -> None:
        self._attend, self._counts, self._group = attend, counts, group
        self._mine = counts[dist.get_rank(group)]

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, exact: bool = False) -> Tensor:
        ranks = len(self._counts)
        for name, heads in (("attention heads", q_THd.shape[1]), ("key/value heads", k_TGd.shape[1])):
            if heads % ranks:
                raise ValueError(f"{heads} {name} can't be split over {ranks} ranks: choose a divisor of {heads}")
        q_Uhd, k_Ugd, v_Uge = (self._by_heads(x) for x in (q_THd, k_TGd, v_TGe))
        mixed_UHe = self._attend(layer, q_Uhd, k_Ugd, v_Uge, exact)
        return self._by_tokens(mixed_UHe)

    def _by_heads(self, x_THd: Tensor) -> Tensor:
        ranks, width = len(self._counts), x_THd.shape[2]
        to_each = x_THd.reshape(self._mine, ranks, -1, width).transpose(0, 1).reshape(ranks * self._mine, -1, width)
        return _Exchange.apply(to_each, self._counts, [self._mine] * ranks, self._group)

    def _by_tokens(self, x_Uhe: Tensor) -> Tensor:
        ranks, (_, heads, width) = len(self._counts), x_Uhe.shape
        from_each = _Exchange.apply(x_Uhe, [self._mine] * ranks, self._counts, self._group)
        return from_each.view(ranks, self._mine, heads, width).transpose(0, 1).reshape(self._mine, -1, width)


class ShardedExperts(nn.Module):
    """This rank's `E / ranks` experts, for the tokens of all ranks. Takes the place of `Experts`."""

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        super().__init__()
        ranks, rank, total = dist.get_world_size(group), dist.get_rank(group), len(experts.gate_up_proj)
        if total % ranks:
            raise ValueError(f"{total} experts can't be split over {ranks} ranks: choose a divisor of {total}")
        self._group, self._ranks, self._per_rank = group, ranks, total // ranks
        own = slice(rank * self._per_rank, (rank + 1) * self._per_rank)
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[own].clone())
        experts.down_proj = nn.Parameter(experts.down_proj.detach()[own].clone())
        self.local = experts

    def forward(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        plan = Plan(experts_TK // self._per_rank, self._ranks)  # sorted by home; each keeps the order of token and slot
        leaving = torch.tensor(plan.sizes, device=x_TD.device)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self._group)
        sends, receives = plan.sizes, arriving.tolist()

        ids_N = (experts_TK % self._per_rank).reshape(-1).index_select(0, plan.order_N)
        rows_M, ids_M, x_MD = (
            _Exchange.apply(x_N, receives, sends, self._group)
            for x_N in (plan.order_N, ids_N, Dispatch.apply(x_TD, plan))
        )
        y_MD = self.local(x_MD, ids_M[:, None], x_MD.new_ones(len(ids_M), 1, dtype=torch.float32))
        y_ND = _Exchange.apply(y_MD, sends, receives, self._group)
        if not torch.equal(_Exchange.apply(rows_M, sends, receives, self._group), plan.order_N):
            raise RowsMixedUp(f"pairs came back out of order to rank {dist.get_rank(self._group)}")
        return Combine.apply(y_ND, gates_TK, plan, self.local.numerics)


def shard_experts(model: Transformer, group: dist.ProcessGroup) -> None:
    """Keep only this rank's share of every layer's experts, in place. Raises ValueError when they don't divide."""
    for block in model.layers:
        if isinstance(block.mlp, MoE):
            block.mlp.add_module("experts", ShardedExperts(block.mlp.experts, group))


def sum_gradients(model: Transformer, group: dist.ProcessGroup) -> None:
    """Add up the gradients of what every rank holds; a sharded expert has seen the tokens of all ranks already."""
    sharded = {id(p) for m in model.modules() if isinstance(m, ShardedExperts) for p in m.parameters()}
    _sum_over_ranks((p for p in model.parameters() if id(p) not in sharded), group)


def _sum_over_ranks(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    for parameter in parameters:
        if parameter.grad is None:  # a rank without tokens for it takes part all the same
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: `sends[r]` of them go to rank r, `receives[r]` come from it; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (receives, sends), group
        out = x_N.new_empty(sum(receives), *x_N.shape[1:])
        dist.all_to_all_single(out, x_N.contiguous(), receives, sends, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        receives, sends = ctx.sizes
        return _Exchange.apply(grads[0], sends, receives, ctx.group), None, None, None
