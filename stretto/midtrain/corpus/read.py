"""A finished corpus: its manifest and its documents. For evaluations, a mere folder of source files as well."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from stretto.midtrain.corpus import quality
from stretto.midtrain.corpus.build import DOCUMENTS, FORMAT, MANIFEST
from stretto.midtrain.corpus.document import Blob, Document
from stretto.midtrain.corpus.language import language

SOURCE = (
    "python", "javascript", "jsx", "ts", "tsx", "java", "c", "c++", "c#", "go", "rust", "ruby", "php", "scala",
    "kotlin", "swift", "shell", "lua", "perl", "r", "julia", "haskell", "sql", "zig", "dart", "elixir",
)  # fmt: skip
"""Languages that are read of a folder that is no corpus."""
LARGEST = 1 << 20
"""Bytes of a file there; larger ones are passed over."""


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


def held_out(folder: Path) -> Iterator[Document]:
    """Documents to evaluate on: of a corpus, or every source file below a folder, by name. Raises ValueError."""
    if (folder / MANIFEST).is_file():
        manifest(folder)
        yield from documents(folder)
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give a corpus of `stretto corpus build`, or a folder of source files")
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if hidden or path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
            continue
        blob = Blob(repository=folder.name, path=inside.as_posix(), data=path.read_bytes())
        spoken, wanted = language(blob, SOURCE)
        text = quality.decode(blob)
        if wanted and isinstance(text, str) and text.strip():
            name = str(folder)
            yield Document(source=name, repository=folder.name, path=blob.path, text=text, language=spoken)
