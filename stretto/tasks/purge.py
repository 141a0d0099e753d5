"""Answer keys taken out of a tree before an agent sees it: old bytecode, caches, build output, histories, twins.

Bytecode of a file holds what the file held when it was compiled. A type checker's or a test tool's cache names deleted
functions. A build folder, an environment or an installed copy of the package holds the right version of everything. And
git keeps the future: in other branches, in reflogs, and as objects that no branch reaches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.metadata import Distribution
from pathlib import Path

from stretto.sandbox.libraries import closure

FOLDERS = (
    *(".git", ".hg", ".svn", "__pycache__", "*.egg-info", "*.dist-info", ".eggs", "build", "dist", "_build", "wheels"),
    *(".tox", ".nox", ".venv", "venv", "env", "site-packages", "node_modules", "htmlcov", "*.egg", ".direnv"),
    *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".pytype", ".pyre", ".hypothesis", ".cache", ".idea", ".vscode"),
    *(".ipynb_checkpoints", ".benchmarks", ".testmondata", ".history"),
)
FILES = (
    *(
        "*.pyc",
        "*.pyo",
        "*.so",
        "*.pyd",
        "*.o",
        "*.a",
        "*.orig",
        "*.rej",
        "*.bak",
        "*~",
        "*.swp",
        ".git",
        ".dmypy.json",
    ),
    *(".coverage", ".coverage.*", "coverage.xml", "tags", "TAGS", "*.patch", "*.diff", "*.whl", "*.class", ".DS_Store"),
)
PACKAGE_FOLDERS = frozenset(("build", "dist", "env", "wheels"))
"""Names that are also good names of Python packages: kept when an `__init__.py` lies in them."""


def clean_copy(source: Path, target: Path) -> None:
    """Copy a tree without answer keys. Of links those are kept that stay inside and lead to what is kept."""
    inside = source.resolve()
    for folder, subfolders, names in os.walk(source):
        here = Path(folder)
        into = target / here.relative_to(source)
        into.mkdir(parents=True, exist_ok=True)
        linked = [name for name in subfolders if (here / name).is_symlink()]
        subfolders[:] = [name for name in subfolders if name not in linked and not is_key_folder(here / name)]
        for name in [*names, *linked]:
            path = here / name
            if is_key_file(name):
                continue
            if path.is_symlink():
                if not os.path.isabs(os.readlink(path)) and path.resolve().is_relative_to(inside):
                    (into / name).symlink_to(os.readlink(path))
            elif path.is_file():
                shutil.copy2(path, into / name)
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_symlink() and not path.exists():
            path.unlink()


def is_key_folder(path: Path) -> bool:
    if path.name in PACKAGE_FOLDERS and (path / "__init__.py").is_file():
        return False
    return any(fnmatch(path.name, pattern) for pattern in FOLDERS) or (path / "pyvenv.cfg").is_file()


def is_key_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in FILES)


def keys(root: Path) -> list[str]:
    """Answer keys that lie in a task's workspace, each as a clause. A clean history that `ancestors` made is none."""
    found = []
    for folder, subfolders, names in os.walk(root):
        here = Path(folder)
        for name in [name for name in subfolders if is_key_folder(here / name)]:
            subfolders.remove(name)
            place = (here / name).relative_to(root).as_posix()
            found += history_keys(here) if name == ".git" else [f"{place}/ holds caches, builds or copies"]
        found += [f"{(here / name).relative_to(root).as_posix()} is no source" for name in names if is_key_file(name)]
    return found


def ancestors(repository: Path, commit: str, tree: Path) -> None:
    """Give the files in `tree` the history that ends at `commit`: one branch, and nothing that came later.

    Only what the commit reaches is fetched, into a repository made new, so there is no later object to be found. Raises
    ValueError when git can't.
    """
    git("init", "--quiet", "--initial-branch=main", str(tree))
    git("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", str(repository.resolve()), commit, at=tree)
    git("update-ref", "--no-deref", "HEAD", commit, at=tree)
    git("reset", "--quiet", "--mixed", at=tree)
    for leftover in ("FETCH_HEAD", "ORIG_HEAD", "logs", "hooks", "description"):
        path = tree / ".git" / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if found := history_keys(tree):
        raise ValueError(f"the history of {repository} could not be cut at {commit}: {found[0]}")


def history_keys(tree: Path) -> list[str]:
    """What in a tree's git history can tell of the future: remotes, other branches, reflogs, unreachable objects."""
    found = []
    if not (tree / ".git").is_dir():
        return [".git is a link to a repository elsewhere"]
    if git("remote", at=tree):
        found.append(".git has a remote")
    refs = git("for-each-ref", "--format=%(refname)", at=tree).split()
    current = git("rev-parse", "--symbolic-full-name", "HEAD", at=tree)
    if others := [ref for ref in refs if ref != current]:
        found.append(f".git has other references than the branch in use, e.g. {others[0]}")
    for path in ("logs", "FETCH_HEAD", "ORIG_HEAD", "objects/info/alternates", "refs/stash"):
        if (tree / ".git" / path).exists():
            found.append(f".git/{path} is there")
    if lost := git("fsck", "--unreachable", "--no-reflogs", "--no-progress", at=tree):
        found.append(f".git holds objects that the branch does not reach, e.g. {lost.splitlines()[0]}")
    return found


def git(*words: str, at: Path | None = None) -> str:
    """What git prints, with nobody's configuration. Raises ValueError with what it complains of."""
    return run_git(*words, at=at).decode(errors="surrogateescape").strip()


def run_git(*words: str, at: Path | None = None) -> bytes:
    """`git` without the decoding."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        "GIT_CONFIG_KEY_1": "core.hooksPath",
        "GIT_CONFIG_VALUE_1": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
    place = ["-C", str(at)] if at else []
    try:
        done = subprocess.run(["git", *place, *words], env=environment, capture_output=True, check=False, timeout=300)
    except FileNotFoundError:
        raise ValueError("git is needed for this and is not installed") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"git {words[0]} failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def twins(modules: Iterable[str], libraries: Iterable[str]) -> list[str]:
    """Modules under test that the box's libraries hold as well, requirements included: each would be the answer.

    Raises ValueError for a library that isn't installed here.
    """
    return sorted(set(modules) & {module for distribution in closure(libraries) for module in modules_of(distribution)})


def modules_of(distribution: Distribution) -> set[str]:
    """Top-level modules that a distribution installs."""
    tops = {path.parts[0] for path in distribution.files or () if path.suffix == ".py" and ".." not in path.parts}
    return {top.removesuffix(".py") for top in tops}
