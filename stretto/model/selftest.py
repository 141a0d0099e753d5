"""Whether this machine can hold `numerics = "exact"`: measured at start-up, refused with a sentence where it can't.

The compiled loops are exact by construction; matrix products and softmax come from libraries, which choose kernels by
shape and processor. So a shallow network of the real widths computes some sequences at once, and again in random
company, chunk by chunk and row by row, with one thread and with two. Every log-prob must be the same, to the bit.

Left out: the full depth and number of experts, and the far end of a large vocabulary, which repeat what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stretto.model import checkpoint, kernels
from stretto.model.attention import PackedCausal
from stretto.model.numerics import Numerics
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer

SEQUENCES, LONGEST = 10, 24
VOCABULARY = 4096
EXPERTS = 8


class NotExact(ValueError):
    """A sentence: where this machine's arithmetic depends on the batch."""


def check(spec: ModelSpec, numerics: Numerics, seed: int = 0) -> None:
    """Raise NotExact unless a network of these widths gives the same log-probs in every company. Takes seconds."""
    model = checkpoint.random_init(shallow(spec), seed, numerics=numerics)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LONGEST, SEQUENCES).tolist()
    ids = [torch.from_numpy(rng.integers(0, model.spec.vocab_size, length)) for length in lengths]
    with torch.no_grad():
        wanted = _at_once(model, ids)
        own = torch.get_num_threads()
        for threads in sorted({own, 1, 2}):
            with _threads(threads):
                for cut in (3, LONGEST) if threads == own else (LONGEST,):
                    for sequence, start, logp in _in_company(model, ids, cut, rng):
                        rows = wanted[sequence][start : start + len(logp)]
                        if not torch.equal(logp, rows):
                            raise NotExact(
                                f"model.numerics is exact, but with {threads} thread(s) on this machine log-probs "
                                f"differ by up to {float((logp - rows).abs().max()):.1e} with the batch they are "
                                "computed in: use ordered, or another build of torch"
                            )


def shallow(spec: ModelSpec) -> ModelSpec:
    """A network with the layers of `spec` that differ, one of each, of its widths."""
    sparse = bool(spec.moe_layers)
    dense = sparse and len(spec.moe_layers) < spec.layers
    small = replace(
        spec, layers=2 if dense else 1, vocab_size=min(spec.vocab_size, VOCABULARY), sparse_step=1, dense_layers=()
    )
    if dense:
        small = replace(small, dense_layers=(0,))
    if not sparse:
        return small if not spec.experts else replace(small, dense_layers=(0,))
    grouping = None if spec.grouping is None else replace(spec.grouping, groups=1, kept=1)
    experts = min(spec.experts, max(EXPERTS, spec.experts_per_token))
    return replace(small, experts=experts, grouping=grouping)


def _at_once(model: Transformer, ids: list[Tensor]) -> list[Tensor]:
    """Log-probs of the whole vocabulary after each token, from one pass over all sequences."""
    lengths = [len(sequence) for sequence in ids]
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    hidden_TD = model(torch.cat(ids), positions_T, PackedCausal(lengths)).hidden_TD
    return list(_logprobs(model, hidden_TD).split(lengths))


def _in_company(
    model: Transformer, ids: list[Tensor], cut: int, rng: np.random.Generator
) -> Iterator[tuple[int, int, Tensor]]:
    """(sequence, first row, log-probs) of all rows, in passes of random sequences and up to `cut` rows of each."""
    attend = _Cached(model.spec, len(ids))
    done = np.zeros(len(ids), np.int64)
    lengths = np.array([len(sequence) for sequence in ids])
    while (done < lengths).any():
        left = rng.permutation(np.flatnonzero(done < lengths))[: int(rng.integers(1, len(ids) + 1))]
        counts = np.minimum(rng.integers(1, cut + 1, len(left)), (lengths - done)[left])
        spans = [(int(s), int(done[s]), int(done[s] + count)) for s, count in zip(left, counts, strict=True)]
        attend.sequence_T = np.repeat(left, counts)
        attend.position_T = np.concatenate([np.arange(start, end) for _, start, end in spans])
        ids_T = torch.cat([ids[sequence][start:end] for sequence, start, end in spans])
        hidden_TD = model(ids_T, torch.from_numpy(attend.position_T), attend).hidden_TD
        done[left] += counts
        for (sequence, start, _), logp in zip(spans, _logprobs(model, hidden_TD).split(counts.tolist()), strict=True):
            yield sequence, start, logp


class _Cached:
    """The `Attend` of one pass over rows `position_T` of sequences `sequence_T`, with keys and values kept."""

    def __init__(self, spec: ModelSpec, sequences: int) -> None:
        kv_heads, key_width, value_width = spec.cache_shape
        self.k = [torch.zeros(sequences, kv_heads, LONGEST, key_width) for _ in range(spec.layers)]
        self.v = [torch.zeros(sequences, kv_heads, LONGEST, value_width) for _ in range(spec.layers)]
        self.sequence_T = self.position_T = np.zeros(0, np.int64)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, exact: bool = False) -> Tensor:
        at = torch.from_numpy(self.sequence_T), slice(None), torch.from_numpy(self.position_T)
        self.k[layer][at], self.v[layer][at] = k_TGd, v_TGe
        return kernels.attend(q_THd, self.k[layer], self.v[layer], self.sequence_T, self.position_T)


def _logprobs(model: Transformer, hidden_TD: Tensor) -> Tensor:
    return torch.log_softmax(model.logits(hidden_TD), dim=-1)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
