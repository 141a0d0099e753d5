"""Bits per byte on held-out text: a loss that tokenizers of different vocabularies can be compared by.

Each document is read in windows of a row's length, every token predicted from those before it in its window; bits are
divided by the UTF-8 bytes of the text. By language.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from stretto.midtrain.corpus.document import Document
from stretto.midtrain.corpus.read import documents as documents_of
from stretto.midtrain.corpus.read import manifest
from stretto.midtrain.tokens.marks import Encoder
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.transformer import Transformer

BATCH_TOKENS = 4096
WINDOW = 1024
"""Tokens of a window, where a command measures: the same for every model."""


@dataclass(frozen=True)
class Bits:
    """Of one language."""

    bits_per_byte: float
    bytes: int
    documents: int


def show(model: Path, corpus: Path, as_json: bool, console: Console) -> int:
    """`stretto eval MODEL --bpb DIR`: measure and print."""
    manifest(corpus)  # refuses what is no complete corpus
    encoder = Encoder(model)
    found = bits_per_byte(checkpoint.load(model), encoder, documents_of(corpus), WINDOW)
    if as_json:
        print(json.dumps({name: asdict(one) for name, one in found.items()}))
        return 0
    table = Table(title=f"{model.name} on {corpus}, windows of {WINDOW} tokens")
    for column in ("", "bits per byte", "MB", "documents"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in found.items():
        table.add_row(name, f"{one.bits_per_byte:.4f}", f"{one.bytes / 1e6:.2f}", f"{one.documents:,}")
    console.print(table)
    return 0


@torch.inference_mode()
def bits_per_byte(model: Transformer, encoder: Encoder, documents: Iterable[Document], window: int) -> dict[str, Bits]:
    """By language, and `all` together. The first token of a window is predicted from the end token before it."""
    start = encoder.end
    nats: dict[str, float] = defaultdict(float)
    sizes: dict[str, int] = defaultdict(int)
    counts: dict[str, int] = defaultdict(int)
    batch: list[tuple[str, list[int]]] = []
    for document in documents:
        language = document.language or "unknown"
        sizes[language] += len(document.text.encode("utf-8", "surrogatepass"))
        counts[language] += 1
        ids = encoder.encode([document.text])[0]
        for at in range(0, len(ids), window - 1):
            batch.append((language, [start, *ids[at : at + window - 1]]))
            if sum(len(part) for _, part in batch) >= BATCH_TOKENS:
                _measure(model, batch, nats)
                batch = []
    if batch:
        _measure(model, batch, nats)
    found = {
        name: Bits(nats[name] / math.log(2) / max(1, sizes[name]), sizes[name], counts[name]) for name in sorted(sizes)
    }
    whole = sum(nats.values()) / math.log(2) / max(1, sum(sizes.values()))
    return {**found, "all": Bits(whole, sum(sizes.values()), sum(counts.values()))}


def _measure(model: Transformer, batch: list[tuple[str, list[int]]], nats: dict[str, float]) -> None:
    lengths = [len(part) for _, part in batch]
    ids_T = torch.tensor([id for _, part in batch for id in part])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    hidden_TD = model(ids_T, positions_T, PackedCausal(lengths)).hidden_TD
    ends = torch.tensor(lengths).cumsum(0) - 1
    at_N = torch.ones(len(ids_T), dtype=torch.bool).index_fill_(0, ends, False).nonzero().squeeze(1)
    logp_N, _ = token_logprobs(model, hidden_TD[at_N], ids_T[at_N + 1])
    for (language, _), part in zip(batch, logp_N.double().split([length - 1 for length in lengths]), strict=True):
        nats[language] -= float(part.sum())
