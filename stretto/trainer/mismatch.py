"""How far the trainer's log-probs are from the engine's, with and without router replay.

With q the engine, p the trainer and d = log p - log q of each token sampled from q (Schulman 2020, "Approximating KL
divergence"):

- k1 = mean(-d): unbiased estimate of KL(q || p); its noise is of the order of |d|;
- k3 = mean(exp(d) - 1 - d): unbiased too, never negative, but of unbounded variance when the two are far apart;
- max_dlogp = max |d|;
- disagreement: share of (token, MoE layer) rows where the trainer's router would not have chosen the replayed experts;
- coverage: share of rows whose replayed experts are known.

Two causes are kept apart. *Numerics*: rollouts whose tokens all come from one version are recomputed under that very
version, of which the trainer holds a bf16 copy; every difference is then the engine's arithmetic or a bug. *Staleness*
(prefix `stale_`): tokens of older versions under the version that the batch updates; the routers have moved, so replay
matters more. Few tokens are measured: it is an instrument, not a gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.model.transformer import Transformer
from stretto.trainer.corrections import LARGEST_LOG_RATIO, SMALLEST_LOG_RATIO
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.packing import MicroBatch, pack
from stretto.trainer.samples import Sample
from stretto.trainer.step import Distribution, predict, without_routes

MEASURED_TOKENS = 2048
"""Network inputs per measurement; each is run up to four times."""


class HeldVersions:
    """bf16 copies of the newest published versions: exactly what the engines serve."""

    def __init__(self, optimizer: MasterAdamW, keep: int) -> None:
        self._optimizer = optimizer
        self._keep = keep
        self._weights: dict[int, dict[str, Tensor]] = {}

    def __contains__(self, version: object) -> bool:
        return version in self._weights

    def add(self, version: int) -> None:
        """Copy what the model holds now as `version`; forget the oldest beyond `keep`."""
        self._weights[version] = {name: p.detach().bfloat16() for name, p in self._optimizer.parameters.items()}
        for old in sorted(self._weights)[: -self._keep]:
            del self._weights[old]

    @contextmanager
    def under(self, version: int) -> Iterator[None]:
        """The model holds `version` inside, its present weights again afterwards."""
        try:
            with torch.no_grad():
                for name, parameter in self._optimizer.parameters.items():
                    parameter.copy_(self._weights[version][name])
            yield
        finally:
            self._optimizer.round_into_model()


@dataclass(frozen=True)
class Divergence:
    k1: float
    k3: float
    max_dlogp: float


def divergence(trainer_N: Tensor, engine_N: Tensor) -> Divergence:
    """Of log-probs of the same sampled tokens, float [N], N > 0; differences are clamped as in `corrections`."""
    d_N = (trainer_N.double() - engine_N.double()).clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return Divergence(float(-d_N.mean()), float((torch.expm1(d_N) - d_N).mean()), float(d_N.abs().max()))


def measure(
    model: Transformer,
    held: HeldVersions,
    samples: Sequence[Sample],
    version: int,
    distribution: Distribution,
    budget: int,
) -> dict[str, float | int | None]:
    """Values of one `mismatch` line for the batch that updates `version`, which must be held.

    Values are None where nothing could be measured: no rollout of one held version, no older tokens, no routes.
    `budget` is the micro-batch size.
    """
    single = _spread([s for s in samples if s.only_version in held], MEASURED_TOKENS)
    older = _spread([s for s in samples if (s.versions_N < version).any()], MEASURED_TOKENS)
    numerics, stale = _Comparison(), _Comparison()
    for sampled_by in sorted({s.only_version for s in single if s.only_version is not None}):
        with held.under(sampled_by):
            for micro in pack([s for s in single if s.only_version == sampled_by], budget):
                numerics.add(model, micro, distribution, torch.ones_like(micro.versions_N, dtype=torch.bool))
    with held.under(version):
        for micro in pack(older, budget):
            stale.add(model, micro, distribution, micro.versions_N < version)
    return {**numerics.values(), **{f"stale_{key}": value for key, value in stale.values().items()}}


def _spread(samples: Sequence[Sample], budget: int) -> list[Sample]:
    """Samples from all over the batch, about `budget` tokens in all."""
    total = sum(sample.tokens for sample in samples)
    stride = max(1, -(-total // budget))
    return list(samples[::stride])


class _Comparison:
    """Collects log-probs of trainer and engine over micro-batches."""

    def __init__(self) -> None:
        self.engine: list[Tensor] = []
        self.replayed: list[Tensor] = []
        self.free: list[Tensor] = []
        self.rows = self.known = 0
        self.differing = 0.0

    @torch.no_grad()
    def add(self, model: Transformer, micro: MicroBatch, distribution: Distribution, counted_N: Tensor) -> None:
        self.engine.append(micro.behaviour_N[counted_N])
        self.free.append(predict(model, without_routes(micro), distribution).logp_N[counted_N])
        if micro.routes_TLK is None:
            return
        predicted = predict(model, micro, distribution)
        self.replayed.append(predicted.logp_N[counted_N])
        rows = micro.routes_TLK.shape[0] * micro.routes_TLK.shape[1]
        assert predicted.disagreement is not None and predicted.covered is not None
        self.rows += rows
        self.known += int(predicted.covered)
        self.differing += float(predicted.disagreement) * int(predicted.covered)

    def values(self) -> dict[str, float | int | None]:
        tokens = sum(len(part) for part in self.engine)
        free = divergence(torch.cat(self.free), torch.cat(self.engine)) if tokens else None
        replayed = divergence(torch.cat(self.replayed), torch.cat(self.engine)) if tokens and self.replayed else free
        return {
            "tokens": tokens,
            "k1": replayed.k1 if replayed else None,
            "k3": replayed.k3 if replayed else None,
            "max_dlogp": replayed.max_dlogp if replayed else None,
            "k3_without_replay": free.k3 if free else None,
            "max_dlogp_without_replay": free.max_dlogp if free else None,
            "disagreement": self.differing / self.known if self.known else None,
            "coverage": self.known / self.rows if self.rows else None,
        }
