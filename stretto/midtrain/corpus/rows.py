"""Rows of JSONL and parquet files: `text` or `content`, with `path`, `repo`, `lang` and `license` where they are; or a
conversation as `messages`."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import zstandard

from stretto.midtrain.corpus.document import Blob, LeftOut, Reason
from stretto.midtrain.corpus.plan import Source

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
ROW_LIMIT = 32 << 20
"""Bytes of one line of JSONL; a longer one is left out without being held in memory."""
ROWS_AT_ONCE = 256


def read(path: Path, source: Source) -> Iterator[Blob | LeftOut]:
    """Blobs of one file of rows, in order. Raises OSError or ValueError where the file itself can't be read."""
    for number, row in _parquet(path) if path.suffix == ".parquet" else _jsonl(path):
        where = f"{path.name}:{number}"
        if isinstance(row, LeftOut):
            yield msgspec.structs.replace(
                row, source=source.path, repository=source.repository or path.name, path=where
            )
        else:
            yield _blob(row, where, path, source)


def _blob(row: Any, where: str, path: Path, source: Source) -> Blob | LeftOut:
    repository = source.repository or path.name
    if not isinstance(row, dict):
        return LeftOut(source.path, repository, where, Reason.UNREADABLE, "the row is no object")
    repository = source.repository or _text(row, "repo", "repository", "repo_name") or path.name
    licence = source.licence or _text(row, "license", "licence")
    messages = row.get("messages")
    if messages is not None:
        if not _conversation(messages):
            return LeftOut(
                source.path, repository, where, Reason.UNREADABLE, "messages is no list of roles and contents"
            )
        flat = "\n".join(str(message.get("content") or "") for message in messages)
        return Blob(repository=repository, path=where, data=flat, licence=licence, messages=tuple(messages))
    text = _text(row, "text", "content")
    if not text:
        named = ", ".join(map(str, row)) or "none"
        return LeftOut(
            source.path, repository, where, Reason.NO_TEXT, f"needs text, content or messages; it has {named}"
        )
    named = _text(row, "path", "file", "filename") or where
    language = _text(row, "lang", "language")
    return Blob(repository=repository, path=named, data=text, language=language, licence=licence)


def _conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str | None)
            for message in messages
        )
    )


def _text(row: dict[str, Any], *names: str) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, list) and value and isinstance(value[0], str):  # some sets list a file's licences
            value = value[0] if len(value) == 1 else " AND ".join(map(str, value))
        if isinstance(value, str) and value:
            return value
    return ""


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with _opened(path) as stream:
        number = 0
        while line := stream.readline(ROW_LIMIT):
            number += 1
            if len(line) == ROW_LIMIT and not line.endswith(b"\n"):
                size = len(line)
                while (more := stream.readline(ROW_LIMIT)) and not more.endswith(b"\n"):
                    size += len(more)
                yield (
                    number,
                    LeftOut("", "", "", Reason.LONG_ROW, f"longer than {ROW_LIMIT >> 20} MiB", size + len(more)),
                )
            elif line.strip():
                try:
                    yield number, msgspec.json.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    yield number, LeftOut("", "", "", Reason.UNREADABLE, f"not JSON: {error}", len(line))


def _opened(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".zst":
        raw = path.open("rb")
        return cast(BinaryIO, io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, closefd=True)))
    return path.open("rb")


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError("reading parquet needs pyarrow: pip install 'stretto[corpus]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except arrow.ArrowException as error:
        raise ValueError(f"no parquet file that can be read: {error}") from error
