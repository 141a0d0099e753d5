"""A Python package with tests, as a factory takes it: a folder or a source archive, cleaned, its parts found."""

from __future__ import annotations

import sys
import tarfile
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from stretto.sandbox.libraries import normal
from stretto.tasks.purge import clean_copy

MAX_FILES, MAX_BYTES = 20_000, 1 << 28
"""Of an archive, unpacked."""
NO_PACKAGES = frozenset(
    "test tests testing docs doc examples example benchmarks bench scripts tools ci requirements".split()
)
NO_MODULES = frozenset("setup.py conftest.py noxfile.py tasks.py fabfile.py".split())
ASIDE = frozenset("docs doc examples example benchmarks benchmark .github scripts".split())
"""Folders whose tests are no tests of the package."""


class SourceError(ValueError):
    """A sentence: why nothing can be made of this folder or archive."""


@dataclass(frozen=True)
class Package:
    """`root` is a clean copy of our own. Paths are relative to it."""

    name: str
    version: str
    license: str
    root: Path
    module: str
    path: str  # folder of the import path: "." or "src"
    sources: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.name}-{self.version}" if self.version else self.name


def open_package(source: Path, scratch: Path) -> Package:
    """Copy or unpack into `scratch`, and find modules and tests. Raises SourceError."""
    if not source.exists():
        raise SourceError(f"there is no {source}")
    raw = source
    if source.is_file():
        raw = unpack(source, scratch / "unpacked")
    root = scratch / "tree"
    clean_copy(raw, root)
    name, version, license = about(raw, source)
    module, path = find_module(root, name)
    if module in sys.stdlib_module_names:
        raise SourceError(f"{source} is named like {module} of the standard library, which every box has: no task")
    below = root / path / module
    files = [below.with_suffix(".py")] if below.with_suffix(".py").is_file() else sorted(below.rglob("*.py"))
    tests = [
        file.relative_to(root).as_posix() for file in sorted(root.rglob("*.py")) if is_test(file.relative_to(root))
    ]
    sources = [file.relative_to(root).as_posix() for file in files if not in_tests(file.relative_to(root))]
    if not tests:
        raise SourceError(f"{source} has no tests (files named test_*.py or *_test.py): nothing can judge a bug in it")
    return Package(name, version, license, root, module, path, tuple(sources), tuple(tests))


def unpack(archive: Path, target: Path) -> Path:
    """The top folder of a source archive. Only regular files and folders inside of `target` are made."""
    size = 0
    try:
        with tarfile.open(archive) as tar:
            for count, member in enumerate(tar):
                size += member.size
                if count > MAX_FILES or size > MAX_BYTES:
                    raise SourceError(f"{archive} holds more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
                if member.isfile() or member.isdir():
                    tar.extract(member, target, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise SourceError(f"{archive} cannot be unpacked: {error}; give a folder or a .tar.gz of sources") from error
    inside = [path for path in target.iterdir() if path.is_dir()] if target.is_dir() else []
    return inside[0] if len(inside) == 1 else target


def about(raw: Path, source: Path) -> tuple[str, str, str]:
    """Name, version and licence, as far as the package says."""
    fields: dict[str, str] = {}
    if (raw / "PKG-INFO").is_file():
        for line in (raw / "PKG-INFO").read_text(errors="replace").split("\n\n")[0].splitlines():
            key, colon, value = line.partition(": ")
            if colon:
                fields.setdefault(key.lower(), value.strip())
    elif (raw / "pyproject.toml").is_file():
        try:
            project = tomllib.loads((raw / "pyproject.toml").read_text()).get("project", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            project = {}
        fields = {key: value for key in ("name", "version", "license") if isinstance(value := project.get(key), str)}
    name = normal(fields.get("name") or source.resolve().name.partition(".tar")[0])
    license = fields.get("license-expression") or fields.get("license") or ""
    return name, fields.get("version", ""), license[:80]


def find_module(root: Path, name: str) -> tuple[str, str]:
    """The top-level module under test and the folder it lies in: the one named like the package, or the largest."""
    found: dict[tuple[str, str], int] = {}
    for path in (".", "src", "lib"):
        folder = root / path
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if entry.is_dir() and (entry / "__init__.py").is_file() and entry.name not in NO_PACKAGES:
                found[entry.name, path] = sum(file.stat().st_size for file in entry.rglob("*.py"))
            elif is_module(entry) and not is_test(entry.relative_to(root)):
                found[entry.stem, path] = entry.stat().st_size
    if not found:
        raise SourceError(f"no Python package or module lies in {name}, nor in its src/")
    return max(found, key=lambda key: (normal(key[0]) == name, found[key]))


def is_module(path: Path) -> bool:
    return path.suffix == ".py" and path.stem.isidentifier() and path.name not in NO_MODULES


def is_test(path: Path | PurePosixPath) -> bool:
    named = any(fnmatch(path.name, pattern) for pattern in ("test_*.py", "*_test.py"))
    return named and not set(path.parts[:-1]) & ASIDE


def in_tests(path: Path | PurePosixPath) -> bool:
    return is_test(path) or path.name == "conftest.py" or bool({"tests", "test"} & set(path.parts[:-1]))


def support(package: Package, test_files: set[str]) -> dict[str, str]:
    """The test files themselves and the modules and settings beside and above them that they may need, as texts."""
    folders = {parent for file in test_files for parent in PurePosixPath(file).parents}
    found = {}
    for folder in sorted(folders):
        for path in sorted((package.root / folder).glob("*.py")):
            place = path.relative_to(package.root)
            helper = in_tests(place) and not is_test(place)
            if place.as_posix() in test_files or helper or path.name == "conftest.py":
                try:
                    found[place.as_posix()] = path.read_text()
                except UnicodeDecodeError:
                    continue
    return found
