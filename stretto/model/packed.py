"""Causal attention of packed sequences in compiled loops: one call for all of them, forward and backward.

Training packs many short documents, and a fused kernel called once for each spends its time on starting. Here a block
of `BLOCK` queries looks at the keys up to its own last one, with products in registers (`tiles.py`), so that what the
mask hides is hardly computed. The backward pass computes the weights again from the log of their sum (FlashAttention,
arXiv 2205.14135); memory is linear in the tokens. One thread, float32; sums inside are in a fixed order.

Shapes: `T` tokens, `H` query heads, `G` key/value heads, `d` and `e` width of a key and a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.model.kernels import SUMS, compiled, own_memory
from stretto.model.simd import LANES, add, exp, larger, load, mul, store, sub, zero
from stretto.model.tiles import COLUMNS, add_product, multiply

BLOCK = 16
"""Queries computed together: as many as a tile has columns, so that blocks of queries and of keys end together."""
assert BLOCK == COLUMNS == LANES
LOWEST = np.float32(-1e30)
"""A score whose weight is 0 beside any other."""


@compiled()
def _padded(width):
    return (width + COLUMNS - 1) // COLUMNS * COLUMNS


@compiled()
def _room(rows, width):
    return np.empty((rows, width), np.float32)


@compiled()
def _rows(x_TGd, start, count, head, scale, out_Mk):
    """Copy `count` tokens of a head, times scale, and zeros to a whole block behind and below them."""
    width = x_TGd.shape[2]
    for r in range(count):
        for i in range(width):
            out_Mk[r, i] = x_TGd[start + r, head, i] * scale
        for i in range(width, out_Mk.shape[1]):
            out_Mk[r, i] = 0
    for r in range(count, _padded(count)):
        for i in range(out_Mk.shape[1]):
            out_Mk[r, i] = 0


@compiled()
def _back(x_Mk, scale, start, count, head, out_TGd):
    """The way back."""
    for r in range(count):
        for i in range(out_TGd.shape[2]):
            out_TGd[start + r, head, i] = x_Mk[r, i] * scale


@compiled()
def _turned(x_Bk, out_kB):
    for i in range(x_Bk.shape[1]):
        for r in range(BLOCK):
            out_kB[i, r] = x_Bk[r, i]


@compiled()
def _hide(p_MB, first):
    """Queries get the lowest score for keys behind them; only the last block of keys has such."""
    for j in range(BLOCK):
        for r in range(j):
            p_MB[first + j, r] = LOWEST


@compiled()
def _soften(p, seen, top_B, total_B):
    """Scores become exp(score - highest), and are added up, for each query by itself."""
    top, total = load(p, 0), zero()
    for at in range(LANES, seen * LANES, LANES):
        top = larger(load(p, at), top)
    for at in range(0, seen * LANES, LANES):
        weight = exp(sub(load(p, at), top))
        store(p, at, weight)
        total = add(total, weight)
    store(top_B, 0, top)
    store(total_B, 0, total)


@compiled()
def _slopes(p, dp, seen, log_B, mean_B):
    """Scores become weights, exp(score - log); slopes of weights those of scores, weight * (slope - mean)."""
    log, mean = load(log_B, 0), load(mean_B, 0)
    for at in range(0, seen * LANES, LANES):
        weight = exp(sub(load(p, at), log))
        store(p, at, weight)
        store(dp, at, mul(weight, sub(load(dp, at), mean)))


@compiled()
def _forward(q_THd, k_TGd, v_TGe, lengths, out_THe, log_TH):
    heads, keys, values = q_THd.shape[1], _padded(q_THd.shape[2]), _padded(v_TGe.shape[2])
    group, most = heads // k_TGd.shape[1], _padded(lengths.max())
    scale, one = np.float32(1.0 / np.sqrt(q_THd.shape[2])), np.float32(1)
    k_Mk, v_Me, p_MB = _room(most, keys), _room(most, values), _room(most, BLOCK)
    q_Bk, q_kB, out_Be = _room(BLOCK, keys), _room(keys, BLOCK), _room(BLOCK, values)
    k, v, p, q, out = k_Mk.reshape(-1), v_Me.reshape(-1), p_MB.reshape(-1), q_kB.reshape(-1), out_Be.reshape(-1)
    top_B, total_B = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    start = 0
    for length in lengths:
        for g in range(k_TGd.shape[1]):
            _rows(k_TGd, start, length, g, one, k_Mk)
            _rows(v_TGe, start, length, g, one, v_Me)
            for h in range(g * group, (g + 1) * group):
                for first in range(0, length, BLOCK):
                    count, seen = min(BLOCK, length - first), first + BLOCK
                    _rows(q_THd, start + first, count, h, scale, q_Bk)
                    _turned(q_Bk, q_kB)
                    multiply(p, 0, BLOCK, k, 0, keys, 1, q, 0, BLOCK, seen, BLOCK, keys)
                    _hide(p_MB, first)
                    _soften(p, seen, top_B, total_B)
                    multiply(out, 0, values, p, 0, 1, BLOCK, v, 0, values, BLOCK, values, seen)
                    for r in range(count):
                        log_TH[start + first + r, h] = np.log(total_B[r]) + top_B[r]
                        share = one / total_B[r]
                        for i in range(v_TGe.shape[2]):
                            out_THe[start + first + r, h, i] = out_Be[r, i] * share
        start += length


@compiled(fastmath=SUMS)
def _dot(x_Bk, y_Bk, r):
    total = np.float32(0)
    for i in range(x_Bk.shape[1]):
        total += x_Bk[r, i] * y_Bk[r, i]
    return total


@compiled()
def _backward(q_THd, k_TGd, v_TGe, out_THe, log_TH, dout_THe, lengths, dq_THd, dk_TGd, dv_TGe):
    heads, keys, values = q_THd.shape[1], _padded(q_THd.shape[2]), _padded(v_TGe.shape[2])
    group, most = heads // k_TGd.shape[1], _padded(lengths.max())
    scale, one = np.float32(1.0 / np.sqrt(q_THd.shape[2])), np.float32(1)
    k_Mk, v_Me, dk_Mk, dv_Me = _room(most, keys), _room(most, values), _room(most, keys), _room(most, values)
    q_Bk, dq_Bk, q_kB = _room(BLOCK, keys), _room(BLOCK, keys), _room(keys, BLOCK)
    out_Be, dout_Be, dout_eB = _room(BLOCK, values), _room(BLOCK, values), _room(values, BLOCK)
    p_MB, dp_MB = _room(most, BLOCK), _room(most, BLOCK)
    log_B, mean_B = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    k, v, dk, dv, p, dp = (
        k_Mk.reshape(-1),
        v_Me.reshape(-1),
        dk_Mk.reshape(-1),
        dv_Me.reshape(-1),
        p_MB.reshape(-1),
        dp_MB.reshape(-1),
    )
    q, qt, dq, dout, doutt = (
        q_Bk.reshape(-1),
        q_kB.reshape(-1),
        dq_Bk.reshape(-1),
        dout_Be.reshape(-1),
        dout_eB.reshape(-1),
    )
    start = 0
    for length in lengths:
        for g in range(k_TGd.shape[1]):
            _rows(k_TGd, start, length, g, one, k_Mk)
            _rows(v_TGe, start, length, g, one, v_Me)
            dk_Mk[: _padded(length)] = 0
            dv_Me[: _padded(length)] = 0
            for h in range(g * group, (g + 1) * group):
                for first in range(0, length, BLOCK):
                    count, seen = min(BLOCK, length - first), first + BLOCK
                    _rows(q_THd, start + first, count, h, scale, q_Bk)
                    _rows(dout_THe, start + first, count, h, one, dout_Be)
                    _rows(out_THe, start + first, count, h, one, out_Be)
                    _turned(q_Bk, q_kB)
                    _turned(dout_Be, dout_eB)
                    for r in range(BLOCK):
                        log_B[r] = log_TH[start + first + r, h] if r < count else one
                        mean_B[r] = _dot(dout_Be, out_Be, r)
                    multiply(p, 0, BLOCK, k, 0, keys, 1, qt, 0, BLOCK, seen, BLOCK, keys)
                    multiply(dp, 0, BLOCK, v, 0, values, 1, doutt, 0, BLOCK, seen, BLOCK, values)
                    _hide(p_MB, first)
                    _slopes(p, dp, seen, log_B, mean_B)
                    add_product(dv, 0, values, p, 0, BLOCK, 1, dout, 0, values, seen, values, BLOCK)
                    add_product(dk, 0, keys, dp, 0, BLOCK, 1, q, 0, keys, seen, keys, BLOCK)
                    multiply(dq, 0, keys, dp, 0, 1, BLOCK, k, 0, keys, BLOCK, keys, seen)
                    _back(dq_Bk, scale, start + first, count, h, dq_THd)
            _back(dk_Mk, one, start, length, g, dk_TGd)
            _back(dv_Me, one, start, length, g, dv_TGe)
        start += length


class Causal(torch.autograd.Function):
    """`Causal.apply(q_THd, k_TGd, v_TGe, lengths)`: [T, H, e]; `lengths` an int64 array that sums to T."""

    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, lengths: np.ndarray) -> Tensor:
        q_THd, k_TGd, v_TGe = (x.contiguous() for x in (q_THd, k_TGd, v_TGe))
        out_THe = q_THd.new_empty(*q_THd.shape[:2], v_TGe.shape[2])
        log_TH = q_THd.new_empty(q_THd.shape[:2])
        _forward(*map(own_memory, (q_THd, k_TGd, v_TGe)), lengths, own_memory(out_THe), own_memory(log_TH))
        ctx.save_for_backward(q_THd, k_TGd, v_TGe, out_THe, log_TH)
        ctx.lengths = lengths
        return out_THe

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        slopes = [torch.empty_like(x) for x in saved[:3]]
        _backward(*map(own_memory, (*saved, grads[0].contiguous())), ctx.lengths, *map(own_memory, slopes))
        return *slopes, None
