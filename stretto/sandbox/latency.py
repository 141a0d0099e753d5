"""Tools that take their time, for experiments: before a call the box sleeps, mostly briefly, now and then for long.

Times are lognormal, given by two quantiles, and follow from the rollout's seed: every run of an experiment waits for
the same ones. It is a real sleep of the box's first process (`Box.sleep`): everything that waits has to be there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from stretto.config import SandboxConfig

Z99 = 2.3263478740408408
"""The standard normal's 99th percentile."""


def latency(config: SandboxConfig, seed: int | None) -> Iterator[float] | None:
    """Seconds for one tool call after the other of the rollout with this seed; None when it is off."""
    return _draws(config, random.Random(seed)) if config.latency_p50 else None


def _draws(config: SandboxConfig, draw: random.Random) -> Iterator[float]:
    median, sigma = math.log(config.latency_p50), math.log(config.latency_p99 / config.latency_p50) / Z99
    while True:
        yield draw.lognormvariate(median, sigma)
