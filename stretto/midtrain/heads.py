"""Heads for multi-token prediction, taught on a finished network by that network's own distributions (`model.mtp`).

    heads = train_heads(model, (stream.batch(2000) for _ in itertools.count()), steps=600)
    checkpoint.save(model, folder, tokenizer_from=folder, heads=heads)

The network is frozen and runs without gradients, so a step costs little more than a forward pass. Left out: data
parallelism. To train heads with the network instead, add `mtp_loss(…, frozen=False)` to its loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

import torch

from stretto.midtrain.demonstrator import Document
from stretto.model import mtp
from stretto.model.attention import PackedCausal
from stretto.model.mtp import Distilled, Heads, mtp_loss
from stretto.model.transformer import Transformer

WARMUP = 20
"""Steps until the learning rate is at its peak; a cosine down to nothing follows."""


def train_heads(
    model: Transformer,
    batches: Iterable[list[Document]],
    steps: int,
    lr: float = 3e-3,
    guesses: int = 3,
    watch: Callable[[int, Distilled], None] = lambda step, found: None,
) -> Heads:
    """One new head after `steps` batches, taught `guesses` guesses in a row.

    Only tokens of full weight count: those the policy itself will sample. `watch` is told of each step. Raises
    FloatingPointError when the loss is not finite.
    """
    heads = mtp.fresh(model)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step, documents in enumerate(islice(batches, steps)):
        lengths = [len(document.ids) for document in documents]
        ids_T = torch.tensor([i for document in documents for i in document.ids])
        wanted_T = torch.tensor([weight == 1.0 for document in documents for weight in document.weights])
        with torch.no_grad():
            positions_T = torch.cat([torch.arange(length) for length in lengths])
            hidden_TD = model(ids_T, positions_T, PackedCausal(lengths)).hidden_TD
        found = mtp_loss(model, heads, hidden_TD, ids_T, lengths, guesses, wanted_T)
        if not bool(found.loss.isfinite()):
            raise FloatingPointError(f"the loss of the heads is {float(found.loss)} at step {step}")
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        fall = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / WARMUP) * fall
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch(step, found)
    return heads
