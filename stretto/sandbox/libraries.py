"""Python distributions of our own environment, made available in boxes: copied once, with what they require.

A box sees them read-only at `LIBRARIES`; callers put that on PYTHONPATH or `sys.path`. Bytecode is copied along, so
that an import in a box doesn't compile. Distributions that were installed in editable form can't be copied. A name that
is an absolute path is a folder, copied under its own name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath

LIBRARIES = "/opt/libraries"


class LibraryMissing(ValueError):
    """A distribution that is not installed here; the message names it."""


def closure(names: Iterable[str]) -> list[metadata.Distribution]:
    """The distributions `names` and everything they require here, by name. Raises LibraryMissing.

    What is asked for only with an extra, or on another platform, is left out, unless the name has it: `coverage[toml]`.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, "") for name in names]
    while waiting:
        text, wanted_by = waiting.pop()
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise LibraryMissing(f"{text!r} is not the name of a Python distribution: {error}") from None
        name, extras = normal(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            because = f", which {wanted_by} requires," if wanted_by else ""
            raise LibraryMissing(
                f"{name}{because} is not installed in this environment; install it, or leave it out"
            ) from None
        found[name] = distribution
        for line in distribution.requires or ():
            below = Requirement(line)
            if below.marker is None or any(below.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                waiting.append((f"{below.name}[{','.join(below.extras)}]" if below.extras else below.name, name))
    return [found[name] for name in sorted(found)]


def stage(names: Sequence[str], target: Path) -> None:
    """Copy the files of `names` and their requirements, and folders among `names`, into the new folder `target`."""
    target.mkdir(mode=0o755)
    folders = [Path(name) for name in names if name.startswith("/")]
    for folder in folders:
        _stage_folder(folder, target / folder.name)
    for distribution in closure(name for name in names if not name.startswith("/")):
        files = distribution.files
        if files is None:
            raise LibraryMissing(f"{distribution.name} has no list of its files, so it can't be copied into a box")
        for file in files:
            name = PurePosixPath(file)
            origin = Path(str(distribution.locate_file(file)))
            if name.parts[-2:-1] == ("bin",) and ".." in name.parts:
                name = PurePosixPath("bin", name.name)  # a program that comes in a wheel
            elif name.is_absolute() or ".." in name.parts:
                continue  # data beside the packages
            if origin.is_file():
                copy_readable(origin, target / name)
            if name.suffix == ".py":
                for bytecode in origin.parent.glob(f"__pycache__/{origin.stem}.*.pyc"):
                    copy_readable(bytecode, target / name.parent / "__pycache__" / bytecode.name)


def _stage_folder(folder: Path, target: Path) -> None:
    if not folder.is_dir():
        raise LibraryMissing(f"{folder} is not a folder of this machine")
    for origin in folder.rglob("*"):
        if origin.is_file():
            copy_readable(origin, target / origin.relative_to(folder))


def copy_readable(origin: Path, target: Path) -> None:
    if target.exists():
        return
    for folder in reversed(target.parents):
        if not folder.exists():
            folder.mkdir(mode=0o755)
    with origin.open("rb") as file:
        first = file.readline(1024)
        if target.parent.name == "bin" and first.startswith(b"#!") and b"python" in first:
            target.write_bytes(b"#!/usr/bin/env python3\n" + file.read())  # the box's own, not ours
        else:
            shutil.copy2(origin, target)
    target.chmod(0o755 if origin.stat().st_mode & 0o100 else 0o644)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
