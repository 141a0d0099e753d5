"""Pins: every family is the network that transformers has, the numbers reach the JSON, and a difference is seen."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stretto.bench import parity
from stretto.cli import main
from stretto.model import checkpoint

torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint.save(parity.random_network(parity.RANDOM["qwen3"], seed=1), tmp_path / "model")
    return tmp_path / "model"


def test_all_families_and_a_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "parity", str(folder), "--json", str(tmp_path / "parity.json")]) == 0
    found = json.loads((tmp_path / "parity.json").read_text())
    assert [row["family"] for row in found["rows"]] == ["qwen3", *parity.RANDOM]
    checks = found["checks"]
    assert checks.keys() == {"max_abs_dlogit", "greedy_equal", "roundtrip_equal"}
    assert checks["greedy_equal"] is checks["roundtrip_equal"] is True
    assert checks["max_abs_dlogit"] < 1e-4
    assert all(row["max_abs_logit"] > 1 for row in found["rows"])  # the comparison means something
    out = capsys.readouterr().out
    assert "random deepseek_v3" in out and "random kimi_k2" in out and "All hold." in out


def test_a_difference_is_seen(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(path: Path) -> checkpoint.Transformer:
        model = load(path)
        checkpoint.named_tensors(model)["model.layers.1.mlp.down_proj.weight"].mul_(1.5)
        return model

    load = checkpoint.load
    monkeypatch.setattr(parity.checkpoint, "load", changed)
    row = parity.compare(folder, "changed", tmp_path / "scratch")
    assert row.max_abs_dlogit > 1e-2 and not row.greedy_equal and not row.saved_equal and not row.holds
    assert row.to_theirs_equal and not row.from_theirs_equal
    assert replace(row, max_abs_dlogit=0.0, greedy_equal=True, saved_equal=True, from_theirs_equal=True).holds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_checkpoint_of_another_dtype_comes_back_byte_for_byte(dtype: torch.dtype, tmp_path: Path) -> None:
    model = parity.random_network(parity.RANDOM["qwen3_moe"], seed=1)
    for tensor in checkpoint.named_tensors(model).values():
        tensor.add_(torch.rand(tensor.shape), alpha=1e-3)  # no longer what bf16 can hold
    checkpoint.save(model, tmp_path / "model", dtype=dtype)
    row = parity.compare(tmp_path / "model", "given", tmp_path / "scratch")
    assert row.holds and row.roundtrip_equal
    assert len(list((tmp_path / "scratch" / "a").glob("*.safetensors"))) > 1
    assert len(list((tmp_path / "scratch" / "b").glob("*.safetensors"))) > 1


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench", "parity"]) == 1
    assert "transformers, which is not installed: pip install" in capsys.readouterr().err
