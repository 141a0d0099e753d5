"""A finished corpus: its manifest and its documents."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from stretto.midtrain.corpus.build import DOCUMENTS, FORMAT, MANIFEST
from stretto.midtrain.corpus.document import Document


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
