"""Bugs put into a Python package that has tests: `stretto tasks make mutate PACKAGE … --out DIR`.

A package's tests run once, so that each function's own tests are known. Single edits are tried on live functions, a few
milliseconds each (`swap`); what the tests kill is kept, alone or two and three together, and run again on edited files
in a new process (`fresh`). A task asks to make the tests that failed both times pass, and none of the others fail. The
agent gets the package without those tests, and the symptom of one as the report of a user would have it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from stretto.records import Task
from stretto.sandbox.pool import BoxPool
from stretto.tasks.factories.edits import Edit, Source, apply, first_line, functions, with_body
from stretto.tasks.factories.operators import edits
from stretto.tasks.factories.package import Package, support
from stretto.tasks.factories.prune import without
from stretto.tasks.factories.suite import Change, Suite, Test, Trial, Verdict

COVERING, GUARDING = 40, 40
"""Tests run per mutant: the most specific that call the function, and others beside them that must go on passing."""
PER_FUNCTION = 6
"""Edits tried in one function, and at most so many tasks with a bug in it."""
ROUND = 96
SECONDS, TIMES_AS_LONG = 2.0, 10
"""Limit of one mutant's tests: so long, and so many times what they take without a bug. A hang is no symptom worth a
task."""
FRESH_SECONDS = 30.0
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
    verdict: Verdict = field(hash=False)

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
        self.took: dict[str, float] = {}
        self.sites: list[tuple[Place, Edit]] = []
        self.tried = 0

    async def survey(self) -> str:
        """Find what there is to change; what was found, as a sentence."""
        self.tests = await self.suite.survey()
        self.took = {test.id: test.seconds for test in self.tests}
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
            size = min(ROUND, 8 + 3 * (count - made))
            batch, self.tried = self.sites[self.tried : self.tried + size], self.tried + size
            sites = [site for site in batch if differs(self.package, *site)]
            killed = await kill(self.suite, [Mutant((site,), Verdict()) for site in sites], self.took)
            chosen = choose(killed, used, count - made, self.rng)
            for mutant in (await confirm(self.suite, chosen, self.tests, self.took))[: count - made]:
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


def differs(package: Package, place: Place, edit: Edit) -> bool:
    """Whether the edit makes another text; whether that is Python is found out in a box."""
    data = (package.root / place.file).read_bytes()
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


async def kill(suite: Suite, mutants: Sequence[Mutant], took: dict[str, float]) -> list[Mutant]:
    """Those that a test kills, on live functions; none that crash, hang or can't be put in."""
    said = await suite.swap([on_live(mutant.changes, mutant.sites[0][0].tests, took) for mutant in mutants])
    return [mutant for mutant, verdict in zip(mutants, said, strict=True) if verdict.failed and not verdict.refused]


def on_live(changes: Sequence[Change], tests: Sequence[str], took: dict[str, float]) -> Trial:
    return Trial(changes, tests, SECONDS + TIMES_AS_LONG * sum(took[id] for id in tests))


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


async def confirm(suite: Suite, mutants: list[Mutant], tests: Sequence[Test], took: dict[str, float]) -> list[Mutant]:
    """Those that fail twice more in new processes with the bugs on disk, each site by a test of its own function, and
    that fail too when the functions are stubs or return a constant.

    The verdict then holds what failed, and what passed both with and without the bugs.
    """
    trials = {mutant: Trial(mutant.changes, required(mutant, tests), FRESH_SECONDS) for mutant in mutants}
    once = dict(zip(mutants, await suite.fresh([*trials.values()]), strict=True))
    left = [mutant for mutant in mutants if tells(mutant, once[mutant], trials[mutant].tests)]
    again = await suite.fresh([trials[mutant] for mutant in left])
    kept = [
        replace(mutant, verdict=once[mutant])
        for mutant, second in zip(left, again, strict=True)
        if once[mutant].passed == second.passed and once[mutant].failed.keys() == second.failed.keys()
    ]
    for body in STUBS:
        said = await suite.swap([on_live(stubbed(suite.package, m, body), [*m.verdict.failed], took) for m in kept])
        kept = [mutant for mutant, verdict in zip(kept, said, strict=True) if verdict.failed or verdict.refused]
    return kept


def tells(mutant: Mutant, verdict: Verdict, ids: Sequence[str]) -> bool:
    """Whether every test had its say, and each site fails a test of its own; else a bug stops the import, say."""
    if verdict.refused or verdict.passed | verdict.failed.keys() != set(ids):
        return False
    return all(any(id in verdict.failed for id in place.tests) for place, _ in mutant.sites)


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
