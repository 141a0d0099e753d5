"""The weights of a network as the engine's steps (`forward`) take them: joined, transposed, flat and narrow.

Nothing is copied but the narrow ones: weights that are loaded anew in place are seen here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stretto.engine.narrow import Narrow
from stretto.model.attention import Attention
from stretto.model.mlp import Mlp
from stretto.model.moe import MoE
from stretto.model.transformer import Block, Transformer


class Layer:
    """The weights of one block as the steps take them: transposed views for products, numpy for the loops."""

    def __init__(self, block: Block, index: int) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.index = index  # among the MoE layers
        assert isinstance(attention, Attention)
        self.norm, self.mlp_norm = values(block.input_layernorm.weight), values(block.post_attention_layernorm.weight)
        weight, self.qkv_bias = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.qkv = weight.t()
        none = np.empty(0, np.float32)
        self.q_norm = none if attention.q_norm is None else values(attention.q_norm.weight)
        self.k_norm = none if attention.k_norm is None else values(attention.k_norm.weight)
        self.out, self.out_bias = attention.o_proj.weight.detach().t(), attention.o_proj.bias
        self.narrow = [Narrow(weight), Narrow(attention.o_proj.weight)]  # as compiled products of few rows take them
        if isinstance(mlp, MoE):
            self.router = mlp.gate.weight.detach().t()
            self.gate_up = [weight.t() for weight in mlp.experts.gate_up_proj.detach().unbind()]
            self.down = [weight.t() for weight in mlp.experts.down_proj.detach().unbind()]
            self.stacks = flattened(mlp.experts.gate_up_proj), flattened(mlp.experts.down_proj)
            self.narrow += [Narrow(mlp.experts.gate_up_proj), Narrow(mlp.experts.down_proj)]
        else:
            assert isinstance(mlp, Mlp)
            self.router = None
            self.gate_up = [_join([mlp.gate_proj, mlp.up_proj])[0].t()]
            self.down = [mlp.down_proj.weight.detach().t()]


def join(model: Transformer) -> None:
    """Move the weights of q, k and v, and of gate and up, next to each other. Each stays a parameter of its own."""
    for block in model.layers:
        assert isinstance(block, Block)
        if isinstance(block.self_attn, Attention):
            _join([block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj])
        if isinstance(block.mlp, Mlp):
            _join([block.mlp.gate_proj, block.mlp.up_proj])


def _join(parts: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one product for all parts: what they hold already, if they were joined before."""
    weight = _adjacent([part.weight for part in parts])
    return weight, None if parts[0].bias is None else _adjacent([part.bias for part in parts])


def _adjacent(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters as one tensor that shares their memory."""
    first, rows = parameters[0].data, sum(len(p) for p in parameters)
    starts = np.cumsum([0] + [p.nbytes for p in parameters[:-1]]) + first.data_ptr()
    same = all(p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for p in parameters)
    if same and starts.tolist() == [p.data_ptr() for p in parameters]:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    with torch.inference_mode(False):  # the same network may be trained later
        joined = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
    return joined


def values(x: Tensor) -> np.ndarray:
    """The same memory for numpy."""
    return x.detach().numpy()


def flattened(x: Tensor) -> np.ndarray:
    """The same memory for compiled loops."""
    return values(x).reshape(-1)
