"""One chunk of items through every filter that looks at a file or a repository alone.

    read ─▶ name ─▶ bytes ─▶ language ─▶ text ─▶ licence ─▶ evaluation ─▶ credentials ─▶ spool + what duplicates need

Cheap filters go first. What needs the whole corpus (duplicates) is left to `build.py`. Documents go through the later
filters some 48 MB at a time, so that memory does not grow with the chunk.
"""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import zstandard

from stretto.midtrain.corpus import credentials, duplicates, quality, rows, sources
from stretto.midtrain.corpus.document import Blob, Document, LeftOut, Reason
from stretto.midtrain.corpus.evaluation import Answers
from stretto.midtrain.corpus.language import language
from stretto.midtrain.corpus.licences import Licences, licence_folder, tells_licence, together
from stretto.midtrain.corpus.order import reading_order
from stretto.midtrain.corpus.plan import Plan
from stretto.midtrain.corpus.sources import Item
from stretto.midtrain.corpus.tokenised import plain, tokenise

TRANSCRIPT = "transcript"
"""The language of conversations."""
GROUP, BATCH = 48 << 20, 1 << 20
"""Characters that are scanned for credentials in one go, and that are tokenised in one go."""


@dataclass(frozen=True)
class Sieve:
    """What every chunk is filtered with; made once, shared by forked workers."""

    plan: Plan
    licences: Licences
    answers: Answers


@dataclass
class Sifted:
    """One chunk's result. The documents themselves lie in `spool`, in the order of `names`."""

    spool: Path
    names: list[str] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    signatures: np.ndarray = field(default_factory=lambda: np.empty((0, 3, duplicates.VALUES), np.uint32))
    left: list[LeftOut] = field(default_factory=list)
    read_bytes: int = 0
    seconds: Counter[str] = field(default_factory=Counter)  # CPU time by stage


class Stages:
    """Adds up the CPU time of the stages one after the other."""

    def __init__(self, into: Counter[str]):
        self._into, self._last = into, time.process_time()

    def done(self, stage: str) -> None:
        now = time.process_time()
        self._into[stage] += now - self._last  # type: ignore[assignment]
        self._last = now


def sift(sieve: Sieve, items: list[Item], spool: Path) -> Sifted:
    """Filter the items and write what is left to `spool`."""
    result = Sifted(spool)
    stages = Stages(result.seconds)
    repositories = (documents for item in items for documents in _repositories(sieve, item, result, stages))
    made: list[np.ndarray] = []
    with spool.open("wb") as raw, zstandard.ZstdCompressor(level=1).stream_writer(raw) as file:
        for group in _runs((document for documents in repositories for document in documents), GROUP):
            kept = _clean(sieve, group, result, stages)
            for document, signature, sizes in kept:
                result.names.append(document.name)
                result.keys.append(duplicates.exact_key(document.text))
                result.sizes.append(sizes)
                made.append(signature)
                body = msgspec.msgpack.encode(document)
                file.write(len(body).to_bytes(4, "big") + body)
            stages.done("write")
    if made:
        result.signatures = np.stack(made)
    return result


def _runs(documents: Iterable[Document], limit: int) -> Iterator[list[Document]]:
    """Consecutive documents, about `limit` characters at a time."""
    run: list[Document] = []
    size = 0
    for document in documents:
        run.append(document)
        size += len(document.text)
        if size >= limit:
            yield run
            run, size = [], 0
    if run:
        yield run


def _clean(
    sieve: Sieve, group: list[Document], result: Sifted, stages: Stages
) -> list[tuple[Document, np.ndarray, list[int]]]:
    """(document, its MinHashes, its sizes) of those that hold no evaluation answer and no
    credentials."""
    kept: list[tuple[Document, np.ndarray, list[int]]] = []
    for batch in _runs(group, BATCH):
        texts = [document.text for document in batch]
        tokens = tokenise(texts)
        simple = plain(tokens)
        stages.done("tokens")
        found = sieve.answers.found(texts, tokens, simple, sieve.plan.corpus.evaluation_share)
        result.left += [_left_document(batch[number], Reason.EVALUATION, why) for number, why in found.items()]
        stages.done("evaluation")
        made, sizes = duplicates.signatures(tokens, simple), duplicates.sizes(tokens, simple).tolist()
        kept += [one for number, one in enumerate(zip(batch, made, sizes, strict=True)) if number not in found]
        stages.done("signatures")
    if sieve.plan.corpus.secrets:
        secrets, seconds = credentials.find([document.text for document, _, _ in kept])
        result.seconds["credentials"] += seconds  # type: ignore[assignment]
        result.left += [_left_document(kept[number][0], Reason.SECRET, kind) for number, kind in secrets.items()]
        kept = [one for number, one in enumerate(kept) if number not in secrets]
    stages.done("credentials")
    return kept


def _repositories(sieve: Sieve, item: Item, result: Sifted, stages: Stages) -> Iterator[list[Document]]:
    """One item's documents that pass the filters by name, text and licence, a repository at once, in reading order; of
    rows, one repository's neighbours at once, at most some 48 MB of them."""
    of_rows = item.path.name.endswith(rows.ENDINGS)
    kept: list[tuple[Blob, str, str]] = []  # blob, text, language
    about: dict[str, str] = {}
    held = 0
    for blob in sources.read(item):
        if isinstance(blob, LeftOut):
            result.left.append(blob)
            continue
        size = len(blob.data)
        result.read_bytes += size
        if not of_rows and tells_licence(blob.path):
            about[blob.path] = blob.data if isinstance(blob.data, str) else blob.data.decode("utf-8", "replace")
        one, other = _text(sieve, blob)
        if isinstance(one, Reason):
            result.left.append(LeftOut(item.source.path, blob.repository, blob.path, one, other, size))
            continue
        if of_rows and kept and (held >= GROUP or kept[-1][0].repository != blob.repository):
            stages.done("read")
            yield _ordered(_licensed(sieve, item, kept, about, result, stages), stages)
            kept, held = [], 0
        kept.append((blob, one, other))
        held += size
    stages.done("read")
    yield _ordered(_licensed(sieve, item, kept, about, result, stages), stages)


def _text(sieve: Sieve, blob: Blob) -> tuple[str, str] | tuple[Reason, str]:
    """(its text, its language), or why it is left out."""
    corpus = sieve.plan.corpus
    if why := quality.by_path(blob.path):
        return why
    text = quality.decode(blob)
    if not isinstance(text, str):
        return text
    if blob.messages:
        return text, TRANSCRIPT
    spoken, wanted = language(blob, corpus.languages)
    if not wanted:
        return Reason.LANGUAGE, spoken
    return quality.by_text(text, corpus) or (text, spoken)


def _ordered(documents: list[Document], stages: Stages) -> list[Document]:
    order = reading_order([(document.path, document.text) for document in documents])
    stages.done("order")
    return [documents[at] for at in order]


def _licensed(
    sieve: Sieve,
    item: Item,
    kept: list[tuple[Blob, str, str]],
    about: dict[str, str],
    result: Sifted,
    stages: Stages,
) -> list[Document]:
    if not kept:
        return []
    licences = sieve.licences
    folders: dict[str, dict[str, str]] = {}
    for path, text in about.items():
        folders.setdefault(licence_folder(path), {})[path] = text
    whole = licences.of_repository(folders.pop("", {}), item.source.licence)
    inside = {folder: said for folder, texts in folders.items() if (said := licences.of_repository(texts, ""))}
    documents = []
    for blob, text, spoken in kept:
        own = licences.of_file(text)
        here = [said for folder, said in inside.items() if blob.path.startswith(f"{folder}/")]
        if spoken == TRANSCRIPT:
            licence = together([blob.licence or whole, own])
        else:
            licence = together([own or blob.licence or whole, *sorted(here)])
        document = Document(
            source=item.source.path,
            repository=blob.repository,
            path=blob.path,
            text=text,
            language=spoken,
            licence=licence,
            messages=blob.messages,
        )
        if licences.permits(licence):
            documents.append(document)
        else:
            result.left.append(_left_document(document, Reason.LICENCE, licence or "none found"))
    stages.done("licences")
    return documents


def _left_document(document: Document, reason: Reason, detail: str) -> LeftOut:
    return LeftOut(document.source, document.repository, document.path, reason, detail, len(document.text))


def read_spool(spool: Path) -> Iterator[Document]:
    """What `sift` wrote, in order."""
    decoder = msgspec.msgpack.Decoder(Document)
    with spool.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as unpacked:
        file = io.BufferedReader(cast(io.RawIOBase, unpacked), 1 << 20)
        while size := file.read(4):
            yield decoder.decode(file.read(int.from_bytes(size, "big")))
