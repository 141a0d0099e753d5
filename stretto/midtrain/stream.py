"""Documents and packed batches of mid-training, as a pure function of (phase, seed, step).

Documents come in blocks; a block is made from its number alone. The stream's state is therefore two integers, and a
resumed run reads exactly the documents it would have read.
"""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.harness.chat import Chat
from stretto.midtrain.demonstrator import Document, transcripts
from stretto.midtrain.mistakes import corrected
from stretto.model.transformer import Transformer

BLOCK = 128
"""Documents of one block."""

MAX_TOKENS = 400
"""Longer documents are cut."""


@dataclass(frozen=True)
class Mixture:
    """Shares of a phase's documents; what is left are transcripts of `agent`."""

    agent: str  # "careful" or "hasty"
    mistakes: float = 0.0  # the model as it was when the phase began, put right after its own wrong edits
    code: float = 0.0  # the standard library's source
    copying: float = 0.0  # random tokens, repeated: the cheapest way to learn to copy


@dataclass
class Stream:
    """An endless stream of packed batches. `block` and `offset` are its whole state."""

    mixture: Mixture
    chat: Chat
    seed: int
    model: Transformer | None = None  # whose mistakes; needed when the mixture has any
    block: int = 0
    offset: int = 0

    def batch(self, tokens: int, copying: float | None = None) -> list[Document]:
        """The next documents, about `tokens` in all. `copying` overrides the mixture's share (it is annealed)."""
        documents, total = [], 0
        while total < tokens:
            if self.offset == 0:
                self._documents = self._make(copying if copying is not None else self.mixture.copying)
            documents.append(self._documents[self.offset])
            total += len(documents[-1].ids)
            self.offset += 1
            if self.offset == BLOCK:
                self.block, self.offset = self.block + 1, 0
        return documents

    def restore(self, block: int, offset: int, copying: float) -> None:
        self.block, self.offset = block, offset
        self._documents = self._make(copying)

    def _make(self, copying: float) -> list[Document]:
        rng = random.Random(f"{self.seed}/{self.mixture.agent}/{self.block}")
        number = self.seed * 1_000_003 + self.block
        agent = transcripts(self.chat, number, self.mixture.agent)
        own = corrected(self.model, self.chat, number) if self.model is not None else iter(())
        documents = []
        for _ in range(BLOCK):
            draw = rng.random()
            if draw < copying:
                documents.append(_copy(rng, self.chat.vocab_size))
            elif draw < copying + self.mixture.code:
                documents.append(_code(rng, self.chat))
            else:
                document = next(own if draw > 1 - self.mixture.mistakes else agent)
                documents.append(Document(document.ids[:MAX_TOKENS], document.weights[:MAX_TOKENS]))
        return documents


def library_files() -> list[Path]:
    """The standard library's own modules (top level), in a fixed order."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def tokenizer_texts(chat_texts: Iterator[str], documents: int) -> Iterator[str]:
    """What the tokenizer is trained on: transcripts, and the start of sixty library modules."""
    yield from itertools.islice(chat_texts, documents)
    for path in library_files()[:60]:
        yield path.read_text(errors="ignore")[:20_000]


def _code(rng: random.Random, chat: Chat) -> Document:
    text = rng.choice(library_files()).read_text(errors="ignore")
    start = text.find("\n", rng.randrange(max(1, len(text) - 800))) + 1
    ids = chat.encode(text[start : start + 800])[:256] or chat.stop
    return Document(ids, [0.3] * len(ids))


def _copy(rng: random.Random, vocabulary: int) -> Document:
    run = [rng.randrange(vocabulary) for _ in range(rng.randint(8, 40))]
    return Document(run + run + run, [0.0] * len(run) + [0.5] * (2 * len(run)))
