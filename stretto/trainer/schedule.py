"""Learning rate as a function of the version being updated, so that a resumed run needs no counter of its own."""

from __future__ import annotations


def learning_rate(version: int, peak: float, warmup_steps: int) -> float:
    """Linear warm-up over the first `warmup_steps` versions (the first already gets a share), constant afterwards."""
    if version >= warmup_steps:
        return peak
    return peak * (version + 1) / warmup_steps
