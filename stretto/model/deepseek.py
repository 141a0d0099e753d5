"""What only the DeepSeek-V3 family has: latent attention, a sigmoid router with groups, shared experts, YaRN.

DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2 are one network with other sizes. Here are the records that `ModelSpec`
carries for it, and their fields in `config.json`. Heads for multi-token prediction (`num_nextn_predict_layers`) are not
part of the network that samples: see `mtp.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto.model.fields import Fields

if TYPE_CHECKING:
    from stretto.model.spec import ModelSpec

FAMILY = ("deepseek_v3", "kimi_k2")

ONLY: dict[str, tuple[Any, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}

INERT = {"auto_map", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"}


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Widths of multi-head latent attention; a query or key head is `nope_dim + rope_dim` wide."""

    q_rank: int | None  # None: queries are projected at once
    kv_rank: int
    nope_dim: int  # the part of a head without position
    rope_dim: int  # the part that rotates; its keys are shared by all heads
    v_dim: int
    interleaved: bool = True  # pairs that rotate together are neighbours in the checkpoint's rows


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Expert choice by sigmoid scores: the `kept` groups with the best two experts each, then the best experts."""

    groups: int
    kept: int
    scale: float  # of the gates, after normalisation


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Scaled rotary positions (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by, beside `d ** -0.5`."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


_Q_RANK = 1536
"""What transformers takes when a config does not say; null is another network, without this rank."""


def read(fields: Fields) -> dict[str, Any]:
    """The family's part of a ModelSpec. Raises ValueError naming a field that is missing or that can't be honoured."""
    latent = Latent(
        q_rank=None if fields.get("q_lora_rank", _Q_RANK) is None else fields.size("q_lora_rank", default=_Q_RANK),
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        v_dim=fields.size("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
    )
    heads = fields.size("num_attention_heads")
    width = latent.nope_dim + latent.rope_dim
    derived = {"num_key_value_heads": heads, "qk_head_dim": width, "head_dim": latent.rope_dim}
    for name, value in derived.items():
        if fields.get(name, None) not in (None, value):
            raise ValueError(
                f"config.json has {name} = {fields.config[name]!r}, but its other fields make it {value} in this family"
            )
    return {
        "kv_heads": heads,
        "head_dim": width,
        "latent": latent,
        "experts": fields.size("n_routed_experts", "num_local_experts"),
        "experts_per_token": fields.size("num_experts_per_tok"),
        "expert_size": fields.size("moe_intermediate_size"),
        "shared_experts": _count(fields, "n_shared_experts"),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "dense_layers": tuple(range(_count(fields, "first_k_dense_replace"))),
        "grouping": Grouping(
            groups=fields.size("n_group"),
            kept=fields.size("topk_group"),
            scale=float(fields.need("routed_scaling_factor")),
        ),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    """The family's fields of `config.json`, over those that all families share."""
    latent, grouping, yarn = spec.latent, spec.grouping, spec.yarn
    assert latent is not None and grouping is not None
    return {
        "head_dim": latent.rope_dim,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rope_interleave": latent.interleaved,
        "rope_scaling": None if yarn is None else _yarn_fields(yarn),
        "n_routed_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.expert_size,
        "n_shared_experts": spec.shared_experts,
        "norm_topk_prob": spec.norm_topk_prob,
        "first_k_dense_replace": len(spec.dense_layers),
        "moe_layer_freq": 1,
        "n_group": grouping.groups,
        "topk_group": grouping.kept,
        "routed_scaling_factor": grouping.scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }


def _count(fields: Fields, name: str) -> int:
    value = fields.need(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"config.json has {name} = {value!r}, which is not a whole number from 0 on")
    return value


def take_yarn(rope: dict[str, Any]) -> Yarn:
    """Take YaRN's numbers out of a `rope_scaling`; what is left in it is not supported."""
    given = dict(rope)
    try:
        return Yarn(
            factor=float(rope.pop("factor")),
            original_positions=rope.pop("original_max_position_embeddings"),
            beta_fast=float(rope.pop("beta_fast", 32)),
            beta_slow=float(rope.pop("beta_slow", 1)),
            mscale=float(rope.pop("mscale", 0)),
            mscale_all_dim=float(rope.pop("mscale_all_dim", 0)),
        )
    except KeyError as error:
        raise ValueError(f"config.json has rope_scaling of type yarn without {error.args[0]}") from None
    except TypeError:
        raise ValueError(f"config.json has rope_scaling of type yarn with a value that is no number: {given}") from None


def _yarn_fields(yarn: Yarn) -> dict[str, Any]:
    optional = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    } | {name: value for name, value in optional.items() if value}


def check(spec: ModelSpec) -> None:
    """Raise ValueError naming the field when sizes do not fit together."""
    latent, grouping = spec.latent, spec.grouping
    if latent is None or grouping is None:
        raise ValueError(f"a network of model_type {spec.model_type} needs `latent` and `grouping`")
    size = spec.experts // max(grouping.groups, 1)
    if grouping.groups < 1 or spec.experts % grouping.groups or size < 2:
        raise ValueError(
            f"n_group = {grouping.groups} does not divide n_routed_experts = {spec.experts} into groups of two or more"
        )
    if not 1 <= grouping.kept <= grouping.groups or grouping.kept * size < spec.experts_per_token:
        raise ValueError(
            f"topk_group = {grouping.kept} of n_group = {grouping.groups} groups of {size} experts does not leave "
            f"num_experts_per_tok = {spec.experts_per_token} experts to choose from"
        )
    if spec.dense_layers != tuple(range(len(spec.dense_layers))):
        raise ValueError(f"dense layers {spec.dense_layers} are not the first ones, as first_k_dense_replace needs")
