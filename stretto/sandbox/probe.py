"""`stretto sandbox probe`: attempts at escapes, and at every limit, made for real in real boxes. What holds here?

A *required* row must hold before code that a policy wrote is run on this machine (`check.require`). The others are
limits that not every machine can set; what is missing then is said, and what to do about it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from typing import Any

from stretto.sandbox import trials
from stretto.sandbox.attempts import attempts
from stretto.sandbox.box import BoxError, BoxLost
from stretto.sandbox.capabilities import Capabilities
from stretto.sandbox.pool import BoxPool
from stretto.sandbox.trials import CONFIG, Act, Broken, in_a_box


@dataclass(frozen=True)
class Row:
    name: str
    what: str
    required: bool
    holds: bool
    detail: str  # what got through; empty when it holds


def probe() -> list[Row]:
    """All rows. Raises SandboxUnavailable when no box can be started at all."""
    return asyncio.run(_probe())


async def _probe() -> list[Row]:
    pool = BoxPool(CONFIG)
    await pool.start(trusted=True)
    try:
        return [await judge(pool, *row) for row in table(pool)]
    finally:
        await pool.close()


async def judge(pool: BoxPool, name: str, what: str, required: bool, act: Act) -> Row:
    try:
        await act(pool)
    except (Broken, BoxError, BoxLost, OSError, ValueError) as error:
        return Row(name, what, required, False, str(error) or type(error).__name__)
    return Row(name, what, required, True, "")


Wanted = tuple[str, str, bool, Act]
"""Name, what holds, whether it is required, the attempt."""


def table(pool: BoxPool) -> list[Wanted]:
    inside: list[Wanted] = [(attempt.name, attempt.what, True, in_a_box(attempt.source)) for attempt in attempts()]
    return inside + more(pool.capabilities)


def more(can: Capabilities) -> list[Wanted]:
    """Rows that need the host's view."""
    return [
        (
            "unprivileged",
            "on the host, everything in a box belongs to an ordinary user without groups",
            True,
            trials.who_it_is,
        ),
        ("sealed", "a sealed box has nothing that can be written", True, trials.sealed),
        (
            "planted links",
            "a link, FIFO or device in the workspace leads nowhere when the host reads or copies",
            True,
            trials.links,
        ),
        ("survivors", "nothing outlives a command, not even a daemon", True, trials.survivors),
        ("teardown", "a stopped box leaves no process and no mount", True, trials.teardown),
        ("bases", "a box can't change the base it stands on, nor see a neighbour's changes", True, trials.bases),
        ("disk", "workspace and scratch space end at their size", True, trials.disk),
        ("inodes", "and at their number of files", True, trials.inodes),
        ("processes", "a fork bomb ends at its limit, and its neighbour does not notice", True, trials.processes),
        ("memory of a process", "a process ends at the limit", True, trials.memory),
        ("output", "endless output ends the command", True, trials.output),
        ("time", "a command that ignores signals ends in time", True, trials.in_time),
        (
            "memory of a box",
            "many processes together, and files in memory, end at the limit",
            can.memory_limit,
            trials.tree_memory,
        ),
        ("cpu of a box", "many busy processes together get the share", can.cpu_limit, trials.cpu),
        ("identities", "another identity is another user on the host", False, trials.identities),
    ]


def refused(rows: list[Row]) -> list[Row]:
    """The required rows that do not hold."""
    return [row for row in rows if row.required and not row.holds]


def as_data(rows: list[Row]) -> dict[str, Any]:
    kernel = os.uname()
    return {
        "kernel": kernel.release,
        "machine": kernel.machine,
        "uid": os.geteuid(),
        "ok": not refused(rows),
        "rows": [asdict(row) for row in rows],
    }
