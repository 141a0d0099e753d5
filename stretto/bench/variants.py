"""Ways for the trainer to recompute what an engine said, and how far each is off; what each costs is timed elsewhere.

A *variant* is a level of agreement, whether routes are replayed, and the ratio of the plausibility filter. All of them
see the same tokens; `exact` is compared with an engine that is exact too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.bench.forced import Scored
from stretto.model import checkpoint
from stretto.model.logprobs import token_logprobs
from stretto.model.numerics import Level, Numerics
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer
from stretto.trainer.agreement import ALL, Agreement, Bucket, Rows
from stretto.trainer.packing import pack
from stretto.trainer.samples import Sample

MICROBATCH = 4096

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Variant:
    name: str
    level: Level
    replay: bool
    ratio: float


def variants(ratio: float) -> list[Variant]:
    """From nothing to everything; the first is what the others are measured against."""
    return [
        Variant("no replay", Level.FAST, replay=False, ratio=0.0),
        Variant("replay", Level.FAST, replay=True, ratio=0.0),
        Variant("replay + filter", Level.FAST, replay=True, ratio=ratio),
        Variant("ordered", Level.ORDERED, replay=True, ratio=ratio),
        Variant("exact", Level.EXACT, replay=True, ratio=ratio),
    ]


class Networks:
    """One network per kind of arithmetic, made when first asked for, holding whatever weights are asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._made: dict[Numerics, Transformer] = {}

    def __call__(self, numerics: Numerics, weights: Weights) -> Transformer:
        """The shared one: its weights change with the next call for the same arithmetic."""
        if numerics not in self._made:
            self._made[numerics] = checkpoint.empty(self.spec, numerics=numerics)
        return _filled(self._made[numerics], weights)

    def own(self, numerics: Numerics, weights: Weights) -> Transformer:
        """One for the caller alone."""
        return _filled(checkpoint.empty(self.spec, numerics=numerics), weights)


def _filled(model: Transformer, weights: Weights) -> Transformer:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


@dataclass(frozen=True)
class Measured:
    """`used_differ`: share of known rows in which the trainer computes with other experts than the engine did. The
    `disagreement` of the bucket is what its router would have chosen by itself."""

    bucket: Bucket
    used_differ: float

    def values(self) -> dict[str, float | int | None]:
        return {**self.bucket.values(), "used_differ": self.used_differ}


@torch.no_grad()
def measure(model: Transformer, samples: Sequence[Sample], replay: bool, ratio: float) -> Measured:
    """`samples` carry log-probs and routes of the engine; without `replay` the routes are only compared with."""
    agreement = Agreement()
    differ = known = 0
    for micro in pack(samples, MICROBATCH):
        routes_TLK = micro.routes_TLK
        assert routes_TLK is not None
        out = model(
            micro.ids_T,
            micro.positions_T,
            micro.attend,
            routes_TLK=routes_TLK if replay else None,
            replay_ratio=ratio,
            capture=True,
        )
        logp_N, _ = token_logprobs(model, out.hidden_TD[micro.predict_N], micro.targets_N)
        known_TL = routes_TLK[:, :, 0] >= 0
        rows = None
        if out.differs_TL is not None and out.replaced_TL is not None:
            rows = Rows(known_TL, out.differs_TL, out.replaced_TL).of(micro.predict_N)
        agreement.add(logp_N, micro.behaviour_N, micro.versions_N, rows)
        assert out.routes_TLK is not None
        differ_TL = (out.routes_TLK.sort(-1).values != routes_TLK.sort(-1).values).any(-1) & known_TL
        differ, known = differ + int(differ_TL.sum()), known + int(known_TL.sum())
    return Measured(agreement.buckets(0)[ALL], differ / max(1, known))


def said_by(samples: Sequence[Sample], scored: Sequence[Scored]) -> list[Sample]:
    """The same tokens with another engine's log-probs and routes."""
    return [
        dataclasses.replace(
            sample, behaviour_N=one.logprobs_N, routes_TLK=one.routes_TLK if one.routes_TLK.size else None
        )
        for sample, one in zip(samples, scored, strict=True)
    ]


def corrupted(samples: Sequence[Sample], share: float, experts: int, seed: int) -> list[Sample]:
    """`share` of all (token, layer) rows name random experts instead, all different."""
    rng = np.random.default_rng(seed)
    found = []
    for sample in samples:
        assert sample.routes_TLK is not None
        tokens, layers, per_token = sample.routes_TLK.shape
        random_TLK = rng.random((tokens, layers, experts)).argsort(-1)[..., :per_token]
        hit_TL = rng.random((tokens, layers)) < share
        found.append(dataclasses.replace(sample, routes_TLK=np.where(hit_TL[..., None], random_TLK, sample.routes_TLK)))
    return found


def shifted(samples: Sequence[Sample]) -> list[Sample]:
    """Each token gets the routes of the one before it: an off-by-one."""
    found = []
    for sample in samples:
        assert sample.routes_TLK is not None
        found.append(dataclasses.replace(sample, routes_TLK=np.roll(sample.routes_TLK, 1, axis=0)))
    return found
