"""Pins: checkpoints round-trip to the byte, appear whole or not at all, and every misfit is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.model import checkpoint
from stretto.model.checkpoint import CheckpointError
from stretto.model.spec import ModelSpec

torch.set_num_threads(1)
SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_size": 6}
SPECS = {
    "moe": ModelSpec(model_type="qwen3_moe", **SIZES, **EXPERTS, tie_embeddings=True),
    "part_dense": ModelSpec(model_type="qwen3_moe", **SIZES, **EXPERTS, dense_layers=(0,)),
    "qwen3": ModelSpec(model_type="qwen3", **SIZES, tie_embeddings=True),
    "llama": ModelSpec(model_type="llama", **SIZES),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint.save(checkpoint.random_init(SPECS["moe"], seed=0), tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint; None removes one."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", SPECS)
def test_saving_what_was_loaded_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    model = checkpoint.random_init(SPECS[name], seed=1)
    checkpoint.save(model, tmp_path / "a")
    again = checkpoint.load(tmp_path / "a")
    assert again.spec == model.spec
    for (key, one), (_, two) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(one, two), key  # random_init gives bf16 values, so that nothing was rounded
    checkpoint.save(again, tmp_path / "b")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_masters_are_rounded_to_nearest_even(tmp_path: Path) -> None:
    model = checkpoint.random_init(SPECS["moe"], seed=2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 1e-3)
    checkpoint.save(model, tmp_path / "m")
    for name, tensor in checkpoint.named_tensors(checkpoint.load(tmp_path / "m")).items():
        assert torch.equal(tensor, checkpoint.named_tensors(model)[name].bfloat16().float()), name


def test_named_tensors_are_views_under_hugging_face_names() -> None:
    model = checkpoint.random_init(SPECS["moe"], seed=0)
    named = checkpoint.named_tensors(model)
    up = named["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert up.shape == (6, 16)
    up.fill_(7.0)
    assert (model.layers[1].mlp.experts.gate_up_proj[3, 6:] == 7.0).all()
    assert "lm_head.weight" not in named  # tied
    assert sum(tensor.numel() for tensor in named.values()) == sum(weight.numel() for weight in model.parameters())


def test_load_named_changes_the_network_in_place() -> None:
    source, target = (checkpoint.random_init(SPECS["part_dense"], seed=seed) for seed in (0, 1))
    pointers = [weight.data_ptr() for weight in target.parameters()]
    checkpoint.load_named(target, {k: v.bfloat16() for k, v in checkpoint.named_tensors(source).items()})
    assert pointers == [weight.data_ptr() for weight in target.parameters()]
    for one, two in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, two)


def test_two_seeds_differ_and_one_seed_repeats() -> None:
    one, two, three = (checkpoint.random_init(SPECS["moe"], seed=seed).head_weight for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, three)


def test_a_tied_head_that_was_written_out_is_accepted(folder: Path) -> None:
    rewrite(folder, **{"lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()})
    checkpoint.load(folder)


def test_the_tokenizer_travels(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not the tokenizer's")
    checkpoint.save(checkpoint.load(folder), tmp_path / "next", tokenizer_from=folder)
    assert {path.name for path in (tmp_path / "next").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_a_failed_save_leaves_the_old_checkpoint_and_no_litter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(checkpoint.random_init(SPECS["moe"], seed=5), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_saving_over_a_checkpoint_replaces_it_whole(folder: Path) -> None:
    (folder / "stale.bin").write_text("left over")
    model = checkpoint.random_init(SPECS["moe"], seed=5)
    checkpoint.save(model, folder)
    assert torch.equal(checkpoint.load(folder).head_weight, model.head_weight)
    assert not (folder / "stale.bin").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_misfits_are_sentences(folder: Path, tmp_path: Path) -> None:
    def complaint() -> str:
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(folder)
        assert "\n" not in str(error.value)
        return str(error.value)

    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        checkpoint.load(tmp_path / "nowhere")
    norm = "model.layers.0.input_layernorm.weight"
    whole = load_file(folder / "model.safetensors")[norm]
    rewrite(folder, **{norm: None})
    assert f"missing tensor {norm}" in complaint()
    rewrite(folder, **{norm: whole[:7].clone()})
    assert f"tensor {norm} has shape [7], but its config says [16]" in complaint()
    rewrite(folder, **{norm: whole.to(torch.int8)})
    assert "quantised" in complaint()
    rewrite(folder, **{norm: whole, "model.layers.0.mlp.shared_expert.weight": whole.clone()})
    assert "tensor model.layers.0.mlp.shared_expert.weight does not belong" in complaint()
    (folder / "model.safetensors").write_bytes(b"\x10\x00")
    assert "can't be read" in complaint()
    (folder / "model.safetensors").unlink()
    assert "neither" in complaint()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {norm: "model-1.safetensors"}}))
    assert "model-1.safetensors, which is not in the folder" in complaint()
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "is not a safetensors index" in complaint()
    (folder / "config.json").write_text("[1, 2]")
    assert "config.json holds a list" in complaint()
    (folder / "config.json").write_bytes(b"\xff\xfe")
    assert "config.json is not valid JSON" in complaint()
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    assert "model_type 'mamba' is not supported" in complaint()
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in complaint()
    (folder / "config.json").unlink()
    assert "has no config.json" in complaint()
