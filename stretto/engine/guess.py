"""A head for multi-token prediction (`model.mtp`) as compiled loops: guesses for one sequence, all in one call.

A guess costs a few matrix-vector products, less than calling them one by one from Python would. A dense block is a
mixture of one expert. Letters: as in `compiled`; all arrays are flat float32 unless their name says otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stretto.engine.compiled import attend, choose, draw, norm, place, swiglu
from stretto.engine.products import products, times
from stretto.model.kernels import compiled

SURE = 0.3
"""Likelihood of a run of guesses below which a further one is not worth its row."""


class HeadWeights(NamedTuple):
    """One head. Biases and head norms are empty where there are none."""

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
def guess(
    w, sizes, embedding, head, hidden, row, token, slot, position, temperature, uniform_K, stop_V, cos, sin, k, v, out_K
):
    """Guesses of the tokens after `token`, one after the other, drawn as the engine draws but untruncated. Gives their
    number: nothing follows a stop token, nor a run of guesses that is as a whole less likely than `SURE`.

    `hidden` [rows, D] holds in `row` the network's state at `position`, that of the token before `token`. Writes the
    head's own keys and values from `position` on.
    """
    width, eps, vocab = sizes.width, sizes.eps, sizes.vocab
    one, slots, places = np.zeros(1, np.int64), np.full(1, slot), np.full(1, position)
    tokens, at = np.full(1, token), np.full(1, row)
    x, y, h = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    state = np.empty(width, np.float32)
    span = len(w.qkv) // width
    qkv, q = np.empty(span, np.float32), np.empty(span, np.float32)
    mixed = np.empty(len(w.out) // width, np.float32)
    z_NV, greedy_N = np.empty((1, vocab), np.float32), np.full(1, temperature == 0)
    ids_N, logprobs_N = np.empty(1, np.int32), np.empty(1, np.float32)
    z = z_NV[0]
    source, sure = hidden, np.float32(1)
    for step in range(len(uniform_K)):
        places[0] = position + step
        norm(embedding, tokens, w.enorm, eps, h)
        times(w.e_proj, 0, width, width, h, 0, x, 0)
        norm(source, at, w.hnorm, eps, h)
        times(w.h_proj, 0, width, width, h, 0, y, 0)
        for i in range(width):
            x[i] += y[i]
        norm(x, one, w.norm, eps, h)
        times(w.qkv, 0, span, width, h, 0, qkv, 0)
        for i in range(len(w.qkv_bias)):
            qkv[i] += w.qkv_bias[i]
        place(qkv, sizes.heads, w.q_norm, w.k_norm, eps, cos, sin, slots, places, q, k, v)
        attend(q, sizes.heads, one, slots, places, k, v, mixed)
        times(w.out, 0, width, len(mixed), mixed, 0, y, 0)
        for i in range(width):
            x[i] += y[i]
        for i in range(len(w.out_bias)):
            x[i] += w.out_bias[i]
        norm(x, one, w.mlp_norm, eps, h)
        _experts(w, sizes, h, x)
        norm(x, one, w.last_norm, eps, state)
        source, at = state, one
        times(head, 0, vocab, width, state, 0, z, 0)
        if temperature > 0:
            for i in range(vocab):
                z[i] /= temperature
        draw(z_NV, greedy_N, uniform_K[step : step + 1], ids_N, logprobs_N)
        out_K[step] = tokens[0] = ids_N[0]
        sure *= np.exp(logprobs_N[0])
        if stop_V[ids_N[0]] or sure < SURE:
            return step + 1
    return len(uniform_K)


@compiled()
def remember(w, sizes, embedding, hidden, ids_N, slots_N, positions_N, cos, sin, k, v):
    """The head's keys and values of N rows: `hidden` [N, D] are the network's states at `positions_N`, `ids_N` the
    tokens after them."""
    width, eps, count = sizes.width, sizes.eps, len(ids_N)
    span = len(w.qkv) // width
    rows_N, counts_E = np.arange(count), np.full(1, count)
    e, h, x, y = (
        np.empty(count * width, np.float32),
        np.empty(count * width, np.float32),
        np.empty(count * width, np.float32),
        np.empty(count * width, np.float32),
    )
    qkv, q = np.empty(count * span, np.float32), np.empty(count * span, np.float32)
    norm(embedding, ids_N, w.enorm, eps, e)
    norm(hidden, rows_N, w.hnorm, eps, h)
    products(e, width, w.e_proj, width, counts_E, x)
    products(h, width, w.h_proj, width, counts_E, y)
    for i in range(count * width):
        x[i] += y[i]
    norm(x, rows_N, w.norm, eps, h)
    products(h, width, w.qkv, span, counts_E, qkv)
    for n in range(count):
        for i in range(len(w.qkv_bias)):
            qkv[n * span + i] += w.qkv_bias[i]
    place(qkv, sizes.heads, w.q_norm, w.k_norm, eps, cos, sin, slots_N, positions_N, q, k, v)
