"""`stretto bench loop`: what its checks say about given runs, that a wider model is the same function, and, with two
real runs of one step each, that all of it goes through."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stretto.bench import loop as bench
from stretto.bench.loop import ASYNCHRONOUS, SETTINGS, SYNCHRONOUS, UNCORRECTED, Row, loop, summary
from stretto.bench.wider import widen
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal

NANO = Path(str(resources.files("stretto") / "assets" / "nano"))


def rows(**changes) -> list[Row]:
    """Runs in which everything holds: asynchrony saves two thirds under latency; `changes` by setting's name."""
    found = []
    for latency in (True, False):
        for setting in (*SETTINGS, UNCORRECTED):
            row = Row(
                setting=setting.name,
                bound=setting.bound,
                latency=latency,
                seed=0,
                seconds=100.0 if setting.bound == 0 else 60.0 if setting.bound == 1 else 34.0 - setting.bound,
                samples=256,
                trainer_idle=0.9 if setting.bound == 0 else 0.08,
                engine_idle=0.5,
                staleness_mean=setting.bound / 2,
                staleness_max=setting.bound,
                solve_rate=0.5 if latency else None,
                solve_rate_se=0.02 if latency else None,
            )
            found.append(replace(row, **changes.get(setting.name, {})) if latency else row)
    return found


def missed(found: list[Row], trl: float = 1.0) -> list[str]:
    tree = summary(found, {"samples_per_s": trl}, steps=8, seeds=1)
    return [name for name, check in tree["checks"].items() if not check["ok"]]


def test_the_best_asynchronous_setting_is_judged():
    tree = summary(rows(), {"samples_per_s": 1.0}, steps=8, seeds=1)
    assert missed(rows()) == [] and tree["best"] == "asynchronous, 8"
    assert tree["checks"]["async_speedup"]["value"] == pytest.approx(100 / 26, abs=1e-3)
    assert tree["ratios"]["latency"]["one step ahead"] == pytest.approx(100 / 60, abs=1e-3)
    assert tree["checks"]["vs_trl_samples"]["value"] == pytest.approx(256 / 26, abs=1e-3)


def test_each_check_can_fail():
    slow = {setting.name: {"seconds": 50.0} for setting in ASYNCHRONOUS}
    assert missed(rows(**slow)) == ["async_speedup"]
    assert missed(rows(**{"asynchronous, 8": {"trainer_idle": 0.2}})) == ["trainer_idle"]
    assert missed(rows(**{"asynchronous, 4": {"solve_rate": 0.3}})) == ["solve_rate_gap"]
    assert missed(rows(**{"one step ahead": {"staleness_max": 2}})) == ["staleness_max_over_bound"]
    assert missed(rows(), trl=4.0) == ["vs_trl_samples"]
    assert summary(rows(), None, 8, 1)["checks"].keys().isdisjoint({"vs_trl_samples"})


def test_without_correction_is_told_apart_from_the_default():
    tree = summary(rows(**{UNCORRECTED.name: {"solve_rate": 0.1}}), None, steps=8, seeds=1)
    assert tree["uncorrected"]["default"] == 0.5 and tree["uncorrected"]["none"] == 0.1


@torch.no_grad()
def test_wider_experts_compute_the_same(tmp_path):
    narrow, wide = checkpoint.load(NANO), checkpoint.load(widen(NANO, tmp_path / "wide", 96))
    ids_T = torch.arange(40) * 7 % narrow.spec.vocab_size

    def logits(model):
        return model.logits(model(ids_T, torch.arange(40), PackedCausal([40])).hidden_TD)

    assert wide.spec.expert_size == 96
    torch.testing.assert_close(logits(wide), logits(narrow), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="wide"):
        widen(NANO, tmp_path / "narrow", 8)


def test_it_goes_through(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_trl", lambda *_: None)  # its own package; minutes on a busy machine
    monkeypatch.setattr(bench, "LATENCY", ["sandbox.latency_p50=0.01", "sandbox.latency_p99=0.05"])
    file, console = tmp_path / "numbers.json", Console(width=140, record=True)
    loop(1, 1, file, console, (SYNCHRONOUS, ASYNCHRONOUS[0]), held_out=4, expert_size=64)
    tree = json.loads(file.read_text())
    assert len(tree["rows"]) == 4 and all(row["seconds"] > 0 for row in tree["rows"])
    assert tree["checks"]["staleness_max_over_bound"]["value"] <= 0
    assert "asynchronous, 2" in console.export_text()
