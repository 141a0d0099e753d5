"""How fast the corpus builder is: MB of unpacked sources per CPU second, end to end, one process.

What it reads are archives of real Python: those in a folder, or archives made of what any machine has, the standard
library and the largest installed packages, each with its text files and its licence, as a source distribution would
hold them.
Archives are made before the clock starts, and the credentials scanner runs once, since it compiles its rules when it
first meets them. CPU time counts everything from the plan to the manifest: starting the filters, the process that
sifts, the credentials scanner.
"""

from __future__ import annotations

import io
import resource
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from stretto.config import validated
from stretto.midtrain.corpus import build, credentials
from stretto.midtrain.corpus.document import Document
from stretto.midtrain.corpus.licences import is_licence_file
from stretto.midtrain.corpus.plan import Plan
from stretto.midtrain.corpus.read import documents
from stretto.midtrain.corpus.sources import TARS, ZIPS

MEGABYTES, SHARE = 64, 8
"""So much is packed where no sources are given, at most one `SHARE`th of it from one package."""
TEXT = (".py", ".pyi", ".pyx", ".md", ".rst", ".txt", ".toml", ".cfg", ".json")
"""What an archive of sources holds; compiled files and headers of an installed package are not from there."""
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders beside the standard library's sources that are something else."""


def measure(sources: Path | None, place: Path, megabytes: int = MEGABYTES) -> dict[str, Any]:
    """Build a corpus at `place/corpus`; MB per CPU second and CPU seconds by stage. Raises ValueError with a sentence
    for a folder without archives."""
    if sources is not None:
        tree = [{"path": str(sources.resolve() / "*")}]
        if not any(path.name.endswith((*TARS, *ZIPS)) for path in sources.iterdir()):
            raise ValueError(f"--sources {sources} holds no archive ({', '.join((*TARS, *ZIPS))})")
    else:
        pack(place / "archives", megabytes << 20)
        tree = [{"path": "archives/python-*", "licence": "PSF-2.0"}, {"path": "archives/packages/*"}]
    plan = validated(Plan, {"corpus": {"evaluation": ["repair"]}, "source": tree})
    credentials.find(["nothing"])
    before = _cpu_seconds()
    manifest = build.build(plan, place, place / "corpus", workers=1)
    seconds = _cpu_seconds() - before
    stages = manifest["time"]["cpu_s"]
    return {
        "sources": "given" if sources else "the standard library and the largest installed packages",
        "read_mb": round(manifest["read"]["bytes"] / 1e6, 2),
        "kept_mb": round(manifest["kept"]["bytes"] / 1e6, 2),
        "files": manifest["read"]["files"],
        "cpu_s": round(seconds, 2),
        "mb_per_cpu_s": round(manifest["read"]["bytes"] / 1e6 / seconds, 3),
        "kept_mb_per_cpu_s": round(manifest["kept"]["bytes"] / 1e6 / seconds, 3),
        "stages_cpu_s": {**stages, "start and the rest": round(seconds - sum(stages.values()), 2)},
    }


def texts(place: Path) -> Iterator[Document]:
    """The documents of the corpus that `measure` built."""
    return documents(place / "corpus")


def pack(folder: Path, limit: int) -> None:
    """Archives of the standard library (at most half of `limit` bytes) and of installed packages, largest first."""
    (folder / "packages").mkdir(parents=True)
    version = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    left = limit - _archive(folder / f"{version}.tar.gz", version, _standard_library(), limit // 2)
    found = {dist.metadata["Name"]: dist for dist in metadata.distributions() if dist.metadata["Name"]}
    sizes = {
        name: sum(entry.size or 0 for entry in dist.files or [] if entry.suffix in TEXT) for name, dist in found.items()
    }
    for name in sorted(found, key=lambda name: (-sizes[name], name)):
        if left <= 0:
            return
        stem = f"{name}-{found[name].version}"
        most = min(left, limit // SHARE)
        left -= _archive(folder / "packages" / f"{stem}.tar.gz", stem, _package(found[name]), most)


def _standard_library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not SKIPPED & set(inside.parts):
            yield inside.as_posix(), path


def _package(dist: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """Its text files; licences and metadata, which an installed package keeps apart, at the top."""
    code = []
    for entry in sorted(dist.files or [], key=str):
        path, name, file = PurePosixPath(entry.as_posix()), entry.name, Path(str(entry.locate()))
        about = path.parts[0].endswith(".dist-info")
        if not file.is_file() or ".." in path.parts:
            continue
        if about and name == "METADATA":
            yield "PKG-INFO", file
        elif about and is_licence_file(name):
            yield name, file
        elif not about and path.suffix in TEXT:
            code.append((path.as_posix(), file))
    yield from code


def _archive(file: Path, top: str, members: Iterable[tuple[str, Path]], limit: int) -> int:
    """Write a .tar.gz of members (name, file) below the folder `top`, at most `limit` bytes of them; how many."""
    size = 0
    with tarfile.open(file, "w:gz", compresslevel=6) as archive:
        for name, path in members:
            if size + path.stat().st_size > limit:
                continue
            data = path.read_bytes()
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
            size += len(data)
    if not size:
        file.unlink()
    return size


def _cpu_seconds() -> float:
    """Of this process and of the ended ones that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
