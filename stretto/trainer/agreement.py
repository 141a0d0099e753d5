"""How well trainer and engine agree on the tokens of a step, bucketed by policy lag.

With q the engine, p the trainer and d = log p - log q of each token sampled from q (Schulman 2020, "Approximating KL
divergence"):

- k1 = mean(-d): unbiased estimate of KL(q || p); its noise is of the order of |d|;
- k3 = mean(exp(d) - 1 - d): unbiased too, never negative, but of unbounded variance when the two are far apart;
- mean, p99, p99.9 and max of |d|; mean_dp = mean |p - q|, of probabilities;
- f2 = share of tokens whose ratio p / q, or its inverse, exceeds 2;
- correlation of p and q (Pearson), None where either does not vary.

Of the router's rows, (token, MoE layer) pairs: coverage, the share whose engine's experts are known; and of these
disagreement, the share where the trainer's own router would choose another set, and replaced, the share where the
plausibility filter refused an expert.

*Lag* is the version being updated minus the one that sampled. Lag 0 shows numerics alone, older ones staleness as well.
Letters: `N` sampled tokens, `L` MoE layers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from stretto.trainer.corrections import LARGEST_LOG_RATIO, SMALLEST_LOG_RATIO

ALL = "all"
"""Name of the bucket that holds every token, beside one for each lag ("0", "1", …)."""


@dataclass(frozen=True)
class Divergence:
    """See the top of the file."""

    tokens: int
    k1: float
    k3: float
    mean_dlogp: float
    p99_dlogp: float
    p999_dlogp: float
    max_dlogp: float
    mean_dp: float
    f2: float
    correlation: float | None


def divergence(trainer_N: Tensor, engine_N: Tensor) -> Divergence:
    """Of log-probs of the same sampled tokens, float [N], N > 0; differences are clamped as in `corrections`."""
    trainer_N, engine_N = trainer_N.double(), engine_N.double()
    d_N = (trainer_N - engine_N).clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO)
    size_N = d_N.abs().sort().values
    p_N, q_N = trainer_N.exp(), engine_N.exp()
    return Divergence(
        tokens=len(d_N),
        k1=float(-d_N.mean()),
        k3=float((torch.expm1(d_N) - d_N).mean()),
        mean_dlogp=float(size_N.mean()),
        p99_dlogp=_quantile(size_N, 0.99),
        p999_dlogp=_quantile(size_N, 0.999),
        max_dlogp=float(size_N[-1]),
        mean_dp=float((p_N - q_N).abs().mean()),
        f2=float((size_N > math.log(2)).double().mean()),
        correlation=_correlation(p_N, q_N),
    )


@dataclass(frozen=True)
class Rows:
    """What became of the replayed rows behind some tokens, bool [N, L] each; `differs` and `replaced` only where
    `known`."""

    known_NL: Tensor
    differs_NL: Tensor
    replaced_NL: Tensor

    def of(self, chosen_N: Tensor) -> Rows:
        return Rows(self.known_NL[chosen_N], self.differs_NL[chosen_N], self.replaced_NL[chosen_N])

    def shares(self) -> dict[str, float | None]:
        known = int(self.known_NL.sum())
        return {
            "coverage": known / self.known_NL.numel() if self.known_NL.numel() else None,
            "disagreement": int(self.differs_NL.sum()) / known if known else None,
            "replaced": int(self.replaced_NL.sum()) / known if known else None,
        }


NOT_REPLAYED: dict[str, float | None] = {"coverage": None, "disagreement": None, "replaced": None}


class Agreement:
    """Collects the tokens of a step over its micro-batches; what it keeps is a few numbers a token."""

    def __init__(self) -> None:
        self._trainer: list[Tensor] = []
        self._engine: list[Tensor] = []
        self._version: list[Tensor] = []
        self._rows: list[Rows] = []

    def add(self, trainer_N: Tensor, engine_N: Tensor, version_N: Tensor, rows: Rows | None) -> None:
        """Log-probs, the versions that sampled, and the rows that gave the log-probs: None without replay, then for all
        micro-batches."""
        self._trainer.append(trainer_N.detach())
        self._engine.append(engine_N)
        self._version.append(version_N)
        if rows is not None:
            self._rows.append(rows)

    def buckets(self, version: int) -> dict[str, Bucket]:
        """By lag behind `version`, and `ALL`; empty when there was no token."""
        if not sum(len(part) for part in self._version):
            return {}
        trainer_N, engine_N = torch.cat(self._trainer), torch.cat(self._engine)
        lag_N = version - torch.cat(self._version)
        rows = None
        if self._rows:
            assert len(self._rows) == len(self._version)
            rows = Rows(*(torch.cat([getattr(part, name) for part in self._rows]) for name in Rows.__annotations__))
        chosen = {ALL: torch.ones_like(lag_N, dtype=torch.bool)}
        chosen |= {str(lag): lag_N == lag for lag in sorted(set(lag_N.tolist()))}
        return {
            name: Bucket(divergence(trainer_N[chosen_N], engine_N[chosen_N]), rows and rows.of(chosen_N))
            for name, chosen_N in chosen.items()
        }


@dataclass(frozen=True)
class Bucket:
    """Tokens of one lag, or all."""

    divergence: Divergence
    rows: Rows | None

    def values(self) -> dict[str, float | int | None]:
        """One flat dict, for a metrics line."""
        return {**asdict(self.divergence), **(self.rows.shares() if self.rows else NOT_REPLAYED)}


def _quantile(sorted_N: Tensor, share: float) -> float:
    """The smallest value that at least `share` of all do not exceed: no interpolation between far outliers."""
    return float(sorted_N[max(0, math.ceil(share * len(sorted_N)) - 1)])


def _correlation(p_N: Tensor, q_N: Tensor) -> float | None:
    p_N, q_N = p_N - p_N.mean(), q_N - q_N.mean()
    scale = float(p_N.norm() * q_N.norm())
    return float(p_N @ q_N) / scale if scale > 0 else None
