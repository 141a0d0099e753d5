"""Packed rows on disk, memory-mapped: what a mid-training run reads.

    <folder>/index.json          written last: format, row length, domains with their counts
    <folder>/<domain>/ids        uint16 or uint32 [tokens]    learn   bool [tokens]
                      parts      int64 [parts + 1]: first token of each part
                      rows       int64 [rows + 1]: first part of each row

A *part* is a document or a piece of one: attention stays inside it, positions count from its start. Documents are
packed as they come, a buffer at a time, so that memory does not grow with the corpus.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from stretto.midtrain.tokens.documents import TokenDocument
from stretto.midtrain.tokens.marks import Encoder
from stretto.midtrain.tokens.packing import best_fit

FORMAT = 1
BUFFER = 1 << 24
"""Tokens of one domain that are packed together."""


@dataclass(frozen=True)
class Row:
    """One packed row: `ids` and `learn` [T], lengths of its parts (they sum to T)."""

    ids: np.ndarray
    learn: np.ndarray
    lengths: list[int]


class Domain:
    """The rows of one domain, by number. Opening costs nothing; pages are read as rows are."""

    def __init__(self, folder: Path, kind: str):
        self._ids = np.memmap(folder / "ids", kind, "r")
        self._learn = np.memmap(folder / "learn", np.bool_, "r")
        self._parts = np.memmap(folder / "parts", np.int64, "r")
        self._rows = np.memmap(folder / "rows", np.int64, "r")

    def __len__(self) -> int:
        return len(self._rows) - 1

    def row(self, number: int) -> Row:
        bounds = np.array(self._parts[self._rows[number] : self._rows[number + 1] + 1])
        start, stop = bounds[0], bounds[-1]
        ids, learn = np.array(self._ids[start:stop], np.int64), np.array(self._learn[start:stop])
        return Row(ids, learn, np.diff(bounds).tolist())


@dataclass(frozen=True)
class Shards:
    """An opened folder."""

    row: int
    domains: dict[str, Domain]

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """Raises ValueError with a sentence for what is no such folder."""
        try:
            index = json.loads((folder / "index.json").read_text())
            if index["format"] != FORMAT:
                raise ValueError(f"{folder} has shards of format {index['format']}; this version reads {FORMAT}")
            domains = {name: Domain(folder / name, index["ids"]) for name in index["domains"]}
            return cls(index["row"], domains)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder} holds no complete shards ({error}): make them again") from error


def fingerprint(encoder: Encoder) -> str:
    """Of a tokenizer: shards made with another are not to be mixed."""
    return xxhash.xxh3_128_hexdigest(encoder.tokenizer.to_str().encode())


def write(documents: Iterable[TokenDocument], encoder: Encoder, row: int, folder: Path) -> dict[str, dict[str, float]]:
    """Pack and write everything; the counts of each domain. Raises ValueError when there is nothing to write."""
    kind = "uint16" if encoder.size <= 1 << 16 else "uint32"
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        writers: dict[str, Writer] = {}
        for document in documents:
            if document.domain not in writers:
                writers[document.domain] = stack.enter_context(Writer(folder / document.domain, row, kind))
            writers[document.domain].add(document)
        counts = {domain: writer.finish() for domain, writer in sorted(writers.items())}
    if not counts:
        raise ValueError("the corpus holds no document, so there is nothing to train on")
    index = {"format": FORMAT, "row": row, "ids": kind, "domains": counts}
    part = folder / "index.part"
    part.write_text(json.dumps(index, indent=1) + "\n")
    part.replace(folder / "index.json")
    return counts


class Writer(contextlib.ExitStack):
    """Packs one domain's documents and appends the rows to its files."""

    def __init__(self, folder: Path, row: int, kind: str):
        super().__init__()
        folder.mkdir(parents=True)
        self._row, self._kind = row, kind
        self._files = {
            name: self.enter_context((folder / name).open("wb")) for name in ("ids", "learn", "parts", "rows")
        }
        self._held: list[TokenDocument] = []
        self._held_tokens = self._documents = self._tokens = self._parts = self._rows = 0

    def add(self, document: TokenDocument) -> None:
        self._held.append(document)
        self._held_tokens += len(document.ids)
        if self._held_tokens >= BUFFER:
            self._pack()

    def finish(self) -> dict[str, float]:
        """Write what is left, and the counts."""
        self._pack()
        self._put("parts", np.array([self._tokens], np.int64))
        self._put("rows", np.array([self._parts], np.int64))
        share = self._tokens / (self._row * self._rows)
        return {"documents": self._documents, "tokens": self._tokens, "rows": self._rows, "fill": round(share, 4)}

    def _pack(self) -> None:
        packed = best_fit([len(document.ids) for document in self._held], self._row)
        pieces = [piece for row in packed for piece in row]
        for name in ("ids", "learn"):
            for document, start, stop in pieces:
                kind = self._kind if name == "ids" else np.bool_
                self._put(name, getattr(self._held[document], name)[start:stop].astype(kind))
        sizes = [0, *(stop - start for _, start, stop in pieces)]
        self._put("parts", self._tokens + np.cumsum(sizes, dtype=np.int64)[:-1])
        self._put("rows", self._parts + np.cumsum([0, *map(len, packed)], dtype=np.int64)[:-1])
        self._documents += len(self._held)
        self._tokens += sum(sizes)
        self._parts += len(pieces)
        self._rows += len(packed)
        self._held, self._held_tokens = [], 0

    def _put(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(array.tobytes())
