"""Slow tools for experiments: the times have the quantiles asked for, follow from the seed, and are really slept."""

from __future__ import annotations

import time
from itertools import islice

import pytest

from stretto.config import ConfigError, SandboxConfig, parse
from stretto.sandbox.latency import latency
from stretto.sandbox.pool import BoxPool

SLOW = SandboxConfig(latency_p50=0.2, latency_p99=6.0, warm=0)


def test_quantiles_and_seed():
    draws = latency(SLOW, 1)
    again = latency(SLOW, 1)
    assert draws is not None and again is not None
    values = list(islice(draws, 20_000))
    assert values == list(islice(again, 20_000))
    values.sort()
    assert values[10_000] == pytest.approx(0.2, rel=0.1) and values[19_800] == pytest.approx(6.0, rel=0.25)
    assert latency(SandboxConfig(), 1) is None


@pytest.mark.parametrize(
    "sandbox", [{"latency_p50": 1.0}, {"latency_p99": 1.0}, {"latency_p50": 2.0, "latency_p99": 1}]
)
def test_impossible_quantiles_are_refused(sandbox):
    with pytest.raises(ConfigError, match="latency_p50"):
        parse({"sandbox": sandbox})


async def test_a_box_sleeps():
    pool = BoxPool(SLOW)
    await pool.start()
    try:
        box = await pool.box({"a.py": "x = 1\n"})
        began = time.monotonic()
        await box.sleep(0.3)
        assert time.monotonic() - began >= 0.3
        assert await box.read("a.py") == b"x = 1\n"
    finally:
        await pool.close()
