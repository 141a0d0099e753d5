"""The steps of a pass that are no matrix products, as compiled loops over explicit vectors.

Arrays are float32 and flat: row `n` of width `w` begins at `n * w`, and widths are multiples of `LANES`. Each row is
computed by itself, in an order that does not depend on the others. `tests/engine/test_forward.py` holds them against
the network's own definition.

Letters: `T` rows of the pass, `N` some of them, `D` width, `E` experts, `K` experts per token, `H` query heads, `G`
key/value heads, `d` head width, `S` slots, `M` rows of a slot, `V` vocabulary.
"""

from __future__ import annotations

import numpy as np

from stretto.model.kernels import compiled
from stretto.model.router import TINY
from stretto.model.simd import (
    LANES,
    add,
    add_lanes,
    div,
    exp,
    fill,
    first,
    fma,
    larger,
    load,
    max_lanes,
    mul,
    store,
    sub,
    sums,
    zero,
)

BLOCK = 64
"""Tokens whose probabilities are summed up together before they are counted in float64; a multiple of `LANES`."""


@compiled()
def norm(x, rows_N, weight_D, eps, out):
    """Root-mean-square norms of the rows `rows_N` of x, one after the other."""
    width = len(weight_D)
    for n in range(len(rows_N)):
        at, to = rows_N[n] * width, n * width
        squares = zero()
        for i in range(0, width, LANES):
            lanes = load(x, at + i)
            squares = fma(lanes, lanes, squares)
        scale = fill(np.float32(1.0) / np.sqrt(add_lanes(squares) / np.float32(width) + np.float32(eps)))
        for i in range(0, width, LANES):
            store(out, to + i, mul(mul(load(x, at + i), scale), load(weight_D, i)))


@compiled()
def _turn(x, at, weight_d, eps, cos, sin, angle, width, out, to):
    """Norm (where there are weights) and rotation of one head; its angles begin at `angle`."""
    half = width // 2
    scale = np.float32(1.0)
    if len(weight_d):
        squares = zero()
        for i in range(0, width, LANES):
            lanes = load(x, at + i)
            squares = fma(lanes, lanes, squares)
        scale /= np.sqrt(add_lanes(squares) / np.float32(width) + np.float32(eps))
    if half % LANES == 0:
        for i in range(0, half, LANES):
            a, b = load(x, at + i), load(x, at + half + i)
            if len(weight_d):
                a, b = mul(mul(a, fill(scale)), load(weight_d, i)), mul(mul(b, fill(scale)), load(weight_d, half + i))
            store(out, to + i, fma(a, load(cos, angle + i), mul(b, load(sin, angle + i))))
            store(out, to + half + i, fma(b, load(cos, angle + half + i), mul(a, load(sin, angle + half + i))))
    else:
        for i in range(half):
            a, b = x[at + i] * scale, x[at + half + i] * scale
            if len(weight_d):
                a, b = a * weight_d[i], b * weight_d[half + i]
            out[to + i] = a * cos[angle + i] + b * sin[angle + i]
            out[to + half + i] = b * cos[angle + half + i] + a * sin[angle + half + i]


@compiled()
def place(qkv, heads, q_weight_d, k_weight_d, eps, cos, sin, slots_T, positions_T, q, cache_k, cache_v):
    """Queries of all rows, normalised and rotated, to q; keys, likewise, and values to where the cache has them."""
    kv_heads, room, width = cache_k.shape[1:]
    k_flat, v_flat = cache_k.reshape(-1), cache_v.reshape(-1)
    at = 0
    for t in range(len(slots_T)):
        position = positions_T[t]
        angle = position * width
        for h in range(heads):
            _turn(qkv, at, q_weight_d, eps, cos, sin, angle, width, q, (t * heads + h) * width)
            at += width
        to = (slots_T[t] * kv_heads * room + position) * width
        for g in range(kv_heads):
            _turn(qkv, at, k_weight_d, eps, cos, sin, angle, width, k_flat, to + g * room * width)
            at += width
        for g in range(kv_heads):
            for i in range(0, width, LANES):
                store(v_flat, to + g * room * width + i, load(qkv, at + i))
            at += width


@compiled()
def copy(cache, source, slot, rows):
    """Give `slot` the first `rows` rows of `source`."""
    kv_heads, room, width = cache.shape[1:]
    flat = cache.reshape(-1)
    for g in range(kv_heads):
        at, to = (source * kv_heads + g) * room * width, (slot * kv_heads + g) * room * width
        flat[to : to + rows * width] = flat[at : at + rows * width]


@compiled()
def _score(q, query, k, key, width, rows, scale, weight_M):
    """Scores of one query on `rows` keys that lie one after the other; the last lanes are -inf. Gives the highest."""
    top = fill(np.float32(-np.inf))
    factor = fill(scale)
    for j in range(0, rows, LANES):
        at = key + j * width
        if rows - j >= LANES:
            # sixteen keys at once: their sums are then the lanes of one vector
            s0, s1, s2, s3, s4, s5, s6, s7 = zero(), zero(), zero(), zero(), zero(), zero(), zero(), zero()
            s8, s9, s10, s11, s12, s13, s14, s15 = zero(), zero(), zero(), zero(), zero(), zero(), zero(), zero()
            for i in range(0, width, LANES):
                x, y = load(q, query + i), at + i
                s0, s1 = fma(x, load(k, y), s0), fma(x, load(k, y + width), s1)
                s2, s3 = fma(x, load(k, y + 2 * width), s2), fma(x, load(k, y + 3 * width), s3)
                s4, s5 = fma(x, load(k, y + 4 * width), s4), fma(x, load(k, y + 5 * width), s5)
                s6, s7 = fma(x, load(k, y + 6 * width), s6), fma(x, load(k, y + 7 * width), s7)
                s8, s9 = fma(x, load(k, y + 8 * width), s8), fma(x, load(k, y + 9 * width), s9)
                s10, s11 = fma(x, load(k, y + 10 * width), s10), fma(x, load(k, y + 11 * width), s11)
                s12, s13 = fma(x, load(k, y + 12 * width), s12), fma(x, load(k, y + 13 * width), s13)
                s14, s15 = fma(x, load(k, y + 14 * width), s14), fma(x, load(k, y + 15 * width), s15)
            scores = mul(sums(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15), factor)
        else:
            for r in range(rows - j):
                total = zero()
                for i in range(0, width, LANES):
                    total = fma(load(q, query + i), load(k, at + r * width + i), total)
                weight_M[j + r] = add_lanes(total) * scale
            scores = first(load(weight_M, j), rows - j)
        store(weight_M, j, scores)
        top = larger(scores, top)
    return max_lanes(top)


@compiled()
def _mix(weight_M, rows, share, v, value, width, out, to):
    """The sum of `rows` values that lie one after the other, each times its weight and all times `share`."""
    for i in range(0, width, LANES):
        s0, s1, s2, s3 = zero(), zero(), zero(), zero()
        at = value + i
        for j in range(0, rows - 3, 4):
            s0 = fma(fill(weight_M[j]), load(v, at), s0)
            s1 = fma(fill(weight_M[j + 1]), load(v, at + width), s1)
            s2 = fma(fill(weight_M[j + 2]), load(v, at + 2 * width), s2)
            s3 = fma(fill(weight_M[j + 3]), load(v, at + 3 * width), s3)
            at += 4 * width
        for j in range(rows // 4 * 4, rows):
            s0 = fma(fill(weight_M[j]), load(v, at), s0)
            at += width
        store(out, to + i, mul(add(add(s0, s1), add(s2, s3)), fill(share)))


@compiled()
def attend(q, heads, rows_N, slots_T, positions_T, cache_k, cache_v, out):
    """Softmax attention of the rows `rows_N` on their slots, each up to its own position."""
    kv_heads, room, width = cache_k.shape[1:]
    k_flat, v_flat = cache_k.reshape(-1), cache_v.reshape(-1)
    group = heads // kv_heads
    scale = np.float32(1.0 / np.sqrt(width))
    weight_M = np.empty((room + LANES - 1) // LANES * LANES, np.float32)
    for t in rows_N:
        rows = positions_T[t] + 1
        for h in range(heads):
            at = (slots_T[t] * kv_heads + h // group) * room * width
            to = (t * heads + h) * width
            top = fill(_score(q, to, k_flat, at, width, rows, scale, weight_M))
            total = zero()
            for j in range(0, rows, LANES):
                weights = exp(sub(load(weight_M, j), top))
                store(weight_M, j, weights)
                total = add(total, weights)
            _mix(weight_M, rows, np.float32(1.0) / add_lanes(total), v_flat, at, width, out, to)


@compiled()
def choose(scores_TE, normalize, layer, experts_TLK, gates_TK):
    """The best K experts of each token, best first, ties to the lowest index; and their gates, as `router.select`."""
    tokens, experts = scores_TE.shape
    for t in range(tokens):
        total = np.float32(0)
        for k in range(gates_TK.shape[1]):
            best = -1
            for e in range(experts):
                taken = False
                for other in range(k):
                    taken |= experts_TLK[t, layer, other] == e
                if not taken and (best < 0 or scores_TE[t, e] > scores_TE[t, best]):
                    best = e
            experts_TLK[t, layer, k] = best
            gates_TK[t, k] = scores_TE[t, best]
            total += scores_TE[t, best]
        if normalize:
            for k in range(gates_TK.shape[1]):
                gates_TK[t, k] /= total + np.float32(TINY)


@compiled()
def dispatch(h, width, rows_N, layer, experts_TLK, sizes_E, place_NK, out):
    """Copies of the rows `rows_N` of h for their experts, sorted by expert; how many each has, and where they are."""
    per_token = experts_TLK.shape[2]
    sizes_E[:] = 0
    for t in rows_N:
        for k in range(per_token):
            sizes_E[experts_TLK[t, layer, k]] += 1
    next_E = np.cumsum(sizes_E) - sizes_E
    for n in range(len(rows_N)):
        t = rows_N[n]
        for k in range(per_token):
            expert = experts_TLK[t, layer, k]
            row = next_E[expert]
            next_E[expert] += 1
            place_NK[n, k] = row
            for i in range(0, width, LANES):
                store(out, row * width + i, load(h, t * width + i))


@compiled()
def swiglu(joint, rows, width, out):
    """silu(gate) * up, from rows that hold the gate first."""
    one, none = fill(np.float32(1)), zero()
    for n in range(rows):
        at = n * 2 * width
        for i in range(0, width, LANES):
            gate = load(joint, at + i)
            up = load(joint, at + width + i)
            store(out, n * width + i, mul(div(gate, add(one, exp(sub(none, gate)))), up))


@compiled()
def combine(y, width, rows_N, place_NK, gates_TK, x, out):
    """The rows `rows_N` of x, each plus what its experts gave, in slot order, times their gates."""
    for n in range(len(rows_N)):
        t = rows_N[n]
        for i in range(0, width, LANES):
            total = mul(fill(gates_TK[t, 0]), load(y, place_NK[n, 0] * width + i))
            for k in range(1, gates_TK.shape[1]):
                total = fma(fill(gates_TK[t, k]), load(y, place_NK[n, k] * width + i), total)
            store(out, n * width + i, add(load(x, t * width + i), total))


@compiled()
def _masses(z, start, count, top, part):
    """e ** (z - top) of `count` logits, and 0 up to the end of the block. Gives their sum."""
    peak, total = fill(top), zero()
    for i in range(0, BLOCK, LANES):
        if i + LANES <= count:
            lanes = load(z, start + i)
        else:
            for j in range(i, i + LANES):
                part[j] = z[start + j] if j < count else np.float32(-np.inf)
            lanes = load(part, i)
        lanes = exp(sub(lanes, peak))
        store(part, i, lanes)
        total = add(total, lanes)
    return add_lanes(total)


@compiled()
def _highest(z, start, count):
    lanes = fill(np.float32(-np.inf))
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        lanes = larger(load(z, start + i), lanes)
    top = max_lanes(lanes)
    for i in range(start + whole, start + count):
        top = max(top, z[i])
    return top


@compiled()
def find(z, row, vocab, greedy, uniform, mass_B, part):
    """The token at which the mass of a row of logits, counted in order, exceeds the uniform number's share of it; the
    lowest of the most likely if `greedy`. Gives the token, the mass before it and its own, that of all, and the highest
    logit, which has mass 1. `mass_B` and `part` are room for the blocks and for one of them."""
    blocks = len(mass_B)
    top = _highest(z, row, vocab)
    total = 0.0
    for b in range(blocks):
        total += np.float64(_masses(z, row + b * BLOCK, min(BLOCK, vocab - b * BLOCK), top, part))
        mass_B[b] = total
    token, before, own = 0, 0.0, 1.0
    if greedy:
        while token < vocab - 1 and z[row + token] != top:
            token += 1
    else:
        mark, b = uniform * total, 0
        while b < blocks - 1 and mass_B[b] <= mark:
            b += 1
        count = min(BLOCK, vocab - b * BLOCK)
        _masses(z, row + b * BLOCK, count, top, part)
        mass = mass_B[b - 1] if b else 0.0
        for i in range(count):
            if part[i] > 0:  # a token without mass is never drawn, however the sums were rounded
                token, before, own = b * BLOCK + i, mass, np.float64(part[i])
                mass += own
                if mass > mark:
                    break
    return token, before, own, total, top


@compiled()
def draw(z_NV, greedy_N, uniform_N, ids_N, logprobs_N):
    """One token per row of logits, as `find` finds it, and its log-probability."""
    vocab, z = z_NV.shape[1], z_NV.reshape(-1)
    mass_B, part = np.empty((vocab + BLOCK - 1) // BLOCK, np.float64), np.empty(BLOCK, np.float32)
    for n in range(len(z_NV)):
        token, _, _, total, top = find(z, n * vocab, vocab, greedy_N[n], uniform_N[n], mass_B, part)
        ids_N[n] = token
        logprobs_N[n] = np.float32(np.float64(z[n * vocab + token]) - np.float64(top) - np.log(total))


@compiled()
def _mix_bits(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled()
def uniform(seed, position):
    """SplitMix64 of seed and position (uint64), 32 bits of it."""
    step = (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return np.float64(_mix_bits(_mix_bits(seed) + step) >> np.uint64(32)) / 2.0**32


@compiled()
def uniforms(seed_N, position_N, uniform_N):
    """`uniform` of each pair."""
    for n in range(len(seed_N)):
        uniform_N[n] = uniform(seed_N[n], position_N[n])
