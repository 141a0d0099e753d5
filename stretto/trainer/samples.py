"""Rollouts of a batch -> training samples, checked on the way in.

A sample is one segment up to its last sampled token. The network's inputs are all tokens but that last one; only the
positions whose hidden state predicts a sampled token need logits. What is malformed is refused with a sentence that
names the rollout, because a batch is immutable: training around a bad rollout would hide the bug that made it.

Rollouts with advantage zero have no gradient, hence no sample, but they count in the normalizers. Those of groups with
equal rewards are not even in the batch; `batch.rollouts` counts them too.
Shape suffixes: `T` input tokens, `N` sampled tokens, `L` MoE layers, `K` experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from stretto.records import Batch, BatchItem, Outcome, Rollout, Segment, decode, unknown_expert
from stretto.support import Support
from stretto.trainer.losses import Normalizer, token_share

UNKNOWN = -1
"""Marks a route row that is not known, in every [T, L, K] array of the trainer; the router then chooses freely."""


class BatchError(ValueError):
    """A batch or one of its rollouts cannot be trained on; the message names it and says why."""

    final = True  # no restart heals it


@dataclass(frozen=True)
class Geometry:
    """What the model expects of the data."""

    vocab: int
    layers: int  # MoE layers; 0 for a dense model
    experts: int
    per_token: int


@dataclass(frozen=True)
class Sample:
    """One segment, ready for packing."""

    rollout: str
    ids_T: np.ndarray  # int64
    routes_TLK: np.ndarray | None  # int32, rows of UNKNOWN where not known; None without replay or for a dense model
    route_ids_T: np.ndarray | None  # int64: the ids that the routes were made for, moved along with them
    support: Support | None  # N sets that the targets were drawn from; None: the full vocabulary
    predict_N: np.ndarray  # int64: input positions whose hidden state predicts a sampled token
    targets_N: np.ndarray  # int64: the sampled tokens
    behaviour_N: np.ndarray  # float32
    versions_N: np.ndarray  # int32
    advantage: float
    share: float  # of each token in the loss

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    @property
    def only_version(self) -> int | None:
        """The version that sampled all tokens, if it was a single one."""
        first = int(self.versions_N[0])
        return first if (self.versions_N == first).all() else None


@dataclass(frozen=True)
class Prepared:
    """A batch as samples, with the counts its metrics need."""

    samples: list[Sample]
    tokens: int  # all tokens of all rollouts
    sampled: int  # sampled tokens of all rollouts


def prepare(
    batch: Batch,
    payloads: Sequence[bytes],
    geometry: Geometry,
    *,
    max_staleness: int,
    replay: bool,
    truncated: bool,
    normalizer: Normalizer,
    budget: int,
) -> Prepared:
    """Decode, check and cut the rollouts of `batch`; `payloads[i]` belongs to `batch.items[i]`. `truncated`: they were
    sampled under top-p or top-k, so that every token must know its support.

    Raises BatchError naming the rollout that is malformed or too old.
    """
    if batch.rollouts < len(batch.items):
        raise BatchError(f"the batch of version {batch.version} counts {batch.rollouts} rollouts and has more items")
    rollouts = [_read(item, data) for item, data in zip(batch.items, payloads, strict=True)]
    for item, rollout in zip(batch.items, rollouts, strict=True):
        _check(item, rollout, batch.version, max_staleness)
    sampled = [sum(int(s.sampled_T.sum()) for s in rollout.segments) for rollout in rollouts]
    samples = []
    for item, rollout, here in zip(batch.items, rollouts, sampled, strict=True):
        if item.advantage == 0.0:
            continue
        share = token_share(normalizer, batch.rollouts, sum(sampled), here, budget)
        for number, segment in enumerate(rollout.segments):
            where = f"rollout {rollout.id}, segment {number}"
            if segment.sampled_T.any():
                samples.append(_cut(segment, geometry, replay, truncated, where, item.advantage, share, rollout.id))
    if samples and all(s.routes_TLK is not None and (s.routes_TLK == UNKNOWN).all() for s in samples):
        raise BatchError(
            f"trainer.replay is on, but not one route in the batch of version {batch.version} is known: the engines do "
            "not return any; use engines that do, or set trainer.replay = false"
        )
    tokens = sum(len(s.ids_T) for rollout in rollouts for s in rollout.segments)
    return Prepared(samples, tokens, sum(sampled))


def _read(item: BatchItem, data: bytes) -> Rollout:
    try:
        return decode(data, Rollout)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise BatchError(f"rollout {item.rollout}: its payload {item.key} cannot be read: {error}") from error


def _check(item: BatchItem, rollout: Rollout, version: int, max_staleness: int) -> None:
    if rollout.id != item.rollout:
        raise BatchError(f"rollout {item.rollout}: its payload {item.key} holds rollout {rollout.id}")
    if rollout.outcome is Outcome.INFRA:
        raise BatchError(f"rollout {item.rollout} ended as infra: it must not reach a batch")
    if not math.isfinite(item.advantage):
        raise BatchError(f"rollout {item.rollout}: its advantage is {item.advantage}, not a finite number")
    for number, segment in enumerate(rollout.segments):
        where = f"rollout {item.rollout}, segment {number}"
        try:
            segment.validate()
        except ValueError as error:
            raise BatchError(f"{where}: {error}") from error
        versions = segment.versions_T[segment.sampled_T]
        if not len(versions):
            continue
        oldest, newest = int(versions.min()), int(versions.max())
        if newest > version:
            raise BatchError(f"{where}: a token was sampled by version {newest}, which version {version} cannot know")
        if oldest < version - max_staleness:
            raise BatchError(
                f"{where}: a token was sampled by version {oldest}, {version - oldest} steps before {version}; "
                f"rollouts.max_staleness is {max_staleness}"
            )


def _cut(
    segment: Segment,
    geometry: Geometry,
    replay: bool,
    truncated: bool,
    where: str,
    advantage: float,
    share: float,
    rollout: str,
) -> Sample:
    sampled_N = np.flatnonzero(segment.sampled_T)
    if sampled_N[0] == 0:
        raise BatchError(f"{where}: its first token is marked as sampled, but nothing came before it")
    end = int(sampled_N[-1])
    ids = segment.ids_T.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= geometry.vocab))
    if len(wrong):
        at = int(wrong[0])
        raise BatchError(f"{where}: token {at} has id {ids[at]}, outside the vocabulary of {geometry.vocab}")
    routes_TLK = _routes(segment, end, geometry, where) if replay and geometry.layers else None
    return Sample(
        rollout=rollout,
        ids_T=ids[:end],
        routes_TLK=routes_TLK,
        route_ids_T=None if routes_TLK is None else ids[: len(routes_TLK)].copy(),  # `_routes` has seen that they match
        support=_support(segment, ids[sampled_N], geometry, truncated, where),
        predict_N=sampled_N - 1,
        targets_N=ids[sampled_N],
        behaviour_N=segment.logprobs_T[sampled_N].copy(),
        versions_N=segment.versions_T[sampled_N].copy(),
        advantage=advantage,
        share=share,
    )


def _routes(segment: Segment, end: int, geometry: Geometry, where: str) -> np.ndarray:
    expected = (geometry.layers, geometry.per_token)
    if tuple(segment.route_shape) != expected:
        raise BatchError(
            f"{where}: its routes have shape {tuple(segment.route_shape)} per token, the model's (MoE layers, experts "
            f"per token) is {expected}; an engine that returns no routes needs trainer.replay = false"
        )
    try:
        routes = segment.routes_TLK[:end].astype(np.int32)
    except ValueError as error:
        raise BatchError(f"{where}: {error}") from error
    unknown = routes == unknown_expert(segment.route_bits)
    partly = unknown.any((1, 2)) != unknown.all((1, 2))
    if partly.any():
        raise BatchError(f"{where}: token {int(partly.argmax())} has a route row that is only partly known")
    known = routes[~unknown.any((1, 2))]
    if known.size and int(known.max()) >= geometry.experts:
        raise BatchError(f"{where}: a route names expert {int(known.max())} of {geometry.experts}")
    ordered = np.sort(known, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise BatchError(f"{where}: a route row names an expert twice: that is filler, not the router's choice")
    routes[unknown] = UNKNOWN
    return routes


def _support(
    segment: Segment, targets_N: np.ndarray, geometry: Geometry, truncated: bool, where: str
) -> Support | None:
    if segment.support is None and not truncated:
        return None
    if segment.support is None:
        raise BatchError(
            f"{where}: rollouts.top_p or rollouts.top_k cuts the distribution, but nothing says which tokens were "
            "left; use an engine that returns supports, or sample from the full distribution"
        )
    if not truncated:
        raise BatchError(
            f"{where}: it was sampled under top-p or top-k, but neither rollouts.top_p nor rollouts.top_k is set"
        )
    try:
        support = Support.join([Support.open(chunk) for chunk in segment.support])
    except ValueError as error:
        raise BatchError(f"{where}: {error}") from error
    if support.vocab != geometry.vocab:
        raise BatchError(
            f"{where}: its supports are over {support.vocab} tokens, the model's vocabulary has {geometry.vocab}"
        )
    inside_N = support.contains(targets_N)
    if not inside_N.all():
        raise BatchError(
            f"{where}: sampled token {int(inside_N.argmin())} is not in the set it is said to be drawn from"
        )
    return support
