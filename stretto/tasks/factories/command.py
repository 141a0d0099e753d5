"""`stretto tasks make KIND …`: run a factory and write what it makes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from stretto.records import Task
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder
from stretto.tasks.factories import codeio, history, impossible, questions, swebench
from stretto.tasks.factories.mutate import Mutator
from stretto.tasks.factories.package import SourceError, open_package
from stretto.tasks.factories.suite import BOXES
from stretto.tasks.repair import generate

Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What is to be made."""

    kind: str
    sources: tuple[Path, ...]
    count: int
    seed: int
    split: str = ""
    libraries: tuple[str, ...] = ()
    git: str = "ancestors"


def make(order: Order, out: Path, say: Say) -> int:
    """Write tasks below `out`; returns how many. Raises SourceError, TaskError, OSError with a sentence."""
    started, made = time.monotonic(), 0

    async def run() -> None:
        nonlocal made
        scratch = Path(tempfile.mkdtemp(prefix="tasks-"))
        try:
            async with aclosing(tasks(order, scratch, say)) as supply:
                async for task in supply:
                    if order.split:
                        task = msgspec.structs.replace(task, split=order.split)
                    folder.write(task, out)
                    made += 1
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    asyncio.run(run())
    fewer = f", fewer than the {order.count} asked for: that is all there was" if made < order.count else ""
    say(f"{made} tasks in {out}/{fewer} ({time.monotonic() - started:.0f} s)")
    return made


async def tasks(order: Order, scratch: Path, say: Say) -> AsyncGenerator[Task]:
    """The tasks of an order; what has to be on disk for them lies below `scratch`."""
    if order.kind == "repair":
        for repair in islice(generate(order.split or "train", order.seed), order.count):
            yield repair.task
        return
    if order.kind != "codeio" and not order.sources:
        raise SourceError(f"make {order.kind} needs at least one {WANTED[order.kind]}")
    if order.kind == "verifiers":
        async for task in questions.tasks(str(order.sources[0]), order.count, order.seed, say):
            yield task
        return
    pool = BoxPool(BOXES)
    await pool.start()
    try:
        if order.kind == "codeio":
            supply = codeio.tasks(pool, order.count, order.seed)
        elif order.kind == "mutate":
            supply = mutated(order, pool, scratch, say)
        elif order.kind == "history":
            supply = history.tasks(order.sources[0], pool, order.count, order.libraries, order.git, scratch, say)
        elif order.kind == "swebench":
            supply = swebench.tasks(order.sources, order.count, order.libraries, order.git, scratch, say)
        else:
            supply = impossible.tasks(order.sources, order.count, order.seed)
        async with aclosing(supply):
            async for task in supply:
                yield task
    finally:
        await pool.close()


WANTED = {
    "mutate": "package: a folder or .tar.gz with Python sources and tests",
    "history": "git repository",
    "impossible": "folder of tasks",
    "verifiers": "environment of the verifiers library",
    "swebench": "file of rows, and the checkouts they are about",
}


async def mutated(order: Order, pool: BoxPool, scratch: Path, say: Say) -> AsyncGenerator[Task]:
    """Of several packages, the small ones first; what one can't give, the others do."""
    mutators: list[Mutator] = []
    for number, source in enumerate(order.sources):
        try:
            package = await asyncio.to_thread(open_package, source, scratch / str(number))
            mutators.append(Mutator(package, pool, order.seed, order.libraries))
        except SourceError as error:
            say(f"left out: {error}")
    surveys = await asyncio.gather(*(mutator.survey() for mutator in mutators), return_exceptions=True)
    usable: list[Mutator] = []
    for mutator, found in zip(mutators, surveys, strict=True):
        if isinstance(found, SourceError):
            say(f"left out: {found}")
        elif isinstance(found, BaseException):
            raise found
        else:
            say(found)
            usable.append(mutator)
    if not usable:
        raise SourceError("no task can be made of what was given; the reasons are above")
    left = order.count
    for number, mutator in enumerate(sorted(usable, key=lambda m: (len(m.sites), m.package.title))):
        share = -(-left // (len(usable) - number))
        made = 0
        async with aclosing(mutator.tasks(share)) as supply:
            async for task in supply:
                made += 1
                yield task
        left -= made
        say(f"{mutator.package.title}: {made} tasks of {mutator.tried} edits tried")
