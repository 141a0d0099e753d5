"""Pins the level `exact`: what the engine says of a token equals what the trainer computes, to the bit, whatever was in
the batch, however a prompt was cut, for every family; and a machine or arithmetic that can't hold it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stretto.bench.schedules import exactness
from stretto.config import EngineConfig
from stretto.engine.server import serve
from stretto.model import selftest
from stretto.model.numerics import Level, Numerics
from stretto.model.spec import ModelSpec

from ..model.test_deepseek import SPEC as DEEPSEEK
from .conftest import SPEC

LLAMA = replace(SPEC, model_type="llama", experts=0, experts_per_token=0, expert_size=0, dense_layers=())
QWEN3 = replace(LLAMA, model_type="qwen3", attention_bias=True)
FAMILIES = {"qwen3_moe": SPEC, "deepseek_v3": DEEPSEEK, "llama": LLAMA, "qwen3": QWEN3}
EXACT, EXACT_BF16 = Numerics(exact=True), Numerics(exact=True, rounding=True)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("numerics", [EXACT, EXACT_BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_say_the_same_to_the_bit(family: str, numerics: Numerics) -> None:
    agreement = exactness(FAMILIES[family], schedules=8, seed=1, numerics=numerics)
    assert agreement.tokens > 50
    assert agreement.max_abs_dlogp == 0.0 and agreement.rows_differing == 0


def test_whatever_the_number_of_threads(threads: int) -> None:
    assert exactness(SPEC, schedules=1, seed=2).max_abs_dlogp == 0.0


def test_without_it_they_differ() -> None:
    assert exactness(SPEC, schedules=8, seed=1, numerics=Numerics()).max_abs_dlogp > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_test_passes_here(family: str) -> None:
    selftest.check(FAMILIES[family], EXACT)


def test_the_self_test_refuses_arithmetic_that_depends_on_the_batch() -> None:
    with pytest.raises(selftest.NotExact, match="use ordered"):
        selftest.check(SPEC, Numerics())


def test_an_engine_that_cannot_hold_the_level_does_not_start(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: ModelSpec, numerics: Numerics) -> None:
        raise selftest.NotExact("not on this machine: use ordered")

    monkeypatch.setattr(selftest, "check", broken)
    with pytest.raises(SystemExit, match="use ordered"):
        serve(nano, "e1", "127.0.0.1", 0, EngineConfig(), 0, None, 0, Level.EXACT)
