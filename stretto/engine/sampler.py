"""From logits to tokens, and the log-probability of each under the distribution it was really drawn from.

Temperature first, then truncation to the `top_k` most likely and to the `top_p` nucleus (as in
`model/logprobs.kept`), then renormalisation. At temperature 0 the most likely token is taken (lowest id on ties) and
its log-probability is that of the untempered, untruncated distribution: the drawn one would say 0 for every token and
tell nothing.

Each draw inverts the cumulative distribution with one uniform, which is a hash of (request's seed, token's position).
A token thus depends neither on what else is in the batch, nor on how a conversation was cut into turns; only rounding
of the logits, which may differ between batch sizes in the last bit, can move a draw.

Letters: `N` rows sampled, `V` vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stretto.model.logprobs import kept


def uniforms(seed_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """float64 [N] in [0, 1): SplitMix64 (doi 10.1145/2714064.2660195) of seed and position, 32 bits of it."""
    with np.errstate(over="ignore"):
        x = _mix(seed_N.astype(np.uint64)) + (position_N.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        return (_mix(x) >> np.uint64(32)).astype(np.float64) / 2.0**32


def sample(
    logits_NV: Tensor, temperature_N: np.ndarray, top_p_N: np.ndarray, top_k_N: np.ndarray, uniform_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [N] and their log-probabilities float32 [N]. Rows are independent of each other."""
    greedy_N = temperature_N == 0
    temperature = torch.from_numpy(np.where(greedy_N, np.float32(1), temperature_N))
    scaled_NV = logits_NV / temperature.unsqueeze(1)
    for rows, top_p, top_k in _truncated(top_p_N, top_k_N, ~greedy_N):
        scaled_NV[rows] = scaled_NV[rows].masked_fill(~kept(scaled_NV[rows], top_p, top_k), -torch.inf)
    logp_NV = torch.log_softmax(scaled_NV, dim=-1)
    mass_NV = torch.cumsum(logp_NV.exp(), dim=-1, dtype=torch.float64)
    # the first token whose cumulative mass exceeds the mark has mass of its own, whatever the rounding
    mark_N = torch.from_numpy(uniform_N) * mass_NV[:, -1]
    ids_N = torch.searchsorted(mass_NV, mark_N.unsqueeze(1), right=True).squeeze(1).clamp_(max=logits_NV.shape[1] - 1)
    if greedy_N.any():
        ids_N = torch.where(torch.from_numpy(greedy_N), logits_NV.argmax(dim=-1), ids_N)
    return ids_N.numpy().astype(np.int32), logp_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1).numpy()


def _truncated(top_p_N: np.ndarray, top_k_N: np.ndarray, drawn_N: np.ndarray) -> list[tuple[Tensor, float, int]]:
    """Rows grouped by equal truncation; those without any are left out."""
    pairs_N = np.stack([top_p_N.astype(np.float64), top_k_N.astype(np.float64)], axis=1)
    needed_N = ((top_p_N < 1) | (top_k_N > 0)) & drawn_N
    groups = []
    for top_p, top_k in np.unique(pairs_N[needed_N], axis=0):
        rows = np.flatnonzero(needed_N & (pairs_N == (top_p, top_k)).all(axis=1))
        groups.append((torch.from_numpy(rows), float(top_p), int(top_k)))
    return groups


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
