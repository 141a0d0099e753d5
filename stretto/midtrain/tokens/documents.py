"""Clean texts become token documents: repositories in reading order, transcripts whose agent alone is learnt from.

A repository is one document as long as it fits a row; a longer one is cut between files, and each part begins with the
repository's name again. A share `fim` of the files is written as fill-in-the-middle.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from stretto.midtrain.corpus.document import Document
from stretto.midtrain.tokens.fim import fill_in
from stretto.midtrain.tokens.marks import Encoder, Marks


@dataclass(frozen=True)
class TokenDocument:
    """`ids` and which of them are learnt (`learn[i]`: the loss of predicting `ids[i]` counts)."""

    ids: np.ndarray  # uint32 [T]
    learn: np.ndarray  # bool [T]
    domain: str  # what the mixture weighs: a language, or `transcript`
    name: str


def token_documents(
    documents: Iterable[Document], encoder: Encoder, marks: Marks, row: int, fim: float, seed: int
) -> Iterator[TokenDocument]:
    """Everything of a corpus, in order. `row`: tokens of a packed row."""
    for repository, files in itertools.groupby(documents, key=lambda document: (document.source, document.repository)):
        together = list(files)
        for transcript in together:
            if transcript.messages:
                yield _transcript(transcript, encoder, marks)
        code = [one for one in together if not one.messages]
        for domain in dict.fromkeys(one.language for one in code):
            rng = random.Random(f"{seed}/{repository}/{domain}")
            same = [one for one in code if one.language == domain]
            yield from _repository(repository[1], domain, same, encoder, marks, row, fim, rng)


def _repository(
    name: str,
    domain: str,
    files: list[Document],
    encoder: Encoder,
    marks: Marks,
    row: int,
    fim: float,
    rng: random.Random,
) -> Iterator[TokenDocument]:
    heading, *paths = encoder.encode([f"{name}\n", *(f"{one.path}\n" for one in files)])
    head = [marks.repository, *heading]
    texts = [None if rng.random() < fim else one.text for one in files]
    plain = iter(encoder.encode([text for text in texts if text is not None]))
    ids = list(head)
    for one, path, text in zip(files, paths, texts, strict=True):
        body = fill_in(one.text, rng, encoder, marks) if text is None else next(plain)
        part = [marks.file, *path, *body]
        if len(ids) > len(head) and len(ids) + len(part) + 1 > row:
            yield _learn_all([*ids, marks.end], domain, name)
            ids = list(head)
        ids += part
    if len(ids) > len(head):
        yield _learn_all([*ids, marks.end], domain, name)


def _learn_all(ids: list[int], domain: str, name: str) -> TokenDocument:
    return TokenDocument(np.array(ids, np.uint32), np.ones(len(ids), bool), domain, name)


def _transcript(document: Document, encoder: Encoder, marks: Marks) -> TokenDocument:
    """ChatML, as the harness renders it; only what the assistant wrote is learnt."""
    open_id, close_id = (encoder.tokenizer.token_to_id(word) for word in ("<|im_start|>", "<|im_end|>"))
    if open_id is None or close_id is None:
        raise ValueError(f"{document.name} is a transcript, but the tokenizer lacks <|im_start|> and <|im_end|>")
    ids: list[int] = []
    learn: list[bool] = []
    roles = [str(message["role"]) for message in document.messages]
    contents = [str(message.get("content") or "") for message in document.messages]
    heads = encoder.encode([f"{role}\n" for role in roles])
    newline = encoder.encode(["\n"])[0]
    for role, head, body in zip(roles, heads, encoder.encode(contents), strict=True):
        own = role == "assistant"
        ids += [open_id, *head, *body, close_id, *newline]
        learn += [False] * (1 + len(head)) + [own] * (len(body) + 1) + [False] * len(newline)
    return TokenDocument(np.array([*ids, marks.end], np.uint32), np.array([*learn, False]), "transcript", document.name)
