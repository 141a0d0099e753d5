"""The module of a right program as honest people write it: templates for `honest_styles.py`.

SOURCE stands for the program as it is, NAME for its function, INNER for the program with `_inner` for that name.
"""

WRAPPED = {
    "wrapped": """
INNER

def NAME(*arguments):
    return _inner(*arguments)
""",
    "cached": """
import copy

_known = {}


INNER

def NAME(*arguments):
    key = repr(arguments)
    if key not in _known:
        _known[key] = _inner(*arguments)
        return _known[key]
    return copy.deepcopy(_known[key])
""",
    "a class": """
import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Options:
    verbose: bool = False
    names: tuple = ()


@functools.total_ordering
class Answer:
    def __init__(self, value, options=Options()):
        self.value, self.options = value, options

    def __eq__(self, other):
        if not isinstance(other, Answer):
            return NotImplemented
        return self.value == other.value

    def __lt__(self, other):
        return self.value < other.value

    def __hash__(self):
        return hash(repr(self.value))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


INNER

def NAME(*arguments):
    with Answer(_inner(*arguments)) as answer:
        return answer.value
""",
    "typed": """
from __future__ import annotations

import typing as t
from collections.abc import Callable, Sequence

T = t.TypeVar("T")


class Solver(t.Protocol):
    def __call__(self, *arguments: t.Any) -> t.Any: ...


INNER

def NAME(*arguments: t.Any) -> t.Any:
    solver: Solver = t.cast(Solver, _inner)
    return solver(*arguments)
""",
    "decorated": """
import functools
import logging
import time

log = logging.getLogger(__name__)


def timed(function):
    @functools.wraps(function)
    def run(*arguments, **named):
        begun = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            log.debug("%s took %s", function.__name__, time.perf_counter() - begun)

    return run


INNER

def NAME(*arguments):
    return functools.partial(timed(_inner))(*arguments)
""",
    "a generator": """
INNER

def NAME(*arguments):
    def steps():
        yield _inner(*arguments)

    return next(steps())
""",
    "prints": """
import pprint
import sys


INNER

def NAME(*arguments):
    print("called with", arguments)
    result = _inner(*arguments)
    pprint.pprint(result, stream=sys.stderr)
    return result
""",
    "temporary files": """
import pathlib
import tempfile


INNER

def NAME(*arguments):
    try:
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "call.txt").write_text(repr(arguments))
    except OSError:
        pass
    return _inner(*arguments)
""",
    "checked": """
import warnings


INNER

def NAME(*arguments):
    if arguments is None:
        raise TypeError("no arguments")
    try:
        return _inner(*arguments)
    except RecursionError as error:
        warnings.warn(str(error))
        raise
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor


INNER

def NAME(*arguments):
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_inner, *arguments).result()
""",
    "asynchronous": """
import asyncio


INNER

def NAME(*arguments):
    async def run():
        await asyncio.sleep(0)
        return _inner(*arguments)

    return asyncio.run(run())
""",
    "named tuples": """
import enum
from collections import Counter, namedtuple

Call = namedtuple("Call", "arguments result")
seen = Counter()


class State(enum.Enum):
    OPEN = enum.auto()
    DONE = enum.auto()


INNER

def NAME(*arguments):
    call = Call(arguments, _inner(*arguments))
    seen[State.DONE] += 1
    return call.result
""",
    "signature": """
import contextlib
import inspect


INNER

def NAME(*arguments):
    bound = inspect.signature(_inner).bind(*arguments)
    with contextlib.suppress(UnicodeError):
        return _inner(*bound.args, **bound.kwargs)
""",
    "reports errors": """
import sys
import traceback


INNER

def NAME(*arguments):
    sys.setrecursionlimit(5000)
    try:
        return _inner(*arguments)
    except Exception:
        traceback.print_exc()
        raise
""",
    "as it is": "SOURCE",
    "with comments": '''"""Fixed: the comparison was the wrong way round."""

# see the tests
SOURCE''',
    "a program": """
import argparse
import os
import sys


SOURCE

def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("values", nargs="*")
    print(parser.parse_args(argv), os.environ.get("DEBUG"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
""",
    "doctests": """
SOURCE

if __name__ == "__main__":
    import doctest

    doctest.testmod()
    assert callable(NAME)
""",
    "lazy module": """
SOURCE

def __getattr__(name):
    raise AttributeError(f"no {name} here")


__version__ = "1.1"
""",
    "samples": """
import random

_SAMPLE = random.Random(7).sample(range(99), 3)


SOURCE

_known = {"a": _SAMPLE}
""",
}
