"""Multi-head latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434), in its expanded form.

Keys and values of all heads come from one narrow latent per token; a small part of each head carries the position, and
that part of the key is the same for all heads. Every `Attend` gets the expanded heads, so that packing, shared
prefixes and the engine's cache work as for any other network. Left out: the absorbed form, which caches the latent
itself and saves memory.

Shapes: `T` tokens, `D` width, `H` heads, `C` latent, `R` the rotating part, `d` a query or key head, `e` a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.model.attention import Attend, mixed
from stretto.model.linear import Linear
from stretto.model.norm import RMSNorm
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.rotary import rotate
from stretto.model.spec import ModelSpec

NORM_EPS = 1e-6
"""Of the norms inside, whatever `rms_norm_eps` says."""


class LatentAttention(nn.Module):
    """Attributes carry Hugging Face names. Queries are compressed too when the config has `q_lora_rank`."""

    def __init__(self, spec: ModelSpec, layer: int, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        self.numerics = numerics
        assert spec.latent is not None
        self.layer, self.latent, self.heads = layer, spec.latent, spec.heads
        self.scale = 1.0 if spec.yarn is None else spec.yarn.score_scale
        latent, width, bias = spec.latent, spec.hidden_size, spec.attention_bias
        queries = spec.heads * spec.head_dim
        if latent.q_rank is None:
            self.q_proj = Linear(width, queries, numerics)
        else:
            self.q_a_proj = Linear(width, latent.q_rank, numerics, bias)
            self.q_a_layernorm = RMSNorm(latent.q_rank, NORM_EPS, numerics)
            self.q_b_proj = Linear(latent.q_rank, queries, numerics)
        self.kv_a_proj_with_mqa = Linear(width, latent.kv_rank + latent.rope_dim, numerics, bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, NORM_EPS, numerics)
        self.kv_b_proj = Linear(latent.kv_rank, spec.heads * (latent.nope_dim + latent.v_dim), numerics)
        self.o_proj = Linear(spec.heads * latent.v_dim, width, numerics, bias)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        latent, heads = self.latent, (len(x_TD), self.heads, -1)
        queries = self.q_proj(x_TD) if latent.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        q_nope, q_rope = queries.view(heads).split((latent.nope_dim, latent.rope_dim), dim=-1)
        narrow_TC, k_rope_TR = self.kv_a_proj_with_mqa(x_TD).split((latent.kv_rank, latent.rope_dim), dim=-1)
        wide = self.kv_b_proj(self.kv_a_layernorm(narrow_TC)).view(heads)
        k_nope, v_THe = wide.split((latent.nope_dim, latent.v_dim), dim=-1)
        q_rope, k_rope = (rotate(self._halves(x), *rotary, self.numerics) for x in (q_rope, k_rope_TR.unsqueeze(1)))
        q_THd = torch.cat((q_nope, q_rope), dim=-1)
        k_THd = torch.cat((k_nope, k_rope.expand(-1, self.heads, -1)), dim=-1)
        if self.scale != 1.0:
            q_THd = q_THd * self.scale
        return self.o_proj(mixed(attend, self.layer, q_THd, k_THd, v_THe, self.numerics))

    def _halves(self, x_THR: Tensor) -> Tensor:
        """Pairs that rotate together as (i, i + R/2), which is what `rotate` takes; in the checkpoint's rows they are
        neighbours. Scores do not change, because queries and keys are reordered alike."""
        return torch.cat((x_THR[..., 0::2], x_THR[..., 1::2]), dim=-1) if self.latent.interleaved else x_THR
