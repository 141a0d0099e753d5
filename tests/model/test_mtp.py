"""Pins: heads round-trip under DeepSeek-V3's names and leave the network's files alone; a head's guess is what its
definition says of each sequence alone; distillation has its minimum at the network's own distribution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.model import checkpoint, mtp
from stretto.model.attention import PackedCausal
from stretto.model.checkpoint import CheckpointError
from stretto.model.spec import load_spec
from stretto.model.transformer import Transformer

from .test_checkpoint import SPECS
from .test_deepseek import SPEC as DEEPSEEK

ALL = SPECS | {"deepseek": DEEPSEEK}


def network(name: str = "moe", seed: int = 0) -> Transformer:
    return checkpoint.random_init(replace(ALL[name], initializer_range=0.3), seed)


@pytest.mark.parametrize("name", ALL)
def test_heads_round_trip_and_the_network_does_not_notice(name: str, tmp_path: Path) -> None:
    model = network(name)
    heads = mtp.fresh(model, depth=2)
    checkpoint.save(model, tmp_path / "with", heads=heads, dtype=torch.float32)
    checkpoint.save(model, tmp_path / "without", dtype=torch.float32)
    first = model.spec.layers
    names = set(load_file(tmp_path / "with" / "model.safetensors"))
    for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "input_layernorm"):
        assert f"model.layers.{first + 1}.{part}.weight" in names
    assert load_spec(tmp_path / "with").mtp_layers == 2
    again = checkpoint.load_heads(tmp_path / "with")
    assert again is not None
    for (key, one), (_, two) in zip(heads.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(one, two), key
    checkpoint.save(checkpoint.load(tmp_path / "with"), tmp_path / "again", dtype=torch.float32)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    assert checkpoint.load_heads(tmp_path / "without") is None


def test_heads_beside_a_network_are_found_and_its_files_stay(tmp_path: Path) -> None:
    model, heads = network(), mtp.fresh(network())
    checkpoint.save(model, tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    checkpoint.save_heads(heads, tmp_path / "m" / "mtp")
    found = checkpoint.load_heads(tmp_path / "m")
    assert found is not None and found.spec.mtp_layers == 1
    for (key, one), (_, two) in zip(heads.state_dict().items(), found.state_dict().items(), strict=True):
        assert torch.equal(one.bfloat16().float(), two), key
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir() if path.is_file()} == before
    assert checkpoint.load(tmp_path / "m").spec.mtp_layers == 0
    checkpoint.save_heads(mtp.fresh(network("qwen3")), tmp_path / "m" / "mtp")
    with pytest.raises(CheckpointError, match="heads of another network"):
        checkpoint.load_heads(tmp_path / "m")


def test_agreement_is_how_often_one_uniform_number_draws_the_same_of_both() -> None:
    generator = torch.Generator().manual_seed(0)
    p_NV, q_NV = (torch.softmax(2 * torch.randn(3, 7, generator=generator), -1) for _ in range(2))
    uniform_U = torch.rand(200_000, 1, dtype=torch.float64, generator=generator)
    for p, q, found in zip(p_NV, q_NV, mtp.agreement(p_NV, q_NV), strict=True):
        one, other = ((x.double().cumsum(0) <= uniform_U).sum(1) for x in (p, q))
        assert float((one == other).double().mean()) == pytest.approx(float(found), abs=5e-3)
        assert found <= torch.minimum(p, q).sum() + 1e-6
    torch.testing.assert_close(mtp.agreement(p_NV, p_NV), torch.ones(3))


def test_copies_of_embedding_and_head_are_not_read_and_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = network()
    checkpoint.save(model, tmp_path / "m", heads=mtp.fresh(model))
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors |= {
        "model.layers.2.embed_tokens.weight": torch.zeros(2),
        "model.layers.2.shared_head.head.weight": torch.zeros(2),
    }
    save_file(tensors, file)
    assert checkpoint.load_heads(tmp_path / "m") is not None
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"missing tensor model\.layers\.2\.eh_proj\.weight"):
        checkpoint.load_heads(tmp_path / "m")


@pytest.mark.parametrize("frozen", [True, False])
def test_only_what_should_learn_gets_a_gradient(frozen: bool) -> None:
    model, ids_T = network(), torch.arange(12)
    heads = mtp.fresh(model)
    out = model(ids_T, torch.arange(12) % 7, PackedCausal([7, 5]))
    mtp.mtp_loss(model, heads, out.hidden_TD, ids_T, [7, 5], steps=2, frozen=frozen).loss.backward()
    assert all((p.grad is None) == frozen for p in model.parameters())
    assert all(p.grad is not None for p in heads.parameters())


def test_sequences_do_not_see_each_other_and_wanted_tokens_alone_count() -> None:
    model, ids_T = network(), torch.randint(60, (14,), generator=torch.Generator().manual_seed(0))
    heads = mtp.fresh(model)

    @torch.no_grad()
    def loss(ids_T: torch.Tensor, lengths: list[int], wanted_T: torch.Tensor | None = None) -> float:
        positions_T = torch.cat([torch.arange(n) for n in lengths])
        hidden_TD = model(ids_T, positions_T, PackedCausal(lengths)).hidden_TD
        return float(mtp.mtp_loss(model, heads, hidden_TD, ids_T, lengths, steps=2, wanted_T=wanted_T).loss)

    wanted_T = torch.arange(14) < 9
    assert loss(ids_T, [9, 5], wanted_T) == pytest.approx(loss(ids_T[:9], [9]), rel=1e-5)
    with pytest.raises(ValueError, match="no token is wanted"):
        loss(ids_T, [9, 5], torch.zeros(14, dtype=torch.bool))


def test_distillation_teaches_the_head_what_the_network_says_next() -> None:
    model, ids_T = network(), torch.randint(60, (200,), generator=torch.Generator().manual_seed(0))
    heads = mtp.fresh(model)
    with torch.no_grad():
        hidden_TD = model(ids_T, torch.arange(200), PackedCausal([200])).hidden_TD
    adam = torch.optim.Adam(heads.parameters(), lr=1e-2)
    seen = []
    for _ in range(60):
        found = mtp.mtp_loss(model, heads, hidden_TD, ids_T, [200])
        adam.zero_grad()
        found.loss.backward()
        adam.step()
        seen.append((float(found.loss.detach()), found.overlaps[0]))
    assert seen[-1][0] < 0.3 * seen[0][0] and seen[-1][0] > 0
    assert seen[0][1] < seen[-1][1] < 1
