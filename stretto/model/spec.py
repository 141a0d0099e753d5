"""What a network looks like: one frozen record, read from and written to a Hugging Face `config.json`.

Three families share it (`qwen3_moe`, `qwen3`, `llama`). A field we can't honour is a ValueError that names it; a field
we don't know is one too, because a silently ignored field is a silently different network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}

# Fields that may hold only these values, because another value would be another network.
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
}

# Fields that describe files, training or generation, never the network.
INERT = {
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_name_or_path",
    "_attn_implementation",
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "return_dict",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "router_aux_loss_coef",
    "sliding_window",
    "max_window_layers",
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of one network. `experts == 0` means every layer is dense."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int  # width of a dense MLP
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_positions: int = 32_768
    tie_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # width of one expert
    norm_topk_prob: bool = False
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"model_type {self.model_type!r} is not supported; Stretto runs {known}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads = {self.heads} is not a multiple of num_key_value_heads = {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary positions need an even one")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(
                f"num_experts_per_tok = {self.experts_per_token} is not between 1 and num_experts = {self.experts}"
            )

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each head of queries and keys; Llama doesn't."""
        return self.model_type != "llama"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts; their number is `L` of a routes array."""
        if not self.experts:
            return ()
        return tuple(
            layer
            for layer in range(self.layers)
            if layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0
        )

    @property
    def route_shape(self) -> tuple[int, int]:
        """`(L, K)` of the routes of this network; (0, 0) when it has no experts."""
        return (len(self.moe_layers), self.experts_per_token) if self.moe_layers else (0, 0)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelSpec:
        """Read a `config.json` of transformers 4 or 5. Raises ValueError naming what is missing or unsupported."""
        fields = _Fields(config)
        model_type = fields.need("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"model_type {model_type!r} is not supported; Stretto runs {', '.join(ARCHITECTURES)}")
        heads, width = fields.need("num_attention_heads"), fields.need("hidden_size")
        moe: dict[str, Any] = {}
        if model_type == "qwen3_moe":
            moe = {
                "experts": fields.need("num_experts", "num_local_experts"),
                "experts_per_token": fields.need("num_experts_per_tok"),
                "expert_size": fields.need("moe_intermediate_size"),
                "norm_topk_prob": fields.get("norm_topk_prob", False),
                "sparse_step": fields.get("decoder_sparse_step", 1),
                "dense_layers": tuple(fields.get("mlp_only_layers", None) or ()),
            }
        eos = fields.get("eos_token_id", None)
        spec = cls(
            model_type=model_type,
            vocab_size=fields.need("vocab_size"),
            hidden_size=width,
            layers=fields.need("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.get("num_key_value_heads", None) or heads,
            head_dim=fields.get("head_dim", None) or (128 if model_type == "qwen3" else width // heads),
            intermediate_size=fields.need("intermediate_size"),
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(fields),
            max_positions=fields.get("max_position_embeddings", 2048 if model_type == "llama" else 32_768),
            tie_embeddings=fields.get("tie_word_embeddings", False),
            attention_bias=fields.get("attention_bias", False),
            initializer_range=fields.get("initializer_range", 0.02),
            bos_token_id=fields.get("bos_token_id", None),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=fields.get("pad_token_id", None),
            **moe,
        )
        fields.finish()
        return spec

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers, vLLM and `from_hf` read."""
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        if self.model_type == "llama":
            config["mlp_bias"] = False
        else:
            config["use_sliding_window"] = False
        if self.model_type == "qwen3_moe":
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_size,
                "norm_topk_prob": self.norm_topk_prob,
                "decoder_sparse_step": self.sparse_step,
                "mlp_only_layers": list(self.dense_layers),
            }
        return config


class _Fields:
    """A config that remembers which fields were read, so that the rest can be refused."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.read: set[str] = set()

    def need(self, *names: str) -> Any:
        for name in names:
            self.read.add(name)
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        raise ValueError(f"config.json lacks the field {names[0]}")

    def get(self, name: str, default: Any) -> Any:
        self.read.add(name)
        return self.config.get(name, default)

    def finish(self) -> None:
        for name, value in self.config.items():
            if name in self.read or name in INERT:
                continue
            if name in ONLY:
                if value not in ONLY[name]:
                    allowed = ONLY[name][0]
                    raise ValueError(
                        f"config.json has {name} = {value!r}, which is not supported (only {allowed!r} is)"
                    )
            elif name == "layer_types":
                if value is not None and any(kind != "full_attention" for kind in value):
                    raise ValueError(f"config.json has layer_types = {value!r}; only 'full_attention' is supported")
            else:
                raise ValueError(
                    f"config.json has the field {name} = {value!r}, which is not known for model_type "
                    f"{self.config['model_type']}; remove it if it does not change the network"
                )


def _rope_theta(fields: _Fields) -> float:
    """theta from the flat field of transformers 4 or the `rope_parameters` of 5. Scaled positions are refused."""
    theta = fields.get("rope_theta", None)
    for name in ("rope_scaling", "rope_parameters"):
        rope = dict(fields.get(name, None) or {})
        theta = rope.pop("rope_theta", theta)
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        if rope.pop("partial_rotary_factor", 1.0) != 1.0 or kind != "default" or rope:
            raise ValueError(
                f"config.json has {name} = {fields.config[name]!r}; only the default rope type is supported"
            )
    return float(10_000.0 if theta is None else theta)
