"""Where text comes from: repositories, source archives, git bundles, rows, transcripts.

A path is expanded into *items*, the units of work: one repository, one archive, or one file of rows. `read` gives an
item's blobs one by one, and what it could not read as `LeftOut`. Nothing is unpacked to disk; archive members that
would land outside, links and devices are listed and passed over.
"""

from __future__ import annotations

import glob
import lzma
import os
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import zstandard

from stretto.config import ConfigError
from stretto.midtrain.corpus import rows
from stretto.midtrain.corpus.document import Blob, LeftOut, Reason
from stretto.midtrain.corpus.plan import Source

TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
ZIPS = (".zip", ".whl")
MARKS = (
    ".git",
    "pyproject.toml",
    "setup.py",
    "setup.cfg",
    "package.json",
    "Cargo.toml",
    "go.mod",
    "PKG-INFO",
    "LICENSE",
)
"""A folder that holds one of these is a repository; another is a folder of repositories."""
SKIPPED = {".git", ".hg", ".svn"}
MEMBER_LIMIT = 64 << 20
"""Bytes of one archive member that are read; larger ones are left out."""


DAMAGED = (
    OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError,
    struct.error, RuntimeError, ValueError,
)  # fmt: skip
"""What the libraries raise for archives that they can't read."""


@dataclass(frozen=True)
class Item:
    """One unit of work. `size` orders the work, largest first."""

    source: Source
    path: Path
    size: int


def items(sources: tuple[Source, ...], base: Path) -> list[Item]:
    """All items, in order. Raises ConfigError for a source where nothing is."""
    found: list[Item] = []
    for source in sources:
        pattern = str(base / Path(source.path).expanduser())
        paths = [Path(path) for path in sorted(glob.glob(pattern))] if glob.has_magic(pattern) else [Path(pattern)]
        if not paths or not paths[0].exists():
            raise ConfigError(f"source {source.path}: nothing is there ({pattern})")
        for path in paths:
            found += [Item(source, one, _size(one)) for one in _split(path)]
        if not found or found[-1].source is not source:
            raise ConfigError(f"source {source.path} holds no repository, archive, JSONL or parquet file ({pattern})")
    return found


def _split(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _known(path) else []
    if any((path / mark).exists() for mark in MARKS):
        return [path]
    inside = sorted(path.iterdir())
    folders = [one for one in inside if one.is_dir() and not one.is_symlink() and one.name not in SKIPPED]
    files = [one for one in inside if one.is_file() and _known(one)]
    loose = any(one.is_file() and not _known(one) for one in inside)
    return [path] if loose and not files else sorted([*folders, *files])


def _known(path: Path) -> bool:
    return path.name.endswith((*TARS, *ZIPS, ".bundle", *rows.ENDINGS))


def _size(path: Path) -> int:
    return (
        path.stat().st_size if path.is_file() else sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    )


def read(item: Item) -> Iterator[Blob | LeftOut]:
    """Never raises for what the item holds: what can't be read, or holds nothing, is a `LeftOut` that names it."""
    empty = True
    for one in _read(item):
        empty = False
        yield one
    if empty:
        yield _left(item, "", Reason.UNREADABLE, f"{item.path}: it holds nothing")


def _read(item: Item) -> Iterator[Blob | LeftOut]:
    path, name = item.path, item.path.name
    try:
        if path.is_dir():
            yield from _folder(item)
        elif name.endswith(TARS):
            with tarfile.open(path, "r|*") as archive:
                yield from _tar(item, archive)
        elif name.endswith(ZIPS):
            yield from _zip(item)
        elif name.endswith(".bundle"):
            yield from _bundle(item)
        else:
            yield from rows.read(path, item.source)
    except DAMAGED as error:
        yield _left(item, "", Reason.UNREADABLE, f"{path}: {error or type(error).__name__}")


def repository(item: Item) -> str:
    name = item.path.name
    for ending in (*TARS, *ZIPS, ".bundle"):
        name = name.removesuffix(ending)
    return item.source.repository or name or item.path.resolve().name


def _left(item: Item, path: str, reason: Reason, detail: str = "", size: int = 0) -> LeftOut:
    return LeftOut(item.source.path, repository(item), path, reason, detail, size)


def _blob(item: Item, path: str, data: bytes) -> Blob:
    return Blob(repository=repository(item), path=path, data=data, licence=item.source.licence)


def _folder(item: Item) -> Iterator[Blob | LeftOut]:
    for folder, folders, files in os.walk(item.path):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in SKIPPED and name not in links)
        for name in sorted([*files, *links]):
            path = Path(folder, name)
            inside = printable(path.relative_to(item.path).as_posix())
            try:
                if path.is_symlink() or not path.is_file():
                    yield _left(item, inside, Reason.NOT_A_FILE)
                elif (size := path.stat().st_size) > MEMBER_LIMIT:
                    yield _left(item, inside, Reason.TOO_LARGE, size=size)
                else:
                    yield _blob(item, inside, path.read_bytes())
            except OSError as error:
                yield _left(item, inside, Reason.UNREADABLE, error.strerror or str(error))


def _tar(item: Item, archive: tarfile.TarFile) -> Iterator[Blob | LeftOut]:
    allowance = rows.Allowance(item.size)
    for member in archive:
        inside = safe(member.name)
        allowance.take(member.size)
        if member.isdir():
            continue
        if inside is None:
            yield _left(item, printable(member.name), Reason.UNSAFE_PATH, size=member.size)
        elif not member.isreg():
            yield _left(item, inside, Reason.NOT_A_FILE)
        elif member.size > MEMBER_LIMIT:
            yield _left(item, inside, Reason.TOO_LARGE, size=member.size)
        else:
            stream = archive.extractfile(member)
            assert stream is not None
            yield _blob(item, _below(item, inside), stream.read())


def _zip(item: Item) -> Iterator[Blob | LeftOut]:
    allowance = rows.Allowance(item.size)
    with zipfile.ZipFile(item.path) as archive:
        for member in archive.infolist():
            inside = safe(member.filename)
            if member.is_dir():
                continue
            if inside is None:
                yield _left(item, printable(member.filename), Reason.UNSAFE_PATH, size=member.file_size)
            elif member.file_size > MEMBER_LIMIT:
                yield _left(item, inside, Reason.TOO_LARGE, size=member.file_size)
            else:
                try:
                    with archive.open(member) as stream:  # what a header says of its size need not be true
                        data = stream.read(MEMBER_LIMIT)
                except DAMAGED as error:
                    yield _left(item, inside, Reason.UNREADABLE, str(error) or type(error).__name__)
                    continue
                allowance.take(len(data))
                yield _blob(item, _below(item, inside), data)


def _bundle(item: Item) -> Iterator[Blob | LeftOut]:
    """The tree of a git bundle's first branch."""
    with tempfile.TemporaryDirectory() as folder:
        _git("clone", "--quiet", "--bare", str(item.path.resolve()), folder)
        with tarfile.open(fileobj=BytesIO(_git("-C", folder, "archive", "--format=tar", "HEAD")), mode="r|") as archive:
            yield from _tar(item, archive)


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode(errors="replace").strip().splitlines()[-1])
    return done.stdout


def safe(name: str) -> str | None:
    """The member's path inside its archive, or None when it would land outside."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or (path.parts and path.parts[0].endswith(":")):
        return None
    return printable(path.as_posix())


def printable(name: str) -> str:
    """A name whose bytes are no UTF-8, as text that can be written."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _below(item: Item, inside: str) -> str:
    """Source archives hold one folder of their own name; it is no part of the path."""
    first, _, rest = inside.partition("/")
    return rest if rest and first == repository(item) else inside
