"""`stretto weights …` as a user types it, and anchors and exports as transformers loads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.cli import main
from stretto.config import ModelConfig
from stretto.trainer.publishing import companion_files
from stretto.weights import writer as module
from stretto.weights.publisher import Publisher
from stretto.weights.readers import Lease
from stretto.weights.store import Store
from stretto.weights.tensorfile import unpack

NANO = ModelConfig(path="nano").folder


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with nano as version 0, in several files, and two more versions."""
    monkeypatch.setattr(module, "ANCHOR_BYTES", 500_000)
    tensors, _ = unpack((NANO / "model.safetensors").read_bytes())
    publisher = Publisher(Store(tmp_path / "store"), "run-0", companion_files(NANO))
    for version in range(3):
        publisher.publish(version, tensors)
        tensors = {name: array + np.uint16(version == 0) for name, array in tensors.items()}
    return str(tmp_path / "store")


def same(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.bfloat16)
    for (name, found), (_, was) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        expected = was.view(torch.int16) + (tensors is not None and bool(tensors))
        assert torch.equal(found.view(torch.int16), expected.to(torch.int16)), name


def test_anchors_and_exports_load_in_transformers(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (anchor,) = (Path(url) / "weights" / "run-0" / "anchors").iterdir()
    assert len(list(anchor.glob("*.safetensors"))) > 3 and (anchor / "model.safetensors.index.json").exists()
    same(anchor, {})
    out = tmp_path / "out"
    assert main(["weights", "export", url, "--version", "1", str(out)]) == 0
    assert capsys.readouterr().out == f"version 1 of chain run-0 is in {out}\n"
    moved, _ = unpack((out / "model.safetensors").read_bytes())
    same(out, moved)
    assert main(["weights", "export", url, "--version", "1", str(out)]) == 1
    assert "is not empty: give a new folder" in capsys.readouterr().err
    assert main(["weights", "export", url, "--version", "9", str(tmp_path / "more")]) == 1
    assert "version 9 cannot be rebuilt any more; available are 0 to 2" in capsys.readouterr().err


def test_verify_and_inspect(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Lease(Store(url), "run-0", "tokyo").renew(serves=1, needs=0)
    assert main(["weights", "inspect", url]) == 0
    out = capsys.readouterr().out
    assert "anchor" in out and "delta" in out and "reader tokyo: serves version 1, heard of 0 s ago" in out
    assert main(["weights", "verify", url]) == 0 and "every version is intact" in capsys.readouterr().out
    (key,) = (key for key in Store(url).list() if "/deltas/000002" in key)
    data = bytearray(Store(url).get(key))
    data[-1] ^= 1
    Store(url).put(key, bytes(data))
    assert main(["weights", "verify", url, "--version", "1"]) == 0
    assert "version 1 is intact" in capsys.readouterr().out
    assert main(["weights", "verify", url, "--version", "2"]) == 1
    assert f"version 2: object {key} in {url} is damaged" in capsys.readouterr().out
    assert main(["weights", "verify", url, "--version", "7"]) == 1
    assert "version 7 cannot be rebuilt any more" in capsys.readouterr().err


def test_gc_says_what_it_does(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Store(url).put("weights/run-0/deltas/000000-from-000000-x/0", b"")
    tensors, _ = unpack((NANO / "model.safetensors").read_bytes())
    moved = {name: array + np.uint16(1) for name, array in tensors.items()}
    publisher = Publisher.go_on(Store(url), "run-0", {}, moved, anchor_every=1)
    lease = Lease(Store(url), "run-0", "tokyo")
    lease.renew(serves=0, needs=0)
    for version in range(3, 6):
        publisher.publish(version, moved)
    assert main(["weights", "gc", url, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "run-0: 0 objects would be deleted; versions from 0 on are kept" in out
    assert "older ones are kept for reader tokyo: serves version 0" in out
    lease.end()
    assert main(["weights", "gc", url]) == 0
    assert "objects deleted; versions from 4 on are kept" in capsys.readouterr().out
    assert main(["weights", "verify", url]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["export", "."], "give export, and only export, one folder"),
        (["verify", ".", "out"], "give export, and only export, one folder"),
        (["gc", ".", "--version", "1"], "--version goes with verify and export"),
        (["verify", ".", "--dry-run"], "--dry-run goes with gc"),
        (["gc", ".", "--verify"], "--verify goes with inspect"),
        (["inspect", "nowhere"], "nowhere holds no chain of weights: there is no such folder"),
        (["inspect", "."], ". holds no chain of weights"),
    ],
)
def test_wrong_usage_is_a_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["weights", *words]) == 1
    assert sentence in capsys.readouterr().err
