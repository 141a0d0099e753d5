"""Attention over slots equals attention over the whole sequence, however it is cut into chunks and decoding steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from stretto.engine.cache import KVCache, SlotAttend
from stretto.engine.scheduler import Chunk
from stretto.model.attention import PackedCausal

HEADS, KV_HEADS, WIDTH = 6, 2, 8


def random_qkv(tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def one_pass(cache: KVCache, rows: list[tuple[int, list[torch.Tensor], int, int]]) -> list[torch.Tensor]:
    """Run `(slot, qkv, from, to)` as one ragged pass: single rows first, as a plan has them."""
    rows = sorted(rows, key=lambda row: row[3] - row[2] > 1)
    single = [row for row in rows if row[3] - row[2] == 1]
    chunks, at = [], len(single)
    for slot, _, start, end in rows[len(single) :]:
        chunks.append(Chunk(slot, at, at + end - start, start))
        at += end - start
    plan = SimpleNamespace(
        slots_T=np.concatenate([np.full(end - start, slot) for slot, _, start, end in rows]),
        positions_T=np.concatenate([np.arange(start, end) for *_, start, end in rows]),
        decoding=len(single),
        chunks=chunks,
    )
    packed = [torch.cat([qkv[i][start:end] for _, qkv, start, end in rows]) for i in range(3)]
    out = SlotAttend(cache, plan)(0, *packed)
    return list(zip([row[0] for row in rows], out.split([end - start for *_, start, end in rows])))


def test_chunks_and_steps_equal_the_whole():
    cache = KVCache(layers=1, slots=5, kv_heads=KV_HEADS, max_tokens=40, head_dim=WIDTH)
    sequences = {slot: random_qkv(30, seed=slot) for slot in (4, 0, 2)}
    cuts = {4: [0, 30], 0: [0, 12, 13, 14, 29, 30], 2: [0, 1, 2, 20, 21, 30]}
    found: dict[int, list[torch.Tensor]] = {slot: [] for slot in sequences}
    for step in range(5):
        rows = [(s, sequences[s], *cut[step : step + 2]) for s, cut in cuts.items() if step + 1 < len(cut)]
        for slot, out in one_pass(cache, rows):
            found[slot].append(out)
    for slot, qkv in sequences.items():
        wanted = PackedCausal([30])(0, *qkv)
        torch.testing.assert_close(torch.cat(found[slot]), wanted, atol=1e-5, rtol=0)


def test_a_copied_prefix_serves_like_its_own():
    cache = KVCache(layers=1, slots=3, kv_heads=KV_HEADS, max_tokens=40, head_dim=WIDTH)
    qkv = random_qkv(25, seed=9)
    one_pass(cache, [(0, qkv, 0, 20)])
    cache.copy([(0, 2, 20), (2, 1, 20)])
    outs = one_pass(cache, [(1, qkv, 20, 25), (0, qkv, 20, 21)])
    wanted = PackedCausal([25])(0, *qkv)
    torch.testing.assert_close(dict(outs)[1], wanted[20:], atol=1e-5, rtol=0)
    assert not cache.k[0][1, :, 25:].any()


def test_nan_stays_visible():
    cache = KVCache(layers=1, slots=1, kv_heads=KV_HEADS, max_tokens=8, head_dim=WIDTH)
    q, k, v = random_qkv(3, seed=1)
    q[2, 0, 0] = torch.nan
    one_pass(cache, [(0, [q, k, v], 0, 2)])
    ((_, out),) = one_pass(cache, [(0, [q, k, v], 2, 3)])
    assert out[0, 0].isnan().all() and out[0, 1:].isfinite().all()
