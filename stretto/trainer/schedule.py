"""Learning rate as a function of the version being updated, so that a resumed run needs no counter of its own."""

from __future__ import annotations

from stretto.config import TrainerConfig

FLOOR = 0.05
"""Share of the peak that the decay ends at."""


def learning_rate(version: int, settings: TrainerConfig) -> float:
    """Warm-up, stable, decay (arXiv 2404.06395): linear warm-up over the first `warmup_steps` versions (the first
    already gets a share), constant, then linear decay over the last `decay_steps` before `steps`. Later versions, of a
    run that goes on beyond its `steps`, stay at the floor."""
    rise = min(1.0, (version + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    left = settings.steps - version
    fall = max(FLOOR, min(1.0, left / settings.decay_steps)) if settings.decay_steps else 1.0
    return settings.lr * min(rise, fall)
