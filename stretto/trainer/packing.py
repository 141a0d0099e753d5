"""Samples -> micro-batches on one packed token axis, with common prefixes computed once.

Rollouts of one group begin with the same prompt, often with the same first call and its observation. Samples are
ordered so that common prefixes lie side by side, and laid out as a tree: a *node* is one token in one context, and the
whole network works on nodes. Attention alone looks along a path through the tree: the nodes a sample adds look at all
nodes of its path. Tokens are shared only where ids and replayed experts agree from the start.

    samples   a b c d        nodes       a b c d e f       paths   0 1 2 3
              a b c e f      positions   0 1 2 3 3 4               0 1 2 4 5

Nothing is padded. Loss and gradient do not depend on packing or sharing beyond rounding, because every sampled token
brings its own share of the loss.
Shape suffixes: `T` nodes, `X` tokens of all samples, `N` sampled tokens, `L` MoE layers, `K` experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from stretto.model.attention import Attend, PackedCausal
from stretto.trainer.samples import Sample

SHARED_COST = 0.25
"""What a token on a shared prefix counts of the budget: only its keys and values are copied."""


@dataclass(frozen=True)
class MicroBatch:
    """Several samples as one tree. `attend` belongs to its layout."""

    samples: tuple[Sample, ...]
    ids_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sample
    attend: Attend
    routes_TLK: Tensor | None  # int64; rows of -1 are not known
    predict_N: Tensor  # int64: nodes whose hidden states predict `targets_N`
    targets_N: Tensor  # int64
    behaviour_N: Tensor  # float32
    versions_N: Tensor  # int64
    advantage_N: Tensor  # float32
    share_N: Tensor  # float32


class TreeCausal:
    """Causal attention on a tree: each sample's own nodes look at its whole path.

    `paths[i]` are the nodes of sample i, of which the last `own[i]` are its own and follow those of sample i - 1.
    """

    def __init__(self, paths: Sequence[Tensor], own: Sequence[int]) -> None:
        self._paths = list(paths)
        self._own = list(own)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        repeat = q_THd.shape[1] // k_TGd.shape[1]
        k_THd, v_THd = (rows.repeat_interleave(repeat, dim=1) if repeat > 1 else rows for rows in (k_TGd, v_TGd))
        mixed = []
        for path, q_own in zip(self._paths, q_THd.split(self._own), strict=True):
            if not len(q_own):
                continue
            q, k, v = (
                rows.transpose(0, 1).unsqueeze(0)
                for rows in (q_own, k_THd.index_select(0, path), v_THd.index_select(0, path))
            )
            mask = causal_lower_right(len(q_own), len(path))
            mixed.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(0).transpose(0, 1))
        return torch.cat(mixed)


def pack(samples: Sequence[Sample], budget: int) -> list[MicroBatch]:
    """Micro-batches of about `budget` tokens; a sample longer than that stands alone. Equal samples pack equally."""
    ordered = sorted(samples, key=lambda sample: sample.ids_T.tobytes())
    return [join(ordered[start:end]) for start, end in plan([s.tokens for s in ordered], shared(ordered), budget)]


def shared(samples: Sequence[Sample]) -> list[int]:
    """Length of the prefix that each sample has in common with the one before it; 0 for the first."""
    return [0, *itertools.starmap(_common, itertools.pairwise(samples))][: len(samples)]


def plan(lengths: Sequence[int], common: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Ranges [start, end) of consecutive samples, each within the budget. The first of a range shares nothing."""
    ranges: list[tuple[int, int]] = []
    room = 0.0
    for index, (length, prefix) in enumerate(zip(lengths, common, strict=True)):
        cost = length - (1 - SHARED_COST) * prefix
        if ranges and cost <= room:
            ranges[-1] = (ranges[-1][0], index + 1)
            room -= cost
        else:
            ranges.append((index, index + 1))
            room = budget - length
    return ranges


def join(samples: Sequence[Sample], share: bool = True) -> MicroBatch:
    """One micro-batch of these samples, in this order. Either all of them carry routes or none does."""
    common = shared(samples) if share else [0] * len(samples)
    paths: list[np.ndarray] = []  # nodes of each sample
    nodes = 0
    for sample, prefix in zip(samples, common, strict=True):
        fresh = np.arange(nodes, nodes + sample.tokens - prefix)
        paths.append(np.concatenate([paths[-1][:prefix], fresh]) if prefix else fresh)
        nodes += len(fresh)
    lengths = [sample.tokens for sample in samples]
    own = [length - prefix for length, prefix in zip(lengths, common, strict=True)]
    attend = TreeCausal([torch.from_numpy(path) for path in paths], own) if any(common) else PackedCausal(lengths)
    counts = [len(sample.targets_N) for sample in samples]
    routes = [s.routes_TLK[p:] for s, p in zip(samples, common, strict=True) if s.routes_TLK is not None]
    assert len(routes) in (0, len(samples))

    def along(field: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, field) for sample in samples]))

    def repeated(field: str) -> Tensor:
        values = torch.tensor([getattr(sample, field) for sample in samples], dtype=torch.float32)
        return values.repeat_interleave(torch.tensor(counts))

    return MicroBatch(
        samples=tuple(samples),
        ids_T=torch.from_numpy(np.concatenate([s.ids_T[p:] for s, p in zip(samples, common, strict=True)])),
        positions_T=torch.from_numpy(np.concatenate([np.arange(p, n) for n, p in zip(lengths, common, strict=True)])),
        attend=attend,
        routes_TLK=torch.from_numpy(np.concatenate(routes)).long() if routes else None,
        predict_N=torch.from_numpy(np.concatenate([path[s.predict_N] for s, path in zip(samples, paths, strict=True)])),
        targets_N=along("targets_N"),
        behaviour_N=along("behaviour_N"),
        versions_N=along("versions_N").long(),
        advantage_N=repeated("advantage"),
        share_N=repeated("share"),
    )


def _common(a: Sample, b: Sample) -> int:
    length = min(a.tokens, b.tokens)
    same_T = a.ids_T[:length] == b.ids_T[:length]
    prefix = length if same_T.all() else int(same_T.argmin())
    if a.routes_TLK is None or b.routes_TLK is None:
        return prefix
    same_T = (a.routes_TLK[:prefix] == b.routes_TLK[:prefix]).all((1, 2))
    return prefix if same_T.all() else int(same_T.argmin())
