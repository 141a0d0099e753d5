"""A `config.json` that remembers which of its fields were read, so that the rest can be refused.

Fields fall in four classes: read, known and inert, allowed in one value only, and unknown. The last one is an error
that names the field, because a silently ignored field is a silently different network.
"""

from __future__ import annotations

import math
from typing import Any

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""`quantization_config` of the fp8 checkpoints we write (`served.py`); DeepSeek-V3's has no `scale_fmt`."""

# Fields that may hold only these values, because another value would be another network.
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0, None),
    "rope_interleaved": (False,),
    "quantization_config": (None, FP8, {key: value for key, value in FP8.items() if key != "scale_fmt"}),
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
    "_model_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "transformers.js_config",
    "is_llama_config",
    "unk_token_id",
    "sep_token_id",
    "cls_token_id",
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


class Fields:
    """A config that remembers which fields were read, so that the rest can be refused."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.read: set[str] = set()

    def need(self, *names: str) -> Any:
        """The first of these that is there and not null; ValueError names the first when none is."""
        for name in names:
            self.read.add(name)
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        raise ValueError(f"config.json lacks the field {names[0]}")

    def get(self, name: str, default: Any) -> Any:
        self.read.add(name)
        return self.config.get(name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise ValueError(f"config.json has {name} = {value!r}, which is neither true nor false")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"config.json has {name} = {value!r}, which is not a positive number")
        return float(value)

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer, under the first of these names that is there; `default` where none is."""
        value = self.get(names[0], None) if default is not None else self.need(*names)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise ValueError(f"config.json has {names[0]} = {value!r}, which is not a positive integer")
        return value

    def finish(self, only: dict[str, tuple[Any, ...]], inert: set[str]) -> None:
        """Raise ValueError for a field that was not read, unless it is inert or has the one value it may have.

        `only` and `inert` are the family's own, beside those of all families.
        """
        only = ONLY | only
        for name, value in self.config.items():
            if name in self.read or name in INERT or name in inert:
                continue
            if name in only:
                if value not in only[name]:
                    allowed = only[name][0]
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
