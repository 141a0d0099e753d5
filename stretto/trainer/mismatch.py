"""The trainer's log-probs against the engine's, recomputed with and without router replay: what does replay change?

Every step already compares the two on all its tokens (agreement.py, where the measures are defined). This costs
forward passes of its own, so it is done on few tokens, now and then. Two causes are kept apart. *Numerics*: rollouts
whose tokens all come from one version are recomputed under that very version, of which the trainer holds a bf16 copy;
every difference is then the engine's arithmetic or a bug. *Staleness* (prefix `stale_`): tokens of older versions under
the version that the batch updates; the routers have moved, so replay matters more. An instrument, not a gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stretto.model.transformer import Transformer
from stretto.trainer.agreement import ALL, Agreement
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.packing import MicroBatch, pack
from stretto.trainer.samples import Sample
from stretto.trainer.step import Distribution, predict, without_routes

MEASURED_TOKENS = 2048
"""Network inputs per measurement; each is run up to four times."""

MEASURES = (
    "k1", "k3", "max_dlogp", "k3_without_replay", "max_dlogp_without_replay", "disagreement", "coverage", "replaced"
)  # fmt: skip
"""What a `mismatch` line holds beside `tokens`; where not said otherwise, with replay if there is any."""


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


def measure(
    model: Transformer,
    held: HeldVersions,
    samples: Sequence[Sample],
    version: int,
    distribution: Distribution,
    budget: int,
    ratio: float = 0.0,
) -> dict[str, float | int | None]:
    """Values of one `mismatch` line for the batch that updates `version`, which must be held.

    Values are None where nothing could be measured: no rollout of one held version, no older tokens, no routes.
    `budget` is the micro-batch size, `ratio` that of the plausibility filter.
    """
    single = _spread([s for s in samples if s.only_version in held], MEASURED_TOKENS)
    older = _spread([s for s in samples if (s.versions_N < version).any()], MEASURED_TOKENS)
    numerics, stale = _Comparison(ratio), _Comparison(ratio)
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
    """Collects log-probs of trainer and engine over micro-batches, with replay and without."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.free, self.replayed = Agreement(), Agreement()

    @torch.no_grad()
    def add(self, model: Transformer, micro: MicroBatch, distribution: Distribution, counted_N: Tensor) -> None:
        engine_N, version_N = micro.behaviour_N[counted_N], micro.versions_N[counted_N]
        free = predict(model, without_routes(micro), distribution)
        self.free.add(free.logp_N[counted_N], engine_N, version_N, None)
        if micro.routes_TLK is None:
            return
        replayed = predict(model, micro, distribution, self.ratio)
        assert replayed.rows is not None
        self.replayed.add(replayed.logp_N[counted_N], engine_N, version_N, replayed.rows.of(counted_N))

    def values(self) -> dict[str, float | int | None]:
        free = self.free.buckets(0).get(ALL)
        with_replay = self.replayed.buckets(0).get(ALL, free)
        if free is None or with_replay is None:
            return {"tokens": 0, **dict.fromkeys(MEASURES)}
        values = with_replay.values()
        values["k3_without_replay"] = free.divergence.k3
        values["max_dlogp_without_replay"] = free.divergence.max_dlogp
        return {"tokens": values["tokens"], **{name: values[name] for name in MEASURES}}
