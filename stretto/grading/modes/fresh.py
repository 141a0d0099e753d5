"""A box for one run of a grader: the graded tree in its workspace, another identity than the agent's, then nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from stretto.grading.modes.spec import TaskBroken
from stretto.harness.session import limits
from stretto.records import Task
from stretto.sandbox.box import BoxBroken, BoxError, BoxLost, Result
from stretto.sandbox.pool import BoxPool

KEEP = 1 << 20
"""Bytes of reports taken from one run."""
IDENTITY = 1
"""Which of the boxes' uids grades; agents have 0."""
MEMORY, DISK = 512 << 20, 64 << 20
"""The least that a grading box has, in bytes: tests need more than the agent's tools."""


class TreeRefused(Exception):
    """The tree can't be put into a box: too large, or names that no file can have. The message is a clause."""


async def run_fresh(
    pool: BoxPool,
    task: Task,
    tree: dict[str, bytes],
    driver: str,
    order: bytes,
    seconds: float,
    libraries: Sequence[str],
) -> Result:
    """Run `driver` on `order` over `tree`, in two boxes at most.

    Raises TreeRefused, TaskBroken, and BoxBroken or BoxLost, whichever the second box met.
    """
    try:
        return await _run(pool, task, tree, driver, order, seconds, libraries)
    except (BoxBroken, BoxLost):
        return await _run(pool, task, tree, driver, order, seconds, libraries)


async def _run(
    pool: BoxPool,
    task: Task,
    tree: dict[str, bytes],
    driver: str,
    order: bytes,
    seconds: float,
    libraries: Sequence[str],
) -> Result:
    try:
        own = limits(task, pool)
        wide = dataclasses.replace(own, memory=max(own.memory, MEMORY), disk=max(own.disk, DISK))
        box = await pool.box(libraries=libraries, identity=IDENTITY, limits=wide)
    except ValueError as error:
        raise TaskBroken(f"the libraries of task {task.id} can't be had: {error}") from error
    try:
        try:
            await box.write_all(tree)
        except BoxBroken:
            raise
        except BoxError as error:
            raise TreeRefused(str(error)) from error
        return await box.python(driver, order, seconds, KEEP)
    finally:
        with contextlib.suppress(BoxLost):
            await box.stop()
