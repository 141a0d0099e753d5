"""Tasks from a repository's own past: `stretto tasks make history REPOSITORY --out DIR`.

A commit that changed code and tests together is a task that somebody had: the tree before it is the workspace, its
message the request, its tests the hidden ones, its other changes the reference. It is kept when some of its tests fail
before and pass after, each of several times. A commit with many test files gives a task for each of them.

The workspace has the history up to that point and nothing later (`purge.ancestors`), or none.
"""

from __future__ import annotations

import ast
import asyncio
import io
import json
import re
import shutil
import tarfile
import tomllib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stretto.records import Task
from stretto.sandbox.pool import BoxPool
from stretto.tasks.factories.edits import body_of, functions
from stretto.tasks.factories.package import Package, SourceError, in_tests, is_test, support
from stretto.tasks.factories.suite import Suite
from stretto.tasks.purge import ancestors, clean_copy, git, run_git

MAX_FILES, MAX_LINES = 60, 6000
"""Of a commit: larger ones are no task but a project."""
TOGETHER = 2
"""A commit with more test files than this gives a task per file."""
PER_COMMIT = 8
SECONDS = 60.0
TRAILER = re.compile(r"^(Signed-off-by|Co-authored-by|Reviewed-by|Acked-by|Change-Id|\(cherry picked).*$", re.I | re.M)
GITS = ("ancestors", "none")


@dataclass(frozen=True)
class Commit:
    id: str
    parent: str
    message: str
    sources: tuple[str, ...]  # changed, not tests; as they are after it
    tests: tuple[str, ...]
    deleted: tuple[str, ...]


async def tasks(
    repository: Path,
    pool: BoxPool,
    count: int,
    libraries: Sequence[str],
    history: str,
    scratch: Path,
    say: Callable[[str], None],
) -> AsyncGenerator[Task]:
    """Up to `count` tasks, from the newest commit back. Raises SourceError."""
    commits = await asyncio.to_thread(candidates, repository)
    say(f"{repository}: {len(commits)} commits changed code and tests together")
    lacking: Counter[str] = Counter()
    made = 0
    for number, commit in enumerate(commits):
        if made >= count:
            return
        place = scratch / commit.id[:12]
        try:
            trial = await asyncio.to_thread(Trial.prepare, repository, commit, place)
            trial = await trial.run(pool, libraries)
        except (SourceError, ValueError) as error:
            say(f"{commit.id[:10]} left out: {error}")
            continue
        lacking.update(trial.lacking)
        if trial.fail_to_pass and history == "ancestors":
            await asyncio.to_thread(ancestors, repository, commit.parent, trial.before)
        for task in trial.tasks()[: count - made]:
            made += 1
            yield task
        say(f"{number + 1} commits tried, {made} tasks")
        shutil.rmtree(place)
    for module, times in lacking.most_common(5):
        say(
            f"tests of {times} commits need {module}: --libraries gives the boxes a distribution that is installed here"
        )


def candidates(repository: Path) -> list[Commit]:
    """Commits with one parent that changed Python files of both kinds, newest first. Raises SourceError."""
    try:
        log = git("log", "--no-merges", "--format=%H%x00%P%x00%B%x01", at=repository)
    except ValueError as error:
        raise SourceError(f"{repository} is no git repository with commits: {error}") from None
    found = []
    for entry in log.split("\x01"):
        parts = entry.strip("\n").split("\x00")
        if len(parts) != 3 or not parts[1]:
            continue
        id, parent, message = parts
        changed = git("diff", "--no-renames", "--name-status", "-z", parent, id, at=repository).split("\x00")
        pairs = list(zip(changed[::2], changed[1::2], strict=False))
        lines = git("diff", "--no-renames", "--shortstat", parent, id, at=repository)
        if len(pairs) > MAX_FILES or sum(map(int, re.findall(r"(\d+) (?:ins|del)", lines))) > MAX_LINES:
            continue
        there = [path for status, path in pairs if status in ("A", "M")]
        tests = [path for path in there if is_test(PurePosixPath(path))]
        sources = [path for path in there if not in_tests(PurePosixPath(path)) and not path.startswith(".")]
        if tests and any(path.endswith(".py") for path in sources):
            deleted = tuple(path for status, path in pairs if status == "D" and not in_tests(PurePosixPath(path)))
            found.append(Commit(id, parent, message.strip(), tuple(sources), tuple(tests), deleted))
    return found


def export(repository: Path, commit: str, target: Path) -> None:
    """The files of a commit, without answer keys."""
    raw = target.with_name(target.name + ".raw")
    data = run_git("archive", "--format=tar", commit, at=repository)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(raw, filter="data")
    clean_copy(raw, target)
    shutil.rmtree(raw)


@dataclass(frozen=True)
class Trial:
    """A commit's two trees and what its tests say in them."""

    commit: Commit
    name: str
    before: Path
    after: Path
    fail_to_pass: frozenset[str] = frozenset()
    pass_to_pass: frozenset[str] = frozenset()
    lacking: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()

    @staticmethod
    def prepare(repository: Path, commit: Commit, place: Path) -> Trial:
        before, after = place / "before", place / "after"
        export(repository, commit.parent, before)
        export(repository, commit.id, after)
        return Trial(commit, repository.resolve().name, before, after)

    @property
    def package(self) -> Package:
        """The tree after the commit; what is under test is not one module."""
        path = "src" if (self.after / "src").is_dir() and not (self.after / "src" / "__init__.py").exists() else "."
        return Package(self.name, self.commit.id[:10], "", self.after, "", path, (), self.commit.tests)

    async def run(self, pool: BoxPool, libraries: Sequence[str]) -> Trial:
        """Tests after the commit, before it with the new tests, and both again."""
        package = self.package
        old = replace(package, root=self.before.with_name("tested"))
        await asyncio.to_thread(shutil.copytree, self.before, old.root, symlinks=True)
        for path, text in support(package, set(package.tests)).items():
            target = old.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        suites = [Suite(of, pool, libraries, options=options(self.after)) for of in (package, old)]
        (one, was), (two, again) = [await asyncio.gather(*(suite.whole(SECONDS) for suite in suites)) for _ in range(2)]
        if one.refused or was.refused:
            raise SourceError(f"its tests can't be run: {one.refused or was.refused}")
        passing = one.passed & two.passed
        if passing - was.passed - again.passed:
            passing &= (await suites[0].whole(SECONDS)).passed
        said = " ".join(line for lines in one.failed.values() for line in lines)
        return replace(
            self,
            fail_to_pass=passing - was.passed - again.passed,
            pass_to_pass=passing & was.passed & again.passed,
            lacking=tuple({name.split(".")[0] for name in re.findall(r"No module named '([\w.]+)'", said)}),
            libraries=tuple(suites[0].libraries),
            plugins=tuple(suites[0].plugins),
        )

    def tasks(self) -> list[Task]:
        """One task, or one for each test file when there are many."""
        files = sorted({id.partition("::")[0] for id in self.fail_to_pass})
        if len(files) <= TOGETHER:
            return [self.task(files, self.commit.id[:10])] if files else []
        most = sorted(files, key=lambda file: -sum(id.startswith(f"{file}::") for id in self.fail_to_pass))[:PER_COMMIT]
        return [self.task([file], f"{self.commit.id[:10]}-{PurePosixPath(file).stem}") for file in sorted(most)]

    def task(self, files: list[str], name: str) -> Task:
        commit, package = self.commit, self.package
        failing = sorted(id for id in self.fail_to_pass if id.partition("::")[0] in files)
        spec = {
            "fail_to_pass": failing,
            "pass_to_pass": sorted(id for id in self.pass_to_pass if id.partition("::")[0] in files),
            "paths": [package.path],
            "libraries": list(self.libraries),
            "plugins": list(self.plugins),
            "options": options(self.after),
            "seconds": SECONDS / 2,
        }
        hidden = support(package, set(files))
        solution = {}
        for path in commit.sources:
            try:
                solution[f"solution/{path}"] = (self.after / path).read_text()
            except (OSError, UnicodeDecodeError):
                continue  # a key that was purged, or binary: the tests pass without it, or the task isn't admitted
        if commit.deleted:
            gone = " ".join(f"'{path}'" for path in commit.deleted if "'" not in path)
            solution["solution/solve.sh"] = f"rm -f -- {gone}\n"
        return Task(
            id=f"history/{self.name}/{name}",
            split="",
            instruction=self.instruction(hidden, files),
            files={},
            grading={
                "tests/pytest.json": json.dumps(spec, indent=1),
                **{f"tests/tree/{path}": text for path, text in hidden.items()},
                **solution,
            },
            metadata={"factory": "history", "commit": commit.id, "files": len(commit.sources)},
            environment=str(self.before),
            mode="pytest",
            libraries=list(self.libraries),
        )

    def instruction(self, hidden: dict[str, str], files: list[str]) -> str:
        """The message, and the names that the tests will use and nobody could guess."""
        message = TRAILER.sub("", self.commit.message).strip()
        mentioned = "\n".join(hidden[file] for file in files)
        faces = [
            f"- `{path}`: `{face}`"
            for path in self.commit.sources
            if path.endswith(".py")
            for face in new_faces(read(self.before / path), read(self.after / path))
            if re.search(rf"\b{re.escape(re.split(r'[( :]', face.split('.')[-1])[0])}\b", mentioned)
        ]
        about = ["", "Names that will be relied on:", *faces[:24]] if faces else []
        return "\n".join([message, *about])


def new_faces(before: str, after: str) -> list[str]:
    """Functions, classes and methods that are new, or have another signature, as `Class.name(arguments)`."""
    try:
        old, new = faces(before), faces(after)
    except (SyntaxError, ValueError):
        return []
    return [face for face in new if face not in old]


def faces(text: str) -> list[str]:
    tree = ast.parse(text)
    found = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for name, node in functions(tree):
        if not any(part.startswith("_") for part in name.split(".")) and body_of(node):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            found.append(f"{name}({ast.unparse(node.args)}){returns}")
    return found


def options(root: Path) -> dict[str, str]:
    """Settings of pytest that change what a test is; others (paths, reports, coverage) are left out."""
    try:
        tables = tomllib.loads((root / "pyproject.toml").read_text()).get("tool", {}).get("pytest", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}
    ini = tables.get("ini_options", tables) if isinstance(tables, dict) else {}
    kept = {
        key: ini[key] for key in ("asyncio_mode", "python_files", "python_functions", "python_classes") if key in ini
    }
    return {key: " ".join(value) if isinstance(value, list) else str(value) for key, value in kept.items()}


def read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
