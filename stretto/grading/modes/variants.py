"""Which of the required tests a rerun turns into twins, in which files they are defined, and in which layout."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stretto.grading import twins
from stretto.grading.detectors.tree import is_test
from stretto.grading.modes.spec import PytestSpec

Function = tuple[str, str]
"""A file, and the qualified name of a test in it."""


@dataclass(frozen=True)
class Variant:
    """A rerun: the files in which tests were replaced, and what must become of which id."""

    files: dict[str, bytes]
    originals: frozenset[str]
    twins: frozenset[str]


def turn(
    spec: PytestSpec, tree: dict[str, bytes], defined: Mapping[str, Function], index: int, rng: random.Random
) -> Variant | None:
    """Turn half of the tests that must be made to pass into twins, rounded up with an even index, else down; and a few
    of the others. `defined`: those that may be turned. None if none can be."""
    required = [*spec.fail_to_pass, *spec.pass_to_pass]
    goal = sorted({defined[id] for id in spec.fail_to_pass or spec.pass_to_pass if id in defined})
    if not goal:
        return None
    chosen = set(rng.sample(goal, (len(goal) + (index + 1) % 2) // 2))
    chosen |= {key for key in sorted({*defined.values()} - {*goal}) if rng.random() < 0.2}
    files = {}
    for path in sorted({path for path, _ in chosen}):
        names = {name for at, name in chosen if at == path}
        files[path] = twins.turned(text(tree[path]), names, rng).encode()
    turned = frozenset(id for id, key in defined.items() if key in chosen)
    return Variant(files, frozenset(required) - turned, turned)


def laid_out(paths: Iterable[str], tree: dict[str, bytes]) -> dict[str, bytes]:
    """These files in the layout of twins, less those that can't be written again."""
    files = {}
    for path in paths:
        try:
            files[path] = twins.laid_out(text(tree[path])).encode()
        except (SyntaxError, ValueError, RecursionError):
            continue
    return files


def functions_of(ids: Iterable[str], tree: dict[str, bytes]) -> dict[str, Function]:
    """Where the test of each id is defined. A method that its class inherits is found by its name, if only one class of
    the tests has it; a test that is made at run time is not found."""
    names = {
        path: set(twins.tests(text(data))) for path, data in tree.items() if is_test(path) and path.endswith(".py")
    }
    by_method: dict[str, list[Function]] = defaultdict(list)
    for path, found in names.items():
        for name in found:
            if "::" in name:
                by_method[name.rpartition("::")[2]].append((path, name))
    defined = {}
    for id in ids:
        path, _, rest = id.partition("::")
        name = rest.split("[")[0]
        if path not in names and path in tree:
            names[path] = set(twins.tests(text(tree[path])))
        if name in names.get(path, ()):
            defined[id] = (path, name)
        elif "::" in name and len(inherited := by_method[name.rpartition("::")[2]]) == 1:
            defined[id] = inherited[0]
    return defined


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
