"""A head for multi-token prediction (`model.mtp`) as compiled loops: guesses for one sequence, all in one call.

A guess costs a few matrix-vector products, less than calling them one by one from Python would. A dense block is a
mixture of one expert. Letters: as in `compiled`; all arrays are flat float32 unless their name says otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stretto.engine.compiled import BLOCK, attend, choose, find, norm, place, swiglu, uniform
from stretto.engine.products import products, times
from stretto.model.kernels import compiled

BLUR = 0.15
"""How far the head's stretch of a token lies from the network's, as a share of what the head leaves to other tokens."""


class HeadWeights(NamedTuple):
    """One head: norms and biases in float32, matrices as the bits of bf16. Biases and head norms are empty where there
    are none."""

    enorm: np.ndarray
    hnorm: np.ndarray
    e_proj: np.ndarray  # the half of eh_proj that takes the embedding
    h_proj: np.ndarray
    norm: np.ndarray
    qkv: np.ndarray
    qkv_bias: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    out: np.ndarray
    out_bias: np.ndarray
    mlp_norm: np.ndarray
    router: np.ndarray  # [E, D]; zeros [1, D] for a dense block
    gate_up: np.ndarray
    down: np.ndarray
    last_norm: np.ndarray


class Sizes(NamedTuple):
    width: int
    vocab: int
    heads: int
    experts: int
    per_token: int
    inner: int  # width of an expert
    normalize: bool
    eps: float


@compiled()
def _experts(w, sizes, h, x):
    """x += what the best experts make of h."""
    width, inner, experts = sizes.width, sizes.inner, sizes.experts
    scores_TE = np.empty((1, experts), np.float32)
    chosen_TLK, gates_TK = np.empty((1, 1, sizes.per_token), np.int32), np.empty((1, sizes.per_token), np.float32)
    joint, middle, y = np.empty(2 * inner, np.float32), np.empty(inner, np.float32), np.empty(width, np.float32)
    scores_E = scores_TE[0]
    times(w.router, 0, experts, width, h, 0, scores_E, 0)
    scores_E[:] = np.exp(scores_E - scores_E.max())
    scores_E /= scores_E.sum()
    choose(scores_TE, sizes.normalize, 0, chosen_TLK, gates_TK)
    for k in range(sizes.per_token):
        expert = chosen_TLK[0, 0, k]
        times(w.gate_up, expert * 2 * inner * width, 2 * inner, width, h, 0, joint, 0)
        swiglu(joint, 1, inner, middle)
        times(w.down, expert * width * inner, width, inner, middle, 0, y, 0)
        for i in range(width):
            x[i] += gates_TK[0, k] * y[i]


@compiled()
def chance(share, margin):
    """How likely the network draws a token that the head drew by the same uniform number: `margin` is how far that lies
    from the ends of the token's stretch, which is `share` long."""
    return 1.0 - np.exp(-margin / (BLUR * (1.0 - share) + 1e-3))


@compiled()
def _pick(z, vocab, temperature, uniform, mass_B, part):
    """What the engine would draw of these logits, untruncated, and the chance that the network draws it, too."""
    if temperature > 0:
        for i in range(vocab):
            z[i] /= temperature
    token, before, own, total, _ = find(z, 0, vocab, temperature == 0, uniform, mass_B, part)
    share = own / total
    if temperature == 0:
        return token, share
    mark = uniform * total - before
    return token, chance(share, min(mark, own - mark) / total)


@compiled()
def remember(w, sizes, embedding, hidden, rows_N, ids_N, slots_N, positions_N, cos, sin, k, v):
    """The head's keys and values of N rows: `hidden` holds in `rows_N` the network's states at `positions_N`, `ids_N`
    are the tokens after them. Gives the rows as they enter attention, and their queries."""
    width, eps, count = sizes.width, sizes.eps, len(ids_N)
    span = len(w.qkv) // width
    all_N, counts_E = np.arange(count), np.full(1, count)
    x, y, h = (
        np.empty(count * width, np.float32),
        np.empty(count * width, np.float32),
        np.empty(count * width, np.float32),
    )
    qkv, q = np.empty(count * span, np.float32), np.empty(count * span, np.float32)
    norm(embedding, ids_N, w.enorm, eps, h)
    products(h, width, w.e_proj, width, counts_E, x)
    norm(hidden, rows_N, w.hnorm, eps, h)
    products(h, width, w.h_proj, width, counts_E, y)
    for i in range(count * width):
        x[i] += y[i]
    norm(x, all_N, w.norm, eps, h)
    products(h, width, w.qkv, span, counts_E, qkv)
    for n in range(count):
        for i in range(len(w.qkv_bias)):
            qkv[n * span + i] += w.qkv_bias[i]
    place(qkv, sizes.heads, w.q_norm, w.k_norm, eps, cos, sin, slots_N, positions_N, q, k, v)
    return x, q


@compiled()
def guess(
    w,
    sizes,
    embedding,
    head,
    hidden,
    ids_N,
    slot,
    position,
    out_K,
    row,
    further,
    temperature,
    seed,
    stop_V,
    cos,
    sin,
    k,
    v,
):
    """Guesses, at most as many as `out_K` has room for, of the tokens that follow `ids_N`, whose last one stands at
    `position` of `slot`: one after the other, drawn as the engine draws. Gives their number. The run ends with a stop
    token, after a guess with which it comes true less likely than `further`, and before one with which that is below
    `row`.

    `hidden` [N, D] are the network's states of the tokens before each of `ids_N`, `head` the bits of its output head in
    bf16. Writes the head's own keys and values of these rows and of those that the guesses add.
    """
    width, eps, vocab, count = sizes.width, sizes.eps, sizes.vocab, len(ids_N)
    rows_N, slots_N = np.arange(count), np.full(count, slot)
    positions_N = rows_N + (position - count)
    one = np.zeros(1, np.int64)
    y, h, state = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    mixed = np.empty(count * len(w.out) // width, np.float32)
    z, part = np.empty(vocab, np.float32), np.empty(BLOCK, np.float32)
    mass_B = np.empty((vocab + BLOCK - 1) // BLOCK, np.float64)
    sure, source = 1.0, hidden
    for step in range(len(out_K)):
        joint, q = remember(w, sizes, embedding, source, rows_N, ids_N, slots_N, positions_N, cos, sin, k, v)
        last = len(rows_N) - 1
        attend(q, sizes.heads, rows_N[last:], slots_N, positions_N, k, v, mixed)
        x = joint[last * width :]
        inner = len(w.out) // width
        times(w.out, 0, width, inner, mixed, last * inner, y, 0)
        for i in range(width):
            x[i] += y[i]
        for i in range(len(w.out_bias)):
            x[i] += w.out_bias[i]
        norm(x, one, w.mlp_norm, eps, h)
        _experts(w, sizes, h, x)
        norm(x, one, w.last_norm, eps, state)
        times(head, 0, vocab, width, state, 0, z, 0)
        drawn = uniform(seed, np.uint64(position + 1 + step))
        token, likely = _pick(z, vocab, temperature, drawn, mass_B, part)
        sure *= likely
        if sure < row:
            return step
        out_K[step] = token
        if stop_V[token] or sure < further:
            return step + 1
        source, rows_N, slots_N = state, one, np.full(1, slot)
        ids_N, positions_N = np.full(1, token), np.full(1, position + step)
    return len(out_K)
