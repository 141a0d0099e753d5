"""Keys and values of all slots, and attention of one pass over them.

    k: per layer [slots, G, max_tokens, d], v: [slots, G, max_tokens, e], allocated once

Decoding reads each slot's own rows in place: one compiled loop over (row, head), no gather, no padding to the
longest. A prefill chunk goes through `scaled_dot_product_attention`, on a view of its slot.

Letters: `S` slots, `T` rows of the pass, `H` query heads, `G` key/value heads, `d` width of a query or key, `e` of a
value (the same but in latent attention, whose heads are cached expanded).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engine import compiled
from stretto.engine.scheduler import Chunk, Plan
from stretto.model import kernels


class KVCache:
    """KV rows of every slot and layer. Nothing grows at run time: `bytes` is all it will ever take."""

    def __init__(
        self, layers: int, slots: int, kv_heads: int, max_tokens: int, head_dim: int, value_dim: int | None = None
    ):
        shape = (slots, kv_heads, max_tokens)
        self.k = [torch.zeros(*shape, head_dim) for _ in range(layers)]
        self.v = [torch.zeros(*shape, head_dim if value_dim is None else value_dim) for _ in range(layers)]
        self.arrays = [(k.numpy(), v.numpy()) for k, v in zip(self.k, self.v, strict=True)]  # the same memory
        self.tokens = max_tokens
        self.copy([(0, 0, 0)])  # compiles it now instead of in a pass

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in (*self.k, *self.v))

    def attend(self, layer: int, q_THd: Tensor, chunk: Chunk, mask: Tensor | None) -> Tensor:
        """Attention of a chunk whose keys and values are here already; `mask` is its `chunk_mask`."""
        end = chunk.position + chunk.end - chunk.start
        return _attend(q_THd, self.k[layer][chunk.slot, :, :end], self.v[layer][chunk.slot, :, :end], mask)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """For each (source, slot, rows), in order: give `slot` the first `rows` rows of `source`."""
        for x in (x for pair in self.arrays for x in pair):
            for source, slot, rows in copies:
                compiled.copy(x, source, slot, rows)


class SlotAttend:
    """The `Attend` of one pass: writes the pass's rows into the cache, then lets each see its slot up to itself."""

    def __init__(self, cache: KVCache, plan: Plan):
        self.cache, self.decoding = cache, plan.decoding
        self.rows = plan.slots_T, plan.positions_T
        self.chunks = [(chunk, chunk_mask(chunk)) for chunk in plan.chunks]

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, exact: bool = False) -> Tensor:
        cache_k, cache_v = self.cache.k[layer], self.cache.v[layer]
        slots_T, positions_T = (torch.from_numpy(rows) for rows in self.rows)
        at = (slots_T, slice(None), positions_T)
        cache_k[at], cache_v[at] = k_TGd, v_TGe
        if exact:
            return kernels.attend(q_THd, cache_k, cache_v, *self.rows)
        out_THe = q_THd.new_empty(*q_THd.shape[:2], v_TGe.shape[2])
        if one := self.decoding:
            out_THe[:one] = kernels.attend(q_THd[:one], cache_k, cache_v, *(rows[:one] for rows in self.rows))
        for chunk, mask in self.chunks:
            span = slice(chunk.start, chunk.end)
            out_THe[span] = self.cache.attend(layer, q_THd[span], chunk, mask)
        return out_THe


def _attend(q_THd: Tensor, k_GMd: Tensor, v_GMe: Tensor, mask: Tensor | None) -> Tensor:
    """Query heads of one key head form a group: [G, H/G, T, d] on keys that are expanded, not copied."""
    tokens, heads, width = q_THd.shape
    kv_heads = len(k_GMd)
    q = q_THd.view(tokens, kv_heads, -1, width).permute(1, 2, 0, 3)
    k, v = (x.unsqueeze(1).expand(-1, heads // kv_heads, -1, -1) for x in (k_GMd, v_GMe))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and tokens > 1)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def chunk_mask(chunk: Chunk) -> Tensor | None:
    """bool [chunk, rows up to its end]; None where plain causal attention (or no mask at all) says the same."""
    count = chunk.end - chunk.start
    if chunk.position == 0 or count == 1:
        return None
    return torch.ones(count, chunk.position + count, dtype=torch.bool).tril(chunk.position)
