"""From logits to tokens, and the log-probability of each under the distribution it was really drawn from.

Temperature first, then truncation to the `top_k` most likely and to the `top_p` nucleus (`kept`), then
renormalisation; the sets kept are part of the result, because the trainer must normalise over the same ones. At
temperature 0 the most likely token is taken (lowest id on ties) and its log-probability is that of the untempered,
untruncated distribution: the drawn one would say 0 for every token and tell nothing.

Each draw inverts the cumulative distribution with one uniform, which is a hash of (request's seed, token's position).
A token thus depends neither on what else is in the batch, nor on how a conversation was cut into turns; only rounding
of the logits, which may differ between batch sizes in the last bit, can move a draw.

Letters: `N` rows sampled, `V` vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.engine import compiled
from stretto.support import Support


class Drawn(NamedTuple):
    ids_N: np.ndarray  # int32
    logprobs_N: np.ndarray  # float32
    support: Support | None  # None when no row is truncated; else rows that are not have the whole vocabulary

    def rows(self, kept: np.ndarray) -> Drawn:
        """Of some rows."""
        support = self.support
        if support is not None:
            each = support.split()
            support = Support.join([each[row] for row in kept.tolist()])
        return Drawn(self.ids_N[kept], self.logprobs_N[kept], support)


def uniforms(seed_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """float64 [N] in [0, 1): SplitMix64 (doi 10.1145/2714064.2660195) of seed and position, 32 bits of it."""
    uniform_N = np.empty(len(seed_N), np.float64)
    compiled.uniforms(seed_N.astype(np.uint64), position_N.astype(np.uint64), uniform_N)
    return uniform_N


def sample(
    logits_NV: Tensor,
    temperature_N: np.ndarray,
    top_p_N: np.ndarray,
    top_k_N: np.ndarray,
    uniform_N: np.ndarray,
    exact: bool = False,
) -> Drawn:
    """One token per row of `logits_NV`. Rows are independent of each other. With `exact` the log-probabilities are
    computed as the trainer computes them, to the bit."""
    greedy_N = temperature_N == 0
    scaled_NV, support = logits_NV, None
    if not ((temperature_N == 1) | greedy_N).all():
        temperature_N = np.where(greedy_N, np.float32(1), temperature_N)
        scaled_NV = logits_NV / torch.from_numpy(temperature_N).unsqueeze(1)
    if truncated := _truncated(top_p_N, top_k_N, ~greedy_N):
        keep_NV = torch.ones_like(scaled_NV, dtype=torch.bool)
        for rows, top_p, top_k in truncated:
            keep_NV[rows] = kept(scaled_NV[rows], top_p, top_k)
        scaled_NV = scaled_NV.masked_fill(~keep_NV, -torch.inf)
        support = Support.of(keep_NV.numpy())
    ids_N, logprobs_N = np.empty(len(scaled_NV), np.int32), np.empty(len(scaled_NV), np.float32)
    compiled.draw(scaled_NV.contiguous().numpy(), greedy_N, uniform_N, ids_N, logprobs_N)
    if exact:
        chosen_N1 = torch.from_numpy(ids_N).long().unsqueeze(1)
        logprobs_N = torch.log_softmax(scaled_NV, dim=-1).gather(1, chosen_N1).squeeze(1).numpy()
    return Drawn(ids_N, logprobs_N, support)


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


def _truncated(top_p_N: np.ndarray, top_k_N: np.ndarray, drawn_N: np.ndarray) -> list[tuple[Tensor, float, int]]:
    """Rows grouped by equal truncation; those without any are left out."""
    needed_N = ((top_p_N < 1) | (top_k_N > 0)) & drawn_N
    if not needed_N.any():
        return []
    pairs_N = np.stack([top_p_N.astype(np.float64), top_k_N.astype(np.float64)], axis=1)
    groups = []
    for top_p, top_k in np.unique(pairs_N[needed_N], axis=0):
        rows = np.flatnonzero(needed_N & (pairs_N == (top_p, top_k)).all(axis=1))
        groups.append((torch.from_numpy(rows), float(top_p), int(top_k)))
    return groups
