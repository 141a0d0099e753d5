"""Samples -> micro-batches on one packed token axis, with common prefixes computed once.

Rollouts of one group begin with the same prompt, often with the same first call and its observation. Samples are
ordered so that common prefixes lie side by side, and laid out as a tree: a *node* is one token in one context, and the
whole network works on nodes. Attention alone looks along a path through the tree: the nodes a sample adds look at all
nodes of its path. Tokens are shared only where ids and replayed experts agree from the start.

    samples   a b c d        nodes       a b c d e f       paths   0 1 2 3
              a b c e f      positions   0 1 2 3 3 4               0 1 2 4 5

Routes are laid out together with the ids they were made for, and after each reshaping those must equal the ids at their
nodes (`follow`): replay that is off by one token trains other experts than those that acted, and nothing crashes.

Nothing is padded. Loss and gradient do not depend on packing or sharing beyond rounding, because every sampled token
brings its own share of the loss.
Shape suffixes: `T` nodes, `X` tokens of all samples, `N` sampled tokens, `L` MoE layers, `K` experts per token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from stretto.model.attention import Attend, PackedCausal, exact_causal
from stretto.support import Support
from stretto.trainer.samples import Sample

SHARED_COST = 0.25
"""What a token on a shared prefix counts of the budget: only its keys and values are copied."""
CONTEXT = 8192
"""So many tokens of context cost a token in attention what the rest of the network costs it: 2 * active parameters of a
layer / (4 * heads * head dim), which is about this for Qwen3-30B-A3B. Balance only; results don't depend on it."""
BISECTIONS = 20


@dataclass(frozen=True)
class MicroBatch:
    """Several samples as one tree. `attend` belongs to its layout."""

    samples: tuple[Sample, ...]
    ids_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sample
    attend: Attend
    routes_TLK: Tensor | None  # int64; rows of -1 are not known
    route_ids_T: Tensor | None  # int64: what `routes_TLK` were made for
    predict_N: Tensor  # int64: nodes whose hidden states predict `targets_N`
    targets_N: Tensor  # int64
    behaviour_N: Tensor  # float32
    versions_N: Tensor  # int64
    support: Support | None  # sets that `targets_N` were drawn from; None: the full vocabulary
    advantage_N: Tensor  # float32
    share_N: Tensor  # float32


class TreeCausal:
    """Causal attention on a tree: each sample's own nodes look at its whole path.

    `paths[i]` are the nodes of sample i, of which the last `own[i]` are its own and follow those of sample i - 1.
    """

    def __init__(self, paths: Sequence[Tensor], own: Sequence[int]) -> None:
        self._paths = list(paths)
        self._own = list(own)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, exact: bool = False) -> Tensor:
        if exact:
            own = zip(self._paths, q_THd.split(self._own), strict=True)
            return torch.cat(
                [exact_causal(q, k_TGd.index_select(0, path), v_TGe.index_select(0, path)) for path, q in own if len(q)]
            )
        repeat = q_THd.shape[1] // k_TGd.shape[1]
        k_THd, v_THd = (rows.repeat_interleave(repeat, dim=1) if repeat > 1 else rows for rows in (k_TGd, v_TGe))
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
    ranges = balanced([s.tokens for s in ordered], shared(ordered), budget)
    return [join(ordered[start:end]) for start, end in ranges]


def shared(samples: Sequence[Sample]) -> list[int]:
    """Length of the prefix that each sample has in common with the one before it; 0 for the first."""
    return [0, *itertools.starmap(_common, itertools.pairwise(samples))][: len(samples)]


def balanced(lengths: Sequence[int], common: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """As many ranges as `plan` makes of the token budget, cut where the most work that one holds is least; exactly so
    where nothing is shared, as a cut inside a shared prefix costs that prefix once more."""
    ranges = plan(lengths, common, budget)
    low = max((work(length, 0) for length in lengths), default=0.0)
    high = sum(work(length, 0) for length in lengths)
    for _ in range(BISECTIONS):
        limit = (low + high) / 2
        evened = plan(lengths, common, budget, limit)
        if len(evened) <= len(ranges):
            ranges, high = evened, limit
        else:
            low = limit
    return ranges


def plan(lengths: Sequence[int], common: Sequence[int], budget: int, limit: float = math.inf) -> list[tuple[int, int]]:
    """Ranges [start, end) of consecutive samples, each within the budget of tokens and the limit of `work`, as few as
    can be; a sample that is over either stands alone. The first of a range shares nothing."""
    ranges: list[tuple[int, int]] = []
    room = left = 0.0
    for index, (length, prefix) in enumerate(zip(lengths, common, strict=True)):
        cost, effort = length - (1 - SHARED_COST) * prefix, work(length, prefix)
        if ranges and cost <= room and effort <= left:
            ranges[-1] = (ranges[-1][0], index + 1)
            room, left = room - cost, left - effort
        else:
            ranges.append((index, index + 1))
            room, left = budget - length, limit - work(length, 0)
    return ranges


def work(length: int, prefix: int) -> float:
    """FLOPs of a sample's own tokens, in units of one token's outside attention."""
    own = length - prefix
    return own + own * (prefix + own / 2) / CONTEXT


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
    route_ids_T, routes_TLK = _routes(samples, common)
    supports = [sample.support for sample in samples if sample.support is not None]
    assert len(supports) in (0, len(samples))
    ids_T = torch.from_numpy(np.concatenate([s.ids_T[p:] for s, p in zip(samples, common, strict=True)]))
    follow(ids_T, route_ids_T, "packing")

    def along(field: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, field) for sample in samples]))

    def repeated(field: str) -> Tensor:
        values = torch.tensor([getattr(sample, field) for sample in samples], dtype=torch.float32)
        return values.repeat_interleave(torch.tensor(counts))

    return MicroBatch(
        samples=tuple(samples),
        ids_T=ids_T,
        positions_T=torch.from_numpy(np.concatenate([np.arange(p, n) for n, p in zip(lengths, common, strict=True)])),
        attend=attend,
        routes_TLK=routes_TLK,
        route_ids_T=route_ids_T,
        predict_N=torch.from_numpy(np.concatenate([path[s.predict_N] for s, path in zip(samples, paths, strict=True)])),
        targets_N=along("targets_N"),
        behaviour_N=along("behaviour_N"),
        versions_N=along("versions_N").long(),
        support=Support.join(supports) if supports else None,
        advantage_N=repeated("advantage"),
        share_N=repeated("share"),
    )


class Astray(RuntimeError):
    """Routes and tokens have moved against each other: a bug of ours, never to be trained through."""


def follow(ids_T: Tensor, route_ids_T: Tensor | None, where: str) -> None:
    """Raise Astray unless the routes were made for these very ids. `where` names the reshaping just done."""
    if route_ids_T is not None and not torch.equal(ids_T, route_ids_T):
        raise Astray(f"after {where}, routes belong to other tokens than the ones they lie beside")


def _routes(samples: Sequence[Sample], common: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
    """Route ids and routes of all nodes, moved as one array."""
    rows = []
    for sample, prefix in zip(samples, common, strict=True):
        if sample.routes_TLK is not None and sample.route_ids_T is not None:
            flat = sample.routes_TLK.reshape(len(sample.routes_TLK), -1)
            rows.append(np.column_stack([sample.route_ids_T, flat])[prefix:])
    assert len(rows) in (0, len(samples)), "either all samples of a micro-batch carry routes or none does"
    if not rows or samples[0].routes_TLK is None:
        return None, None
    tagged = torch.from_numpy(np.concatenate(rows))
    return tagged[:, 0].contiguous(), tagged[:, 1:].reshape(len(tagged), *samples[0].routes_TLK.shape[1:])


def _common(a: Sample, b: Sample) -> int:
    length = min(a.tokens, b.tokens)
    same_T = a.ids_T[:length] == b.ids_T[:length]
    prefix = length if same_T.all() else int(same_T.argmin())
    if a.routes_TLK is None or b.routes_TLK is None:
        return prefix
    same_T = (a.routes_TLK[:prefix] == b.routes_TLK[:prefix]).all((1, 2))
    return prefix if same_T.all() else int(same_T.argmin())
