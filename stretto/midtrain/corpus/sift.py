"""One chunk of items through every filter that looks at a file or a repository alone.

    read ─▶ name ─▶ bytes ─▶ language ─▶ text ─▶ licence ─▶ evaluation ─▶ credentials ─▶ spool + what duplicates need

Cheap filters go first. What needs the whole corpus (duplicates) is left to `build.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from stretto.midtrain.corpus import credentials, duplicates, quality, sources
from stretto.midtrain.corpus.document import Blob, Document, LeftOut, Reason
from stretto.midtrain.corpus.evaluation import Answers
from stretto.midtrain.corpus.language import language
from stretto.midtrain.corpus.licences import METADATA, Licences, is_licence_file
from stretto.midtrain.corpus.order import reading_order
from stretto.midtrain.corpus.plan import Plan
from stretto.midtrain.corpus.shingles import bare, token_hashes
from stretto.midtrain.corpus.sources import Item

TRANSCRIPT = "transcript"
"""The language of conversations."""


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
    tokens: list[int] = field(default_factory=list)
    signatures: np.ndarray = field(default_factory=lambda: np.empty((0, duplicates.VALUES), np.uint32))
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
    kept: list[Document] = []
    hashes: list[np.ndarray] = []
    for item in items:
        for document in _repository(sieve, item, result, stages):
            hashes_T = token_hashes(document.text)
            share, answer = sieve.answers.worst(hashes_T)
            if 0 < share < sieve.plan.corpus.evaluation_share:  # comments may lie between what belongs together
                share, answer = max((share, answer), sieve.answers.worst(token_hashes(bare(document.text))))
            if share >= sieve.plan.corpus.evaluation_share:
                result.left.append(_left_document(document, Reason.EVALUATION, f"{share:.0%} of {answer}"))
                continue
            kept.append(document)
            hashes.append(hashes_T)
        stages.done("evaluation")
    if sieve.plan.corpus.secrets:
        found, seconds = credentials.find([document.text for document in kept])
        result.seconds["credentials"] += seconds  # type: ignore[assignment]
        for number, kind in found.items():
            result.left.append(_left_document(kept[number], Reason.SECRET, kind))
        stay = [number for number in range(len(kept)) if number not in found]
        kept, hashes = [kept[number] for number in stay], [hashes[number] for number in stay]
    stages.done("credentials")
    result.signatures = duplicates.signatures(hashes)
    result.keys = [duplicates.exact_key(document.text) for document in kept]
    result.names = [document.name for document in kept]
    result.tokens = [len(each) for each in hashes]
    stages.done("signatures")
    _write(spool, kept)
    stages.done("write")
    return result


def _repository(sieve: Sieve, item: Item, result: Sifted, stages: Stages) -> list[Document]:
    """One item's documents that pass the filters by name, text and licence, in reading order."""
    corpus = sieve.plan.corpus
    kept: list[tuple[Blob, str, str]] = []  # blob, text, language
    about: dict[str, str] = {}
    for blob in sources.read(item):
        if isinstance(blob, LeftOut):
            result.left.append(blob)
            continue
        size = len(blob.data)
        result.read_bytes += size
        name = blob.path.rpartition("/")[2]
        if is_licence_file(blob.path) or (blob.path.count("/") <= 1 and name in METADATA):
            text = blob.data if isinstance(blob.data, str) else blob.data.decode("utf-8", "replace")
            about[blob.path] = text
        why = quality.by_path(blob.path)
        spoken, wanted = (TRANSCRIPT, True) if blob.messages else language(blob, corpus.languages)
        text = "" if why else quality.decode(blob)
        if not why and not isinstance(text, str):
            why = text
        if not why and not wanted:
            why = (Reason.LANGUAGE, spoken)
        if not why and not blob.messages:
            assert isinstance(text, str)
            why = quality.by_text(text, corpus)
        if why:
            result.left.append(LeftOut(item.source.path, blob.repository, blob.path, why[0], why[1], size))
        else:
            assert isinstance(text, str)
            kept.append((blob, text, spoken))
    stages.done("read")
    documents = _licensed(sieve, item, kept, about, result)
    stages.done("licences")
    order = reading_order([(document.path, document.text) for document in documents])
    stages.done("order")
    return [documents[at] for at in order]


def _licensed(
    sieve: Sieve, item: Item, kept: list[tuple[Blob, str, str]], about: dict[str, str], result: Sifted
) -> list[Document]:
    if not kept:
        return []
    licences = sieve.licences
    upper = {path: text for path, text in about.items() if path.count("/") <= 1}
    whole = licences.of_repository(upper, item.source.licence)
    deeper = {path: text for path, text in about.items() if path not in upper}
    inside = {path.rpartition("/")[0]: licences.of_repository({path: text}, "") for path, text in deeper.items()}
    documents = []
    for blob, text, spoken in kept:
        licence = (licences.of_file(text) if spoken != TRANSCRIPT else "") or blob.licence or whole
        here = sorted({said for folder, said in inside.items() if said and blob.path.startswith(f"{folder}/")})
        licence = " AND ".join(f"({said})" for said in (licence, *here) if said) if here else licence
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
    return documents


def _left_document(document: Document, reason: Reason, detail: str) -> LeftOut:
    return LeftOut(document.source, document.repository, document.path, reason, detail, len(document.text))


def _write(spool: Path, documents: list[Document]) -> None:
    pack = zstandard.ZstdCompressor(level=1)
    with spool.open("wb") as raw, pack.stream_writer(raw) as file:
        for document in documents:
            body = msgspec.msgpack.encode(document)
            file.write(len(body).to_bytes(4, "big") + body)


def read_spool(spool: Path) -> list[Document]:
    """What `sift` wrote, in order."""
    decoder = msgspec.msgpack.Decoder(Document)
    documents = []
    with spool.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as file:
        data = memoryview(file.read())
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        documents.append(decoder.decode(data[at + 4 : at + 4 + size]))
        at += 4 + size
    return documents
