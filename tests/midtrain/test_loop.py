"""Pins: mid-training resumes exactly, and learns."""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path

import torch

from stretto.config import ModelConfig
from stretto.harness.chat import Chat
from stretto.midtrain.loop import Phase, learning_rate, train_phase
from stretto.midtrain.nano import SKILL, SPEC
from stretto.midtrain.stream import Mixture, Stream
from stretto.model import checkpoint
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer

PHASE = Phase("test", Mixture("careful", code=0.1, copying=0.3), tokens=24_000, lr=3e-3, stable=0.5, copy_until=12_000)


def run(folder: Path, phase: Phase, model: Transformer | None = None) -> Transformer:
    torch.set_num_threads(1)
    spec = ModelSpec.from_hf(SPEC | {"hidden_size": 32, "num_hidden_layers": 2})
    model = model or checkpoint.random_init(spec, 0)
    folder.mkdir(exist_ok=True)
    stream = Stream(phase.mixture, Chat(ModelConfig().folder), 0)
    train_phase(model, phase, stream, folder / "state.pt", folder / "log.jsonl")
    return model


def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, monkeypatch) -> None:
    whole = run(tmp_path / "whole", PHASE)

    class Killed(Exception):
        pass

    calls = 0
    original = Stream.batch

    def batch(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise Killed
        return original(self, *arguments)

    monkeypatch.setattr("stretto.midtrain.loop.SAVE_SECONDS", 0.0)
    monkeypatch.setattr(Stream, "batch", batch)
    with contextlib.suppress(Killed):
        run(tmp_path / "parts", PHASE)
    resumed = run(tmp_path / "parts", PHASE)
    assert calls > 9
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_loss_falls(tmp_path: Path) -> None:
    phase = replace(PHASE, tokens=240_000, copy_until=0)
    run(tmp_path / "run", phase)
    (line,) = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert line["loss"] < 0.6 * math.log(SPEC["vocab_size"])


def test_schedule() -> None:
    rates = [learning_rate(SKILL, 1000, seen) for seen in range(0, SKILL.tokens, SKILL.tokens // 50)]
    assert rates[0] == SKILL.lr and rates == sorted(rates, reverse=True)
    assert learning_rate(SKILL, 0, 0) == SKILL.lr / SKILL.warmup
    assert abs(learning_rate(SKILL, 1000, SKILL.tokens) - SKILL.final * SKILL.lr) < 1e-9
