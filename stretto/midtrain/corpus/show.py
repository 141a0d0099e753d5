"""What a corpus holds, for people: the counts of its manifest, and packed examples with what is learnt from them."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.midtrain.corpus.build import DOCUMENTS, FORMAT, MANIFEST
from stretto.midtrain.corpus.document import Document
from stretto.midtrain.tokens.documents import TokenDocument, token_documents
from stretto.midtrain.tokens.marks import Encoder
from stretto.midtrain.tokens.packing import best_fit

SHOWN = 1500
"""Characters of a part that are shown."""


def manifest(folder: Path) -> dict[str, Any]:
    """Raises ValueError for a folder that is no complete corpus."""
    try:
        tree = json.loads((folder / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError):
        raise ValueError(
            f"{folder} holds no complete corpus (no {MANIFEST}): run `stretto corpus build` again"
        ) from None
    if tree.get("format") != FORMAT:
        raise ValueError(f"{folder} has a corpus of format {tree.get('format')}; this version reads {FORMAT}")
    return tree


def documents(folder: Path) -> Iterator[Document]:
    """All documents, in order. Raises ValueError when the file is damaged."""
    decoder = msgspec.json.Decoder(Document)
    path = folder / DOCUMENTS
    try:
        with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            for line in io.BufferedReader(stream, 1 << 20):  # type: ignore[arg-type]
                yield decoder.decode(line)
    except (OSError, zstandard.ZstdError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error


def summary(tree: dict[str, Any], console: Console) -> None:
    """The counts of a manifest."""
    table = Table(title="What was read, left out and kept")
    table.add_column("")
    table.add_column("files", justify="right")
    table.add_column("MB", justify="right")
    table.add_row("read", f"{tree['read']['files']:,}", f"{tree['read']['bytes'] / 1e6:.2f}")
    for reason, count in tree["left_out"].items():
        table.add_row(f"  − {reason}", f"{count['files']:,}", f"{count['bytes'] / 1e6:.2f}")
    table.add_row("kept", f"{tree['kept']['files']:,}", f"{tree['kept']['bytes'] / 1e6:.2f}", style="bold")
    console.print(table)
    for what in ("languages", "licences"):
        shares = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in list(tree[what].items())[:8])
        console.print(f"{what}: {shares}", markup=False)
    evaluation = tree["evaluation"]
    console.print(f"compared with {evaluation['answers']} solutions and tests of evaluation tasks", markup=False)


def sample(folder: Path, count: int, tokenizer: Path, row: int, fim: float, seed: int, console: Console) -> None:
    """Pack the corpus's first documents and show `count` rows: each part framed, what is not learnt dim, control tokens
    coloured."""
    encoder = Encoder(tokenizer)
    marks = encoder.marks(fim=fim > 0)
    enough = count * row * 8
    held: list[TokenDocument] = []
    for document in token_documents(documents(folder), encoder, marks, row, fim, seed):
        held.append(document)
        enough -= len(document.ids)
        if enough < 0:
            break
    packed = best_fit([len(document.ids) for document in held], row)
    for number in random.Random(seed).sample(range(len(packed)), min(count, len(packed))):
        size = sum(stop - start for _, start, stop in packed[number])
        console.rule(f"row {number}: {size} of {row} tokens, {len(packed[number])} parts")
        for document, start, stop in packed[number]:
            one = held[document]
            head = f"{one.name} ({one.domain}), tokens {start} to {stop} of {len(one.ids)}"
            console.print(f"── {head}", style="bold", markup=False)
            console.print(_marked(one, start, stop, encoder))


def _marked(one: TokenDocument, start: int, stop: int, encoder: Encoder) -> Text:
    """Control tokens in colour; text that is not learnt is dim."""
    control = {id for id, token in encoder.tokenizer.get_added_tokens_decoder().items() if token.special}
    shown = Text()
    ids, learn = one.ids[start:stop].tolist(), one.learn[start:stop].tolist()
    for (learnt, special), run in itertools.groupby(
        zip(ids, learn, strict=True), key=lambda pair: (pair[1], pair[0] in control)
    ):
        text = encoder.tokenizer.decode([id for id, _ in run], skip_special_tokens=False)
        shown.append(text, style="magenta" if special else "" if learnt else "dim")
        if len(shown) > SHOWN:
            shown.truncate(SHOWN)
            shown.append(" …", style="dim")
            break
    return shown
