"""A host folder read whole, for boxes that can't stand on it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from stretto.sandbox.tree import FOLDER, open_beneath

MAX_FILES, MAX_BYTES, MAX_DEPTH = 4000, 48 << 20, 32


def contents(folder: str | Path) -> tuple[dict[str, bytes], list[str]]:
    """(path -> data of its regular files, those that are programs). Links are left out. ValueError beyond the caps."""
    files: dict[str, bytes] = {}
    programs: list[str] = []
    left = MAX_BYTES
    try:
        for path, mode, data in _below(os.open(folder, FOLDER), "", 0):
            files[path] = data
            left -= len(data)
            if mode & 0o100:
                programs.append(path)
            if len(files) > MAX_FILES or left < 0:
                raise ValueError(
                    f"{folder} has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB, too much to copy into each box"
                )
    except OSError as error:
        raise ValueError(f"{folder} can't be the base of a box: {error}") from error
    return files, programs


def _below(at: int, prefix: str, depth: int) -> Iterator[tuple[str, int, bytes]]:
    """Of the open folder `at`, which is closed."""
    try:
        for name in sorted(os.listdir(at)):
            about = os.stat(name, dir_fd=at, follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode) and depth < MAX_DEPTH:
                yield from _below(open_beneath(at, name, FOLDER), f"{prefix}{name}/", depth + 1)
            elif stat.S_ISREG(about.st_mode):
                with open(open_beneath(at, name, os.O_RDONLY), "rb") as file:
                    yield f"{prefix}{name}", about.st_mode, file.read(MAX_BYTES + 1)
    finally:
        os.close(at)
