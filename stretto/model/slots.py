"""Compiled passes over the slots of a mixture of experts: choosing, sorting, weighing, adding, each in one go.

What `router.py` and `moe.py` say in several operations of torch, for float32 on one thread. The sort is the very
permutation that a stable sort gives.

Shapes: `T` tokens, `E` experts, `K` experts per token, `N = T * K` pairs sorted by expert, `W` width of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.model.kernels import SUMS, bounded_exp, compiled, own_memory

TINY = np.float32(1e-20)
"""As in `router.select`."""


@compiled()
def _choose(logits_TE, normalize, scores_TE, experts_TK, gates_TK):
    tokens, experts = logits_TE.shape
    slots = experts_TK.shape[1]
    free = np.empty(experts, np.bool_)
    for t in range(tokens):
        top, total = logits_TE[t, 0], np.float32(0)
        for e in range(1, experts):
            top = max(top, logits_TE[t, e])
        for e in range(experts):
            scores_TE[t, e] = bounded_exp(logits_TE[t, e] - top)
            total += scores_TE[t, e]
            free[e] = True
        for e in range(experts):
            scores_TE[t, e] /= total
        chosen = np.float32(0)
        for k in range(slots):
            best = -1
            for e in range(experts):
                if free[e] and (best < 0 or scores_TE[t, e] > scores_TE[t, best]):
                    best = e
            free[best] = False
            experts_TK[t, k], gates_TK[t, k] = best, scores_TE[t, best]
            chosen += scores_TE[t, best]
        if normalize:
            for k in range(slots):
                gates_TK[t, k] /= chosen + TINY


@compiled()
def _choose_backward(scores_TE, experts_TK, gates_TK, dgates_TK, normalize, dlogits_TE):
    tokens, experts = scores_TE.shape
    slots = experts_TK.shape[1]
    for t in range(tokens):
        mean, chosen = np.float32(0), np.float32(0)
        for k in range(slots):
            mean += gates_TK[t, k] * dgates_TK[t, k]
            chosen += scores_TE[t, experts_TK[t, k]]
        for e in range(experts):
            dlogits_TE[t, e] = np.float32(0) if normalize else -scores_TE[t, e] * mean
        for k in range(slots):
            e = experts_TK[t, k]
            if normalize:
                dlogits_TE[t, e] += gates_TK[t, k] * (dgates_TK[t, k] - mean)
            else:
                dlogits_TE[t, e] += gates_TK[t, k] * dgates_TK[t, k]


class TopGates(torch.autograd.Function):
    """`TopGates.apply(logits_TE, k, normalize)`: experts [T, K], best first, ties to the lowest, and their gates."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        scores_TE, gates_TK = torch.empty_like(logits_TE), logits_TE.new_empty(len(logits_TE), k)
        experts_TK = torch.empty(len(logits_TE), k, dtype=torch.int64)
        _choose(own_memory(logits_TE), normalize, *map(own_memory, (scores_TE, experts_TK, gates_TK)))
        ctx.save_for_backward(scores_TE, experts_TK, gates_TK)
        ctx.normalize = normalize
        ctx.mark_non_differentiable(experts_TK)
        return experts_TK, gates_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        scores_TE, experts_TK, gates_TK = ctx.saved_tensors
        dlogits_TE = torch.empty_like(scores_TE)
        given = (scores_TE, experts_TK, gates_TK, grads[1].contiguous())
        _choose_backward(*map(own_memory, given), ctx.normalize, own_memory(dlogits_TE))
        return dlogits_TE, None, None


@compiled()
def _sort(expert_N, order_N, place_N, sizes_E):
    starts = np.zeros(len(sizes_E), np.int64)
    sizes_E[:] = 0
    for n in range(len(expert_N)):
        sizes_E[expert_N[n]] += 1
    for e in range(1, len(sizes_E)):
        starts[e] = starts[e - 1] + sizes_E[e - 1]
    for n in range(len(expert_N)):
        at = starts[expert_N[n]]
        starts[expert_N[n]] = at + 1
        order_N[at], place_N[n] = n, at


def sort(expert_N: Tensor, experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """The stable order of pairs by expert (int64), its inverse, and how many pairs each expert has."""
    order_N, place_N = torch.empty_like(expert_N), torch.empty_like(expert_N)
    sizes_E = np.empty(experts, np.int64)
    _sort(*map(own_memory, (expert_N.contiguous(), order_N, place_N)), sizes_E)
    return order_N, place_N, sizes_E.tolist()


@compiled()
def _add_slots(y_NW, place_TK, out_TW):
    for t in range(len(place_TK)):
        row = place_TK[t, 0]
        for i in range(y_NW.shape[1]):
            out_TW[t, i] = y_NW[row, i]
        for k in range(1, place_TK.shape[1]):
            row = place_TK[t, k]
            for i in range(y_NW.shape[1]):
                out_TW[t, i] += y_NW[row, i]


def add_slots(y_NW: Tensor, place_TK: Tensor) -> Tensor:
    """[T, W]: for each token the sum of its rows, in slot order."""
    out_TW = y_NW.new_empty(len(place_TK), y_NW.shape[1])
    _add_slots(*map(own_memory, (y_NW.contiguous(), place_TK, out_TW)))
    return out_TW


@compiled(fastmath=SUMS)
def _dot(x_NW, n, y_TW, t):
    total = np.float32(0)
    for i in range(x_NW.shape[1]):
        total += x_NW[n, i] * y_TW[t, i]
    return total


@compiled()
def _combine_backward(y_NW, place_TK, gates_TK, dout_TW, dy_NW, dgates_TK):
    for t in range(len(place_TK)):
        for k in range(place_TK.shape[1]):
            row, gate = place_TK[t, k], gates_TK[t, k]
            dgates_TK[t, k] = _dot(y_NW, row, dout_TW, t)
            for i in range(y_NW.shape[1]):
                dy_NW[row, i] = gate * dout_TW[t, i]


def combine_backward(y_NW: Tensor, place_TK: Tensor, gates_TK: Tensor, dout_TW: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes of the rows and of the gates of `kernels.combine`. Every row belongs to a slot."""
    dy_NW, dgates_TK = torch.empty_like(y_NW), torch.empty_like(gates_TK)
    given = (y_NW, place_TK, gates_TK, dout_TW.contiguous(), dy_NW, dgates_TK)
    _combine_backward(*map(own_memory, given))
    return dy_NW, dgates_TK
