"""Rows in SWE-bench's format become task folders: `stretto tasks make swebench ROWS.jsonl CHECKOUT … --out DIR`.

A row has `instance_id`, `repo`, `base_commit`, `problem_statement`, `patch`, `test_patch`, `FAIL_TO_PASS` and
`PASS_TO_PASS`. The repositories must be here, as git checkouts: nothing is fetched. Whether a row's tests really fail
before and pass after is not tried here but by admission (`stretto tasks check`).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from stretto.records import Task
from stretto.tasks.factories.history import export, options, read
from stretto.tasks.factories.package import SourceError
from stretto.tasks.purge import ancestors, git

NEEDED = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS")


async def tasks(
    sources: Sequence[Path],
    count: int,
    libraries: Sequence[str],
    history: str,
    scratch: Path,
    say: Callable[[str], None],
) -> AsyncGenerator[Task]:
    """Up to `count` tasks, in the order of the rows. Raises SourceError for rows or checkouts that are not there."""
    path, *checkouts = sources
    if not checkouts:
        raise SourceError(f"make swebench needs the rows and at least one checkout: {path} CHECKOUT …")
    made = 0
    for number, row in enumerate(read_rows(path)):
        if made == count:
            return
        place = scratch / str(number)
        try:
            task = await asyncio.to_thread(task_of, row, checkouts, libraries, history, place)
        except (SourceError, ValueError) as error:
            say(f"{row.get('instance_id', f'row {number + 1}')} left out: {error}")
            continue
        made += 1
        yield task
        shutil.rmtree(place)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Of a file with one JSON object per line, or one list of them."""
    try:
        text = path.read_text()
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line]
        )
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read as JSON lines: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise SourceError(f"{path} holds something else than objects")
    return rows


def task_of(
    row: dict[str, Any], checkouts: Sequence[Path], libraries: Sequence[str], history: str, place: Path
) -> Task:
    """Raises SourceError, or ValueError when git can't apply a patch."""
    if missing := [key for key in NEEDED if key not in row]:
        raise SourceError(f"the row lacks {missing[0]}")
    repository = find(str(row["repo"]), checkouts)
    before, solved, tested = place / "before", place / "solved", place / "tested"
    export(repository, str(row["base_commit"]), before)
    for tree, patch in ((solved, row["patch"]), (tested, row["test_patch"])):
        shutil.copytree(before, tree, symlinks=True)
        (place / "change").write_text(patch if patch.endswith("\n") else patch + "\n")
        git("apply", "--whitespace=nowarn", str((place / "change").resolve()), at=tree)
    if history == "ancestors":
        ancestors(repository, git("rev-parse", str(row["base_commit"]), at=repository), before)
    failing, passing = (ids(row.get(key, [])) for key in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    gone = [path for path in changed(row["patch"]) if not (solved / path).exists()]
    spec = {
        "fail_to_pass": failing,
        "pass_to_pass": passing,
        "paths": ["src" if (before / "src").is_dir() else "."],
        "libraries": list(dict.fromkeys(("pytest", *libraries))),
        "options": options(before),
    }
    helpers = {PurePosixPath(id.partition("::")[0]).as_posix() for id in (*failing, *passing)}
    hidden = {
        path: read(tested / path)
        for path in sorted({*changed(row["test_patch"]), *helpers})
        if (tested / path).is_file()
    }
    solution = {path: read(solved / path) for path in changed(row["patch"]) if (solved / path).is_file()}
    if gone:
        solution["solve.sh"] = "rm -f -- " + " ".join(f"'{path}'" for path in gone if "'" not in path) + "\n"
    return Task(
        id=str(row["instance_id"]),
        split="",
        instruction=str(row["problem_statement"]).strip(),
        files={},
        grading={
            "tests/pytest.json": json.dumps(spec, indent=1),
            **{f"tests/tree/{path}": text for path, text in hidden.items()},
            **{f"solution/{path}": text for path, text in solution.items()},
        },
        metadata={"factory": "swebench", "repo": row["repo"], "commit": row["base_commit"]},
        environment=str(before),
        mode="pytest",
        libraries=list(libraries),
    )


def find(repo: str, checkouts: Sequence[Path]) -> Path:
    """The checkout of `owner/name`: a given folder of that name, or one below a given folder."""
    name = repo.split("/")[-1]
    for root in checkouts:
        for path in (root, root / name, root / repo, root / repo.replace("/", "__")):
            if path.name in (name, repo.replace("/", "__")) and (path / ".git").exists():
                return path
    raise SourceError(f"there is no checkout of {repo}: give a folder named {name} with its .git")


def changed(patch: str) -> list[str]:
    """Paths that a patch touches."""
    return sorted(set(re.findall(r"^diff --git a/.+? b/(.+)$", patch, re.M)))


def ids(value: object) -> list[str]:
    """A list of test ids, or the JSON text of one."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(id, str) for id in found):
        raise SourceError("FAIL_TO_PASS and PASS_TO_PASS are lists of test ids")
    return found
