"""What a network looks like: one frozen record, read from and written to a Hugging Face `config.json`.

Four families share it (`qwen3_moe`, `qwen3`, `llama`, and `deepseek_v3` with its twin `kimi_k2`). A field we can't
honour is a ValueError that names it; a field we don't know is one too (`fields.py`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.model import deepseek
from stretto.model.deepseek import Grouping, Latent, Yarn
from stretto.model.fields import Fields

CONFIG = "config.json"

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}


class CheckpointError(ValueError):
    """A sentence: which file or tensor of a checkpoint is wrong."""


def load_spec(folder: Path | str) -> ModelSpec:
    """The architecture that a checkpoint folder holds. Raises CheckpointError when there is none. Needs no torch."""
    path = Path(folder) / CONFIG
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no checkpoint folder at {path.parent}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {CONFIG}, so it is not a Hugging Face checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, where Hugging Face has an object of fields")
    try:
        return ModelSpec.from_hf(config)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path.parent}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of one network. `experts == 0` means every layer is dense."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # of a query or key
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
    shared_experts: int = 0  # see every token, beside the chosen ones; in memory one MLP of their joint width
    grouping: Grouping | None = None  # None: experts are chosen by softmax scores, without groups
    latent: Latent | None = None  # None: queries, keys and values are projected straight from the hidden state
    yarn: Yarn | None = None
    mtp_layers: int = 0  # heads for multi-token prediction that the checkpoint has beside the network (`mtp.py`)
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
        if self.rotary_dim % 2:
            name = "head_dim" if self.latent is None else "qk_rope_head_dim"
            raise ValueError(f"{name} = {self.rotary_dim} is odd; rotary positions need an even one")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(
                f"num_experts_per_tok = {self.experts_per_token} is not between 1 and num_experts = {self.experts}"
            )
        if self.model_type in deepseek.FAMILY:
            deepseek.check(self)

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each head of queries and keys; Llama doesn't."""
        return self.model_type in ("qwen3_moe", "qwen3")

    @property
    def rotary_dim(self) -> int:
        """How much of a query or key rotates."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Key/value heads of a layer, width of a key, width of a value: what an `Attend` is given for one token."""
        return self.kv_heads, self.head_dim, self.head_dim if self.latent is None else self.latent.v_dim

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
        fields = Fields(config)
        model_type = fields.need("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"model_type {model_type!r} is not supported; Stretto runs {', '.join(ARCHITECTURES)}")
        heads, width = fields.size("num_attention_heads"), fields.size("hidden_size")
        is_deepseek = model_type in deepseek.FAMILY
        if is_deepseek:
            parts: dict[str, Any] = deepseek.read(fields)
        else:
            parts = {
                "kv_heads": fields.size("num_key_value_heads", default=_KV_HEADS.get(model_type, heads)),
                "head_dim": fields.size("head_dim", default=128 if model_type == "qwen3" else width // heads),
            }
        if model_type == "qwen3_moe":
            parts |= {
                "experts": fields.size("num_experts", "num_local_experts"),
                "experts_per_token": fields.size("num_experts_per_tok"),
                "expert_size": fields.size("moe_intermediate_size"),
                "norm_topk_prob": fields.flag("norm_topk_prob", False),
                "sparse_step": fields.size("decoder_sparse_step", default=1),
                "dense_layers": tuple(fields.get("mlp_only_layers", None) or ()),
            }
        theta, yarn = _rope(fields, scaled=is_deepseek)
        eos = fields.get("eos_token_id", None)
        spec = cls(
            model_type=model_type,
            vocab_size=fields.size("vocab_size"),
            hidden_size=width,
            layers=fields.size("num_hidden_layers"),
            heads=heads,
            intermediate_size=fields.size("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            yarn=yarn,
            max_positions=fields.size("max_position_embeddings", default=_MAX_POSITIONS.get(model_type, 32_768)),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            initializer_range=fields.number("initializer_range", 0.02),
            mtp_layers=_heads(fields),
            bos_token_id=fields.get("bos_token_id", None),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=fields.get("pad_token_id", None),
            **parts,
        )
        fields.finish(*(deepseek.ONLY, deepseek.INERT) if is_deepseek else ({}, set()))
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
        if self.model_type in deepseek.FAMILY:
            config |= deepseek.write(self)
        elif self.model_type == "llama":
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
        if self.mtp_layers:
            config[_HEADS] = self.mtp_layers
        return config


_HEADS = "num_nextn_predict_layers"


def _heads(fields: Fields) -> int:
    value = fields.get(_HEADS, 0)
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"config.json has {_HEADS} = {value!r}, which is not a whole number from 0 on")
    return value or 0


_KV_HEADS = {"qwen3": 32, "qwen3_moe": 4}
_MAX_POSITIONS = {"llama": 2048, "deepseek_v3": 4096, "kimi_k2": 4096}
"""What transformers takes when a config does not say."""


def _rope(fields: Fields, scaled: bool) -> tuple[float, Yarn | None]:
    """theta and scaling, from the flat fields of transformers 4 or the `rope_parameters` of 5. Kinds of scaling that we
    don't compute are refused, and all of them unless the family is `scaled`."""
    theta, yarn = fields.get("rope_theta", None), None
    for name in ("rope_scaling", "rope_parameters"):
        rope = dict(fields.get(name, None) or {})
        theta = rope.pop("rope_theta", theta)
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        if kind == "yarn" and scaled:
            yarn, kind = deepseek.take_yarn(rope), "default"
        if rope.pop("partial_rotary_factor", 1.0) != 1.0 or kind != "default" or rope:
            allowed = "the default rope type and plain yarn are" if scaled else "only the default rope type is"
            raise ValueError(f"config.json has {name} = {fields.config[name]!r}; {allowed} supported")
    theta = 10_000.0 if theta is None else theta
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise ValueError(f"config.json has rope_theta = {theta!r}, which is not a positive number")
    return float(theta), yarn
