"""Pins: a config is read in the dialects of transformers 4 and 5, and whatever we can't honour is named."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.model.spec import ModelSpec

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_config_of_qwen3_30b_a3b() -> None:
    spec = ModelSpec.from_hf(MOE)
    assert (spec.experts, spec.experts_per_token, spec.expert_size, spec.head_dim) == (128, 8, 768, 128)
    assert spec.rope_theta == 1e6 and spec.norm_topk_prob and spec.qk_norm
    assert spec.route_shape == (48, 8)


def test_both_dialects_give_the_same_network() -> None:
    five = {k: v for k, v in MOE.items() if k not in ("rope_theta", "rope_scaling", "num_experts", "torch_dtype")}
    five |= {
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "num_local_experts": 128,
        "dtype": "bfloat16",
    }
    assert ModelSpec.from_hf(five) == ModelSpec.from_hf(MOE)


@pytest.mark.parametrize(
    "change", [{}, {"mlp_only_layers": [0, 3]}, {"eos_token_id": [1, 2]}, {"decoder_sparse_step": 2}]
)
def test_to_hf_and_back(change: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf(MOE | change)
    assert ModelSpec.from_hf(spec.to_hf()) == spec


def test_RPL_2_dense_layers_are_not_counted_in_routes() -> None:
    spec = ModelSpec.from_hf(MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert spec.moe_layers == (1, 5)
    assert spec.route_shape == (2, 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("use_sliding_window", True),
        ("mlp_bias", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("n_shared_experts", 1),
        ("model_type", "deepseek_v2"),
        ("hidden_size", "2048"),
        ("num_hidden_layers", -1),
        ("num_key_value_heads", 0),
        ("vocab_size", 1.5),
        ("num_experts_per_tok", 129),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        ("rope_theta", 0),
        ("rope_theta", "10000"),
        ("rms_norm_eps", None),
        ("rms_norm_eps", "1e-6"),
        ("tie_word_embeddings", "true"),
        ("attention_bias", None),
        ("norm_topk_prob", 1),
        ("decoder_sparse_step", 0),
    ],
)
def test_what_is_not_supported_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ModelSpec.from_hf(MOE | {field: value})


@pytest.mark.parametrize(
    "field", ["model_type", "vocab_size", "num_hidden_layers", "num_experts", "moe_intermediate_size"]
)
def test_what_is_missing_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ModelSpec.from_hf({k: v for k, v in MOE.items() if k != field})


def test_the_config_of_smollm2() -> None:
    """As it is published, with the fields that other libraries left in it."""
    spec = ModelSpec.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "transformers_version": "4.42.3",
            "use_cache": True,
            "vocab_size": 49152,
        }
    )
    assert (spec.head_dim, spec.kv_heads, spec.rope_theta, spec.tie_embeddings) == (64, 3, 1e5, True)
