"""A package's tests in a box: which pass, what they call, and what they say of an edited package.

Never run on the host: tests are code of strangers. See `suite_driver.py` for what runs inside.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.metadata import distribution
from typing import Any

from stretto.config import SandboxConfig
from stretto.sandbox.box import Box, BoxBroken
from stretto.sandbox.libraries import LIBRARIES, normal
from stretto.sandbox.pool import BoxPool
from stretto.tasks.factories.edits import Edit
from stretto.tasks.factories.package import Package, SourceError
from stretto.tasks.purge import twins

DRIVER = (resources.files("stretto.tasks.factories") / "suite_driver.py").read_text()
KEEP = 1 << 25
TEST_SECONDS = 1.0
"""A slower test is not used: grading would repeat it thousands of times."""
FILE_SECONDS = 120.0
BATCH = 48
"""Jobs of one box: as many are lost when one of them breaks it."""
LEAST = 4
"""Jobs for which a second box, which collects the tests once more, is worth it."""
BOXES = SandboxConfig(seconds=30.0, memory_mib=1536, workspace_mib=192, warm=0)


@dataclass(frozen=True)
class Change:
    """Edits of one function: the file, and the line its code begins at."""

    file: str
    line: int
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Test:
    id: str
    seconds: float
    calls: frozenset[tuple[str, int]] = field(repr=False)  # functions entered: file, first line

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]


@dataclass(frozen=True)
class Trial:
    """Changed functions, the tests to run on them, and how many seconds these may take."""

    changes: Sequence[Change]
    tests: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What tests said of an edited package; `refused` tells why nothing was said."""

    passed: frozenset[str] = frozenset()
    failed: dict[str, list[str]] = field(default_factory=dict)  # id -> the lines that say how
    refused: str = ""


class Suite:
    def __init__(
        self,
        package: Package,
        pool: BoxPool,
        libraries: Sequence[str] = (),
        options: dict[str, str] | None = None,
    ):
        """`options` are settings of pytest. Raises SourceError for libraries that hold what is under test, or are not
        there."""
        self.package, self.pool, self.options = package, pool, options or {}
        self.libraries = tuple(dict.fromkeys(("pytest", *libraries)))
        try:
            same = twins([package.module], self.libraries)
        except ValueError as error:
            raise SourceError(str(error)) from None
        self.plugins = plugins(self.libraries)
        if same:
            raise SourceError(
                f"{same[0]} is under test, and the tests' own libraries hold it: a box would show the answers"
            )
        self.left_out: dict[str, str] = {}  # test file or id -> why it is of no use

    async def survey(self) -> list[Test]:
        """Tests that pass each of three times and are fast; `left_out` says what became of the others."""
        files = self.package.tests
        jobs = [
            {"do": "survey", "file": file, "trace": trace, "slow": TEST_SECONDS, "seconds": FILE_SECONDS}
            for trace, order in ((False, files), (False, files[::-1]), (True, files))
            for file in order
        ]
        head, answers = await self._run(jobs, False, self.package.tests)
        for file, said in head.get("broken", {}).items():
            self.left_out[file] = said[-1] if said else "it can't be collected"
        if head.get("twin"):
            raise SourceError(
                f"every box here holds a copy of {self.package.module}, at {head['twin']}: the answers to its tasks "
                "would lie on disk; uninstall it from this machine's system Python"
            )
        if not head.get("collected"):
            reason = next(iter(self.left_out.values()), "pytest collected nothing")
            raise SourceError(f"no test of {self.package.title} could be collected: {reason}")
        count, tests = len(files), []
        rounds = answers[:count], answers[count : 2 * count][::-1], answers[2 * count :]
        for file, *said in zip(files, *rounds, strict=True):
            if refused := next((answer["refused"] for answer in said if "refused" in answer), ""):
                self.left_out[file] = refused
                continue
            first, second, traced = (answer["tests"] for answer in said)
            for id, seen in first.items():
                if not seen["ok"]:
                    self.left_out[id] = "it does not pass"
                elif seen["seconds"] > TEST_SECONDS or id not in second or id not in traced:
                    self.left_out[id] = f"it takes more than {TEST_SECONDS:g} s"
                elif not second[id]["ok"]:
                    self.left_out[id] = "it passes at times"
                else:
                    calls = frozenset((file, line) for file, line in traced[id].get("calls", []))
                    tests.append(Test(id, seen["seconds"], calls))
        return tests

    async def swap(self, trials: Sequence[Trial]) -> list[Verdict]:
        """Changed functions and the tests to run, on live functions; a trial ends with its first failure."""
        return await self._try("swap", trials)

    async def fresh(self, trials: Sequence[Trial]) -> list[Verdict]:
        """The same on edited files, everything imported anew, and all of the tests."""
        return await self._try("fresh", trials)

    async def whole(self, seconds: float) -> Verdict:
        """All tests, everything imported anew; a file that can't be collected has failed under its own name."""
        job = {"do": "fresh", "changes": [], "tests": None, "files": list(self.package.tests), "seconds": seconds}
        _, (answer,) = await self._run([job], True, [])
        broken = answer.get("broken", {})
        verdict = _verdict(answer)
        return replace(verdict, failed=verdict.failed | broken)

    async def _try(self, do: str, trials: Sequence[Trial]) -> list[Verdict]:
        """In as many boxes at once as there are cores, while there is enough to do in each."""
        boxes = min(os.cpu_count() or 1, -(-len(trials) // LEAST))
        size = min(-(-len(trials) // max(boxes, 1)), BATCH)
        parts = [trials[start : start + size] for start in range(0, len(trials), max(size, 1))]
        gate = asyncio.Semaphore(max(boxes, 1))

        async def one(part: Sequence[Trial]) -> list[Verdict]:
            async with gate:
                _, answers = await self._run([_job(do, trial) for trial in part], do == "fresh", _files(part))
            return [_verdict(answer) for answer in answers]

        return [verdict for found in await asyncio.gather(*map(one, parts)) for verdict in found]

    async def _run(
        self, jobs: list[dict[str, Any]], fresh: bool, files: Iterable[str]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the driver says before the jobs, and one answer per job."""
        order = {
            "libraries": [LIBRARIES],
            "paths": [self.package.path],
            "module": self.package.module,
            "files": list(files),
            "fresh": fresh,
            "plugins": self.plugins,
            "options": self.options,
            "jobs": jobs,
        }
        box = await self.open()
        limit = 60.0 + sum(job["seconds"] for job in jobs)
        try:
            result = await box.python(DRIVER, json.dumps(order).encode(), limit, KEEP)
            lines = result.stdout.splitlines()
            ended = result.stderr.decode(errors="replace").strip().splitlines()
        except BoxBroken as error:
            lines, ended = [], [str(error)]
        finally:
            await box.stop()
        answers = [json.loads(line) for line in lines if line.endswith(b"}")]
        if not answers:
            raise SourceError(f"the tests of {self.package.title} can't be run: {ended[-1] if ended else 'no answer'}")
        lost = [{"refused": "the box ended before"}] * (len(jobs) + 1 - len(answers))
        return answers[0], [*answers[1:], *lost]

    async def open(self) -> Box:
        """A box with the package and the libraries."""
        return await self.pool.box(base=self.package.root, libraries=self.libraries)


def plugins(libraries: Iterable[str]) -> list[str]:
    """Modules of the pytest plugins that these distributions bring; pytest loads none by itself here."""
    return sorted(
        {
            point.module
            for name in libraries
            for point in distribution(name).entry_points
            if point.group == "pytest11" and normal(name).startswith("pytest-")
        }
    )


def _job(do: str, trial: Trial) -> dict[str, Any]:
    changes = [
        {"file": change.file, "line": change.line, "edits": [[e.start, e.end, e.text] for e in change.edits]}
        for change in trial.changes
    ]
    return {"do": do, "changes": changes, "tests": list(trial.tests), "seconds": trial.seconds}


def _files(trials: Iterable[Trial]) -> list[str]:
    return sorted({id.partition("::")[0] for trial in trials for id in trial.tests})


def _verdict(answer: dict[str, Any]) -> Verdict:
    if "refused" in answer:
        return Verdict(refused=answer["refused"])
    tests = answer["tests"]
    passed = frozenset(id for id, test in tests.items() if test["ok"])
    return Verdict(passed, {id: test["told"] for id, test in tests.items() if not test["ok"]})
