"""Rows of JSONL and parquet files: `text` or `content`, with `path`, `repo`, `lang` and `license` where they are; or a
conversation as `messages`."""

from __future__ import annotations

import codecs
import gzip
import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import msgspec
import zstandard

from stretto.midtrain.corpus.document import Blob, LeftOut, Reason
from stretto.midtrain.corpus.plan import Source

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
ROW_LIMIT = 32 << 20
"""Bytes of one line of JSONL; a longer one is left out without being held in memory."""
ROWS_AT_ONCE, BYTES_AT_ONCE = 256, 16 << 20
"""Rows of parquet that are read together, and how many bytes they may have in the mean."""
TEXTS, PATHS, LANGUAGES = ("text", "content"), ("path", "file", "filename"), ("lang", "language")
REPOSITORIES, LICENCES = ("repo", "repository", "repo_name"), ("license", "licence")
EXPANSION, ALWAYS = 200, 1 << 30
"""What is packed may be so many times as large unpacked, and so many bytes in any case."""


class Allowance:
    """Stops what unpacks to more than anybody would pack."""

    def __init__(self, packed: int):
        self._left = self._whole = max(ALWAYS, EXPANSION * packed)

    def take(self, size: int) -> None:
        """Raises ValueError when it is used up."""
        self._left -= size
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {self._whole >> 20} MiB, and the rest is left out")


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
    repository = source.repository or _text(row, *REPOSITORIES) or path.name
    licence = source.licence or _text(row, *LICENCES)
    messages = row.get("messages")
    if messages is not None:
        if not _conversation(messages):
            return LeftOut(
                source.path, repository, where, Reason.UNREADABLE, "messages is no list of roles and contents"
            )
        flat = "\n".join(_strings(messages))
        return Blob(repository=repository, path=where, data=flat, licence=licence, messages=tuple(messages))
    data = next((value for name in TEXTS if isinstance(value := row.get(name), str | bytes) and value), "")
    if not data:
        named = ", ".join(map(str, row)) or "none"
        return LeftOut(
            source.path, repository, where, Reason.NO_TEXT, f"needs text, content or messages; it has {named}"
        )
    named = _text(row, *PATHS) or where
    language = _text(row, *LANGUAGES)
    inside = PurePosixPath(named.replace("\\", "/"))
    if inside.is_absolute() or ".." in inside.parts:
        return LeftOut(source.path, repository, where, Reason.UNSAFE_PATH, named, len(data))
    return Blob(repository=repository, path=named, data=data, language=language, licence=licence)


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


def _strings(part: Any) -> Iterator[str]:
    """Everything a conversation says, tool calls and thoughts too; not who says it."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, list):
        for one in part:
            yield from _strings(one)
    elif isinstance(part, dict):
        for name, one in part.items():
            if name not in ("role", "type", "id"):
                yield from _strings(one)


def _text(row: dict[str, Any], *names: str) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, list) and value and isinstance(value[0], str):  # some sets list a file's licences
            value = value[0] if len(value) == 1 else " AND ".join(map(str, value))
        if isinstance(value, str) and value:
            return value
    return ""


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    allowance = Allowance(path.stat().st_size)
    with _opened(path) as stream:
        number = 0
        while line := stream.readline(ROW_LIMIT):
            number += 1
            size = len(line)
            allowance.take(size)
            if size == ROW_LIMIT and not line.endswith(b"\n"):
                while (more := stream.readline(ROW_LIMIT)) and not more.endswith(b"\n"):
                    size += len(more)
                    allowance.take(len(more))
                yield number, _long(size + len(more))
            elif line := line.removeprefix(codecs.BOM_UTF8).strip():
                try:
                    yield number, msgspec.json.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    yield number, LeftOut("", "", "", Reason.UNREADABLE, f"not JSON: {error}", len(line))


def _long(size: int) -> LeftOut:
    return LeftOut("", "", "", Reason.LONG_ROW, f"longer than {ROW_LIMIT >> 20} MiB", size)


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
            named = file.schema_arrow.names
            wanted = (*TEXTS, "messages", *PATHS, *LANGUAGES, *REPOSITORIES, *LICENCES)
            if not {*TEXTS, "messages"} & set(named):
                for number in range(file.metadata.num_rows):
                    yield number + 1, dict.fromkeys(named)
                return
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            mean = sum(group.total_byte_size for group in groups) // max(1, file.metadata.num_rows)
            at_once = min(ROWS_AT_ONCE, max(1, BYTES_AT_ONCE // max(1, mean)))
            number = 0
            for batch in file.iter_batches(at_once, columns=[name for name in named if name in wanted]):
                for at in range(len(batch)):  # one at a time: a short column may stand for much text
                    number += 1
                    size = batch.slice(at, 1).nbytes
                    yield number, _long(size) if size > ROW_LIMIT else batch.slice(at, 1).to_pylist()[0]
    except arrow.ArrowException as error:
        raise ValueError(f"no parquet file that can be read: {error}") from error
