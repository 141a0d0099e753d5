"""Packed rows as training sees them, for people: parts framed, control tokens coloured, what is not learnt dim."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from stretto.midtrain.corpus.document import Document
from stretto.midtrain.tokens.documents import TokenDocument, token_documents
from stretto.midtrain.tokens.marks import Encoder
from stretto.midtrain.tokens.packing import best_fit

SHOWN = 1500
"""Characters of a part that are shown."""


def sample(
    documents: Iterable[Document], count: int, tokenizer: Path, row: int, fim: float, seed: int, console: Console
) -> None:
    """Pack the first documents and show `count` rows."""
    encoder = Encoder(tokenizer)
    marks = encoder.marks(fim=fim > 0)
    enough = count * row * 8
    held: list[TokenDocument] = []
    for document in token_documents(documents, encoder, marks, row, fim, seed):
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
