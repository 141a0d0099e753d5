"""Pins: a head is taught on the tokens that the policy samples, the network stays as it was, and guesses get better."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest
import torch

from stretto.config import ModelConfig
from stretto.midtrain import heads
from stretto.midtrain.demonstrator import Document
from stretto.midtrain.heads import train_heads
from stretto.model import checkpoint
from stretto.model.mtp import Distilled

from ..engine.conftest import SPEC

torch.set_num_threads(1)


def batches(weight: float = 1.0):
    for seed in itertools.count():
        rng = random.Random(seed)
        yield [Document([rng.randrange(20) for _ in range(30)], [0.1] * 8 + [weight] * 22) for _ in range(4)]


def test_a_head_learns_and_the_network_stays() -> None:
    model = checkpoint.random_init(SPEC, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[Distilled] = []
    taught = train_heads(model, batches(), 60, lr=1e-2, guesses=2, watch=lambda step, found: seen.append(found))
    assert len(seen) == 60 and taught.spec.mtp_layers == 1
    assert seen[-1].loss.item() < 0.5 * seen[0].loss.item()
    assert min(seen[-1].overlaps) > max(seen[0].overlaps)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_documents_without_a_token_of_full_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="no token is wanted"):
        train_heads(checkpoint.random_init(SPEC, 0), batches(weight=0.5), 1)


def test_teaching_goes_on_where_it_was_saved_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "SAVE_SECONDS", 0.0)
    model, whole = checkpoint.random_init(SPEC, 0), []
    train_heads(model, batches(), 12, watch=lambda step, found: whole.append(float(found.loss.detach())))
    state, seen = tmp_path / "heads.pt", []

    def stop(step: int, found: Distilled) -> None:
        seen.append(float(found.loss.detach()))
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_heads(model, batches(), 12, watch=stop, state_file=state)
    train_heads(
        model, batches(), 12, watch=lambda step, found: seen.append(float(found.loss.detach())), state_file=state
    )
    assert seen == [*whole[:7], *whole[6:]]  # the step that was not saved is made again
    with pytest.raises(ValueError, match="another network"):
        train_heads(checkpoint.random_init(SPEC, 1), batches(), 12, state_file=state)


def test_a_head_is_written_beside_its_model(tmp_path: Path) -> None:
    folder = ModelConfig().folder
    heads.main(folder, tmp_path / "mtp", tmp_path / "work", steps=2)
    assert (tmp_path / "work" / "heads.jsonl").read_text().count("agreements") == 1
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(folder / name, tmp_path / name)
    assert checkpoint.load_heads(tmp_path) is not None
