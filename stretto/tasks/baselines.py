"""Submissions that solve nothing and must earn nothing: what was given, stubs, constants.

A task that pays one of them pays for its easy cases, and a policy finds that before it finds the solution.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from stretto.grading.submission import SOLUTION, base_tree
from stretto.records import Task
from stretto.tasks.factories.edits import Source, apply, functions, with_body

CONSTANTS = ("None", "True", "False", "0", "1", '""', "[]", "{}")
STUB = "raise NotImplementedError"
ECHO = "return next(iter(locals().values()), None)"


def baselines(task: Task) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Names and trees. A stub or constant takes the place of each function that the reference changes or adds."""
    given = base_tree(task)
    yield "null", given
    bodies = [("stub", STUB), ("echo", ECHO), *((f"constant {text}", f"return {text}") for text in constants(task))]
    for name, statement in bodies:
        tree = replaced(task, given, statement)
        if tree != given:
            yield name, tree


def constants(task: Task) -> tuple[str, ...]:
    """Values to return. Tests of a suite are dear, so that it meets fewer of them."""
    return CONSTANTS if task.mode == "oracle" else CONSTANTS[:2]


def replaced(task: Task, given: dict[str, bytes], statement: str) -> dict[str, bytes]:
    """The given tree with `statement` for the body of each function under test."""
    tree = dict(given)
    called = _called(task)
    for path, text in task.grading.items():
        place = path.removeprefix(SOLUTION)
        if not path.startswith(SOLUTION) or not place.endswith(".py"):
            continue
        data = text.encode()
        try:
            source = Source(data)
            before = {name: ast.dump(node) for name, node in functions(ast.parse(given.get(place, b"")))}
        except (SyntaxError, ValueError):
            continue
        changed = [
            with_body(source, node, statement)
            for name, node in functions(source.tree)
            if (name in called if called else before.get(name) != ast.dump(node))
        ]
        if changed:
            tree[place] = apply(data, changed)
    return tree


def _called(task: Task) -> set[str]:
    """The functions that an oracle calls; empty in other modes."""
    if task.mode != "oracle":
        return set()
    try:
        spec = msgspec.json.decode(task.grading["tests/oracle.json"])
        return {target["function"] for target in (spec, *spec.get("also", ()))}
    except (KeyError, TypeError, msgspec.DecodeError):
        return set()
