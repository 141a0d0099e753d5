"""Bugs put into a Python package that has tests: `stretto tasks make mutate PACKAGE … --out DIR`.

A package's tests run once, so that each function's own tests are known. Single edits are tried on live functions, a few
milliseconds each (`swap`); what the tests kill is kept, alone or two and three together, and run again on edited files
in a new process (`fresh`). A task asks to make the tests that failed both times pass, and none of the others fail. The
agent gets the package without those tests, and the symptom of one as the report of a user would have it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from stretto.records import Task
from stretto.sandbox.pool import BoxPool
from stretto.tasks.factories.edits import Edit, Source, apply, first_line, functions, with_body
from stretto.tasks.factories.operators import edits
from stretto.tasks.factories.package import Package, support
from stretto.tasks.factories.prune import without
from stretto.tasks.factories.suite import Change, Suite, Test, Verdict

COVERING, GUARDING = 40, 40
"""Tests run per mutant: the most specific that call the function, and others beside them that must go on passing."""
PER_FUNCTION = 6
"""Edits tried in one function, and at most so many tasks with a bug in it."""
ROUND = 96
SECONDS = 10.0
"""Limit of one mutant's tests: a hang is no symptom worth a task."""
STUBS = ("raise NotImplementedError", "return None")
MULTIPLE = 0.35
"""Share of tasks with two or three bugs."""
RUN_SECONDS = 10.0
"""Limit of one run of a task's tests, in grading."""


@dataclass(frozen=True)
class Place:
    """A function with tests of its own."""

    file: str
    name: str
    line: int
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """One or several edits, each in a function of its own, and what the tests said of them."""

    sites: tuple[tuple[Place, Edit], ...]
    verdict: Verdict

    @property
    def changes(self) -> list[Change]:
        return [Change(place.file, place.line, (edit,)) for place, edit in self.sites]


class Mutator:
    """One package's supply of tasks.

    mutator = Mutator(package, pool, seed, ["pytest"])
    await mutator.survey()                    # SourceError: no task can be made of this
    async for task in mutator.tasks(50): ...
    """

    def __init__(self, package: Package, pool: BoxPool, seed: int, libraries: Sequence[str]):
        self.package, self.suite = package, Suite(package, pool, libraries)
        self.rng = random.Random(f"mutate/{package.title}/{seed}")
        self.tests: list[Test] = []
        self.sites: list[tuple[Place, Edit]] = []
        self.tried = 0

    async def survey(self) -> str:
        """Find what there is to change; what was found, as a sentence."""
        self.tests = await self.suite.survey()
        places = find_places(self.package, self.tests)
        sites = [
            (place, edit)
            for place, options in places.items()
            for edit in self.rng.sample(options, min(PER_FUNCTION, len(options)))
        ]
        self.rng.shuffle(sites)
        self.sites = spread(sites)
        left_out = f", {len(self.suite.left_out)} left out" if self.suite.left_out else ""
        found = f"{len(self.tests)} tests of use{left_out}, {len(places)} functions that they call"
        return f"{self.package.title}: {found}"

    async def tasks(self, count: int) -> AsyncGenerator[Task]:
        """Up to `count` tasks, fewer when the package holds no more."""
        used: dict[tuple[str, int], int] = defaultdict(int)
        made = 0
        while made < count and self.tried < len(self.sites):
            batch, self.tried = self.sites[self.tried : self.tried + ROUND], self.tried + ROUND
            sites = [site for site in batch if sound(self.package, *site)]
            killed = await kill(self.suite, [((site,), site[0].tests) for site in sites])
            chosen = choose(killed, used, count - made, self.rng)
            for mutant in (await confirm(self.suite, chosen, self.tests))[: count - made]:
                made += 1
                yield task_of(self.package, mutant, self.suite.libraries, self.rng)


def find_places(package: Package, tests: Sequence[Test]) -> dict[Place, list[Edit]]:
    """Functions that tests call, with the edits possible in them."""
    by_function: dict[tuple[str, int], list[Test]] = defaultdict(list)
    for test in tests:
        for call in test.calls:
            by_function[call].append(test)
    found = {}
    for file in package.sources:
        try:
            source = Source((package.root / file).read_bytes())
            source.data.decode()
        except (SyntaxError, ValueError):
            continue
        for name, node in functions(source.tree):
            covering = by_function.get((file, first_line(node)), [])
            options = edits(source, node) if covering else []
            if options:
                specific = sorted(covering, key=lambda test: (len(test.calls), test.id))[:COVERING]
                found[Place(file, name, first_line(node), tuple(test.id for test in specific))] = options
    return found


def sound(package: Package, place: Place, edit: Edit) -> bool:
    """Whether the edited file is Python, and another program than before."""
    data = (package.root / place.file).read_bytes()
    try:
        compile(apply(data, [edit]), "edited", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return data[edit.start : edit.end].decode().strip() != edit.text.strip()


def spread(sites: list[tuple[Place, Edit]]) -> list[tuple[Place, Edit]]:
    """Reordered so that operators and functions take turns: a prefix holds a bit of everything."""
    seen: dict[object, int] = defaultdict(int)
    keyed = []
    for place, edit in sites:
        seen[edit.operator] += 1
        seen[place] += 1
        keyed.append((seen[place], seen[edit.operator], len(keyed)))
    return [sites[at] for *_, at in sorted(keyed)]


async def kill(suite: Suite, trials: Sequence[tuple[tuple[tuple[Place, Edit], ...], Sequence[str]]]) -> list[Mutant]:
    """Those that tests kill, on live functions; none that crash, hang or can't be put in."""
    mutants = [Mutant(sites, Verdict()) for sites, _ in trials]
    half = len(trials) // 2
    jobs = [(mutant.changes, tests) for mutant, (_, tests) in zip(mutants, trials, strict=True)]
    first, second = await asyncio.gather(suite.swap(jobs[:half], SECONDS), suite.swap(jobs[half:], SECONDS))
    return [
        replace(mutant, verdict=verdict)
        for mutant, verdict in zip(mutants, [*first, *second], strict=True)
        if verdict.failed and not verdict.refused
    ]


def choose(killed: list[Mutant], used: dict[tuple[str, int], int], count: int, rng: random.Random) -> list[Mutant]:
    """Mutants to confirm, some of them joined to others of the same file."""
    chosen: list[Mutant] = []
    waiting = [mutant for mutant in killed if used[key(mutant)] < PER_FUNCTION]
    while waiting and len(chosen) < count + count // 8 + 2:
        mutant = waiting.pop(0)
        used[key(mutant)] += 1
        if rng.random() < MULTIPLE:
            sites, size = list(mutant.sites), rng.choice((2, 2, 3))
            for other in list(waiting):
                place = other.sites[0][0]
                if place.file == sites[0][0].file and place not in [place for place, _ in sites] and len(sites) < size:
                    sites += other.sites
                    waiting.remove(other)
                    used[key(other)] += 1
            mutant = Mutant(tuple(sites), mutant.verdict)
        chosen.append(mutant)
    return chosen


def key(mutant: Mutant) -> tuple[str, int]:
    place = mutant.sites[0][0]
    return place.file, place.line


async def confirm(suite: Suite, mutants: list[Mutant], tests: Sequence[Test]) -> list[Mutant]:
    """Those that fail twice more in a new process with the bugs on disk, each site by a test of its own function, and
    that fail too when the functions are stubs or return a constant.

    The verdict then holds what failed, and what passed both with and without the bugs.
    """
    wanted = [required(mutant, tests) for mutant in mutants]
    fresh = [(mutant.changes, ids) for mutant, ids in zip(mutants, wanted, strict=True)]
    once, again = await asyncio.gather(suite.fresh(fresh, 3 * SECONDS), suite.fresh(fresh, 3 * SECONDS))
    kept = []
    for mutant, ids, verdict, second in zip(mutants, wanted, once, again, strict=True):
        steady = verdict.passed == second.passed and set(verdict.failed) == set(second.failed)
        if verdict.refused or not steady or verdict.passed | set(verdict.failed) != set(ids):
            continue  # it fails at times, or stops the import: found at once
        if all(any(id in verdict.failed for id in place.tests) for place, _ in mutant.sites):
            kept.append(replace(mutant, verdict=verdict))
    stubs = [(stubbed(suite.package, mutant, body), [*mutant.verdict.failed]) for body in STUBS for mutant in kept]
    said = await suite.swap(stubs, SECONDS)
    paid = {n % len(kept) for n, verdict in enumerate(said) if not verdict.failed and not verdict.refused}
    return [mutant for n, mutant in enumerate(kept) if n not in paid]


def stubbed(package: Package, mutant: Mutant, body: str) -> list[Change]:
    """The mutant's functions with nothing in them but `body`."""
    changes = []
    for place, _ in mutant.sites:
        source = Source((package.root / place.file).read_bytes())
        node = next(node for name, node in functions(source.tree) if first_line(node) == place.line)
        changes.append(Change(place.file, place.line, (with_body(source, node, body),)))
    return changes


def required(mutant: Mutant, tests: Sequence[Test]) -> list[str]:
    """Tests of the changed functions, and others beside them: from the same test files or of the same sources."""
    covering = {id for place, _ in mutant.sites for id in place.tests}
    files = {id.partition("::")[0] for id in covering}
    sources = {place.file for place, _ in mutant.sites}
    beside = [
        test
        for test in tests
        if test.id not in covering and (test.file in files or any(file in sources for file, _ in test.calls))
    ]
    beside.sort(key=lambda test: (test.seconds > 0.05, test.file not in files, digest(test.id)))
    return sorted(covering | {test.id for test in beside[:GUARDING]})


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def task_of(package: Package, mutant: Mutant, libraries: Sequence[str], rng: random.Random) -> Task:
    """The task as it is written; its workspace is copied from the clean tree."""
    originals = {place.file: (package.root / place.file).read_bytes() for place, _ in mutant.sites}
    files = {
        file: apply(data, [edit for place, edit in mutant.sites if place.file == file]).decode()
        for file, data in originals.items()
    }
    failing = sorted(mutant.verdict.failed)
    hidden = support(package, {id.partition("::")[0] for id in (*failing, *mutant.verdict.passed)})
    for file in {id.partition("::")[0] for id in failing}:
        files[file] = without(hidden[file], [id for id in failing if id.startswith(f"{file}::")])
    spec = {
        "fail_to_pass": failing,
        "pass_to_pass": sorted(mutant.verdict.passed),
        "paths": [package.path],
        "package": package.module,
        "libraries": list(libraries),
        "seconds": RUN_SECONDS,
    }
    return Task(
        id=f"mutate/{package.title}/{digest(repr([(p.file, p.line, e) for p, e in mutant.sites]))}",
        split="",
        instruction=instruction(package, mutant, failing, rng),
        files=files,
        grading={
            "tests/pytest.json": json.dumps(spec, indent=1),
            **{f"tests/tree/{file}": text for file, text in hidden.items()},
            **{f"solution/{file}": data.decode() for file, data in originals.items()},
        },
        metadata={
            "factory": "mutate",
            "package": package.name,
            "version": package.version,
            "license": package.license,
            "functions": [f"{place.file}::{place.name}" for place, _ in mutant.sites],
            "operators": [edit.operator for _, edit in mutant.sites],
        },
        environment=str(package.root),
        mode="pytest",
        libraries=list(libraries),
    )


def instruction(package: Package, mutant: Mutant, failing: list[str], rng: random.Random) -> str:
    """A report by somebody who ran into the bug and knows nothing of the cause."""
    shown = rng.choice(failing)
    lines = "\n".join(f"    {line}" for line in [f"# {shown}", *mutant.verdict.failed[shown]])
    several = len(mutant.sites) > 1
    return "\n".join(
        [
            f"Something has broken in `{package.module}`. This used to pass:",
            "",
            lines,
            "",
            f"Find what is wrong in the package and fix it{', in more than one place' if several else ''}. "
            "The tests that are here must go on passing; they don't cover this.",
        ]
    )
