"""Pins: our logits are those of transformers for random networks of the three families, from their files and ours."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from stretto.model import checkpoint
from stretto.model.attention import PackedCausal

torch.set_num_threads(1)
CONFIGS = {"qwen3_moe": Qwen3MoeConfig, "qwen3": Qwen3Config, "llama": LlamaConfig}


def random_network(family: str, seed: int) -> torch.nn.Module:
    """A transformers network of random small sizes, with weights large enough that every part matters."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2])
    sizes = {
        "vocab_size": rng.randint(50, 130),
        "hidden_size": 8 * rng.randint(3, 8),
        "num_hidden_layers": 4,
        "num_attention_heads": kv_heads * rng.choice([1, 2, 4]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 16, 20]),
        "intermediate_size": rng.randint(20, 90),
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 5e5, 1e6])},
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
    }
    if family == "qwen3_moe":
        experts = rng.randint(3, 12)
        sizes |= {
            "num_experts": experts,
            "num_experts_per_tok": rng.randint(1, 3),
            "moe_intermediate_size": 4 * rng.randint(2, 10),  # their grouped matmul wants 16-byte rows
            "norm_topk_prob": rng.random() < 0.5,
            "decoder_sparse_step": rng.choice([1, 2]),
            "mlp_only_layers": rng.choice([[], [0], [1, 3]]),
        }
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(CONFIGS[family](**sizes)).float().eval()
    for name, weight in network.named_parameters():
        weight.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return network


def ours(folder: Path, ids_T: torch.Tensor) -> torch.Tensor:
    model = checkpoint.load(folder)
    with torch.no_grad():
        out = model(ids_T, torch.arange(len(ids_T)), PackedCausal([len(ids_T)]))
        return model.logits(out.hidden_TD)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("seed", range(6))
def test_logits_are_those_of_transformers(family: str, seed: int, tmp_path: Path) -> None:
    theirs = random_network(family, seed)
    ids_T = torch.randint(theirs.config.vocab_size, (37,), generator=torch.Generator().manual_seed(seed))
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(ids_T[None]).logits[0]
    assert expected.std() > 0.3  # the comparison means something
    torch.testing.assert_close(ours(tmp_path / "theirs", ids_T), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_we_save_loads_in_transformers_unchanged(family: str, tmp_path: Path) -> None:
    random_network(family, 7).save_pretrained(tmp_path / "theirs")
    checkpoint.save(checkpoint.load(tmp_path / "theirs"), tmp_path / "ours")
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids_T = torch.arange(30) % theirs.config.vocab_size
    with torch.no_grad():
        expected = theirs(ids_T[None]).logits[0]
    torch.testing.assert_close(ours(tmp_path / "ours", ids_T), expected, atol=1e-4, rtol=1e-4)


def test_a_file_of_several_shards_loads(tmp_path: Path) -> None:
    theirs = random_network("qwen3_moe", 3)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    ids_T = torch.arange(20)
    assert torch.equal(ours(tmp_path / "sharded", ids_T), ours(tmp_path / "whole", ids_T))
