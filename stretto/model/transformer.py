"""The decoder: embeddings, blocks of attention and (dense or expert) MLP, final norm, head.

One definition serves engine and trainer, so that "what is served is what is trained" is a property of code. There is
no batch axis and no padding: tokens of all sequences lie on one axis, and `attend` alone knows which belong together.

Shapes: `T` tokens, `N` any selection of them, `D` width, `V` vocabulary, `L` MoE layers (dense ones are not counted),
`K` experts per token, `E` experts.

    model = checkpoint.load(folder)
    out = model(ids_T, positions_T, PackedCausal([3, 5]), capture=True)
    logits_NV = model.logits(out.hidden_TD)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from stretto.model.attention import Attend, Attention
from stretto.model.latent import LatentAttention
from stretto.model.linear import product
from stretto.model.mlp import Mlp
from stretto.model.moe import MoE, Routed
from stretto.model.norm import RMSNorm
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.residual import add
from stretto.model.rotary import rotary_angles
from stretto.model.router import check_routes
from stretto.model.spec import ModelSpec


@dataclass(frozen=True)
class Output:
    """What one forward pass gives. Rows of routes are (token, MoE layer) pairs."""

    hidden_TD: Tensor  # after the final norm: `Transformer.logits` takes it as it is
    routes_TLK: Tensor | None  # int64, experts really used; only when asked for (`capture`) and the network has experts
    router_logits: (
        list[Tensor] | None
    )  # one [T, E] per MoE layer, softmax gives its probabilities; None without experts
    disagreement: Tensor | None  # scalar: share of covered rows whose own top-k set differs; None without replay
    covered: Tensor | None  # scalar: number of rows that are known; None without replay
    replaced: Tensor | None  # scalar: share of covered rows with an expert that was not plausible; None without replay
    differs_TL: Tensor | None = None  # bool: the covered rows behind `disagreement`
    replaced_TL: Tensor | None = None  # bool: the covered rows behind `replaced`


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Attributes carry Hugging Face names."""

    def __init__(self, spec: ModelSpec, layer: int, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        self.numerics = numerics
        attention = Attention if spec.latent is None else LatentAttention
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, numerics)
        self.self_attn = attention(spec, layer, numerics)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, numerics)
        is_moe = layer in spec.moe_layers
        self.mlp = MoE(spec, numerics) if is_moe else Mlp(spec.hidden_size, spec.intermediate_size, numerics)

    def forward(
        self,
        x_TD: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        replayed_TK: Tensor | None,
        ratio: float = 0.0,
        used: list[Tensor] | None = None,
    ) -> tuple[Tensor, Routed | None]:
        x_TD = add(x_TD, self.self_attn(self.input_layernorm(x_TD), rotary, attend), self.numerics)
        h_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, MoE):
            y_TD, routed = self.mlp(h_TD, replayed_TK, ratio, used)
            return add(x_TD, y_TD, self.numerics), routed
        return add(x_TD, self.mlp(h_TD), self.numerics), None


class Transformer(nn.Module):
    """The network of `spec`, with uninitialised weights: see `checkpoint.load` and `checkpoint.random_init`."""

    def __init__(self, spec: ModelSpec, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        self.spec, self.numerics = spec, numerics
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec, layer, numerics) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, numerics)
        self.lm_head = None if spec.tie_embeddings else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the embedding itself when tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 [N, V], computed in float32 whatever the dtype of the weights."""
        return product(hidden_ND.float(), self.head_weight.float(), None, self.numerics.exact)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        routes_TLK: Tensor | None = None,
        capture: bool = False,
        replay_ratio: float = 0.0,
        recompute: bool = False,
    ) -> Output:
        """Run all layers. `ids_T`, `positions_T` int64 [T]; positions count from 0 inside each sequence.

        `routes_TLK` (int64) forces experts; a (token, layer) row of all -1 is unknown and routes freely. Of the others,
        experts that fall short of `replay_ratio` times the score of those the router itself would use are replaced
        (`router.select`). With `recompute` the backward pass computes each block again, with the experts it used,
        instead of keeping activations. Raises ValueError when routes do not fit this network.
        """
        spec = self.spec
        if routes_TLK is not None:
            check_routes(routes_TLK, len(ids_T), spec.route_shape, spec.experts)
        x_TD = self.embed_tokens(ids_T)
        rotary = rotary_angles(positions_T, spec.rotary_dim, spec.rope_theta, x_TD.dtype, spec.yarn)
        routed: list[Routed] = []
        recorded = [None] * spec.layers if routes_TLK is None else self._per_layer(routes_TLK)
        for block, replayed_TK in zip(self.layers, recorded, strict=True):
            inputs = x_TD, rotary, attend, replayed_TK, replay_ratio
            if recompute and torch.is_grad_enabled():
                used: list[Tensor] = []
                x_TD, choice = checkpointed(block, *inputs, used, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD, choice = block(*inputs)
            if choice is not None:
                routed.append(choice)
        hidden_TD = self.norm(x_TD)
        if not routed:
            return Output(hidden_TD, None, None, None, None, None)
        choices = [layer.choice for layer in routed]
        used_TLK = torch.stack([choice.experts_TK for choice in choices], dim=1) if capture else None
        logits = [layer.logits_TE for layer in routed]
        if routes_TLK is None:
            return Output(hidden_TD, used_TLK, logits, None, None, None)
        covered = (routes_TLK[:, :, 0] >= 0).sum()
        differs_TL, replaced_TL = (
            torch.stack([flags_T for flags_T in flags if flags_T is not None], dim=1)
            for flags in ([choice.differs_T for choice in choices], [choice.replaced_T for choice in choices])
        )
        differing, replaced = (flags_TL.sum() / covered.clamp(min=1) for flags_TL in (differs_TL, replaced_TL))
        return Output(hidden_TD, used_TLK, logits, differing, covered, replaced, differs_TL, replaced_TL)

    def _per_layer(self, routes_TLK: Tensor) -> list[Tensor | None]:
        """Routes of each layer, None for the dense ones, which `L` does not count."""
        rows = iter(routes_TLK.unbind(dim=1))
        return [next(rows) if layer in self.spec.moe_layers else None for layer in range(self.spec.layers)]
