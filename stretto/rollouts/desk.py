"""Where ended rollouts wait a moment for the others of their group, to be graded together.

Grading is cheaper by the group (one oracle run, equal submissions once), but a slow member must not hold up the rest:
what lies on the desk is graded when no member of the group is playing any more, or `patience` seconds after the first
one was laid there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from stretto.grading.grader import Grader, more_seconds
from stretto.grading.outcome import Grade
from stretto.records import Lease, Outcome, Task
from stretto.sandbox.box import BoxLost

GRADING_SECONDS = 60.0
"""The grader has limits for what it runs; this one is for the grader itself."""

log = logging.getLogger("stretto.rollouts")


@dataclass
class _Group:
    playing: int = 0
    waiting: list[tuple[dict[str, bytes], asyncio.Future[Grade]]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class GradingDesk:
    """Group-wise grading for the rollouts of one worker. `draw` gives each group the seed of its hidden inputs."""

    def __init__(
        self, grader: Grader, patience: float = 0.3, draw: Callable[[str], int] = lambda group: secrets.randbits(62)
    ):
        self._grader, self._patience, self._draw = grader, patience, draw
        self._groups: dict[str, _Group] = {}
        self._running: set[asyncio.Task[None]] = set()

    def expect(self, lease: Lease) -> None:
        """A member of this group begins to play. Each must end in `grade` or `absent`."""
        self._groups.setdefault(lease.group, _Group()).playing += 1

    def absent(self, lease: Lease) -> None:
        """A member ended without a submission."""
        group = self._groups[lease.group]
        group.playing -= 1
        if group.playing == 0:
            self._flush(lease)

    async def grade(self, lease: Lease, files: dict[str, bytes]) -> Grade:
        """A member submitted: its grade. What goes wrong in grading is the grade's outcome, never an exception."""
        group = self._groups[lease.group]
        loop = asyncio.get_running_loop()
        verdict: asyncio.Future[Grade] = loop.create_future()
        group.waiting.append((files, verdict))
        group.playing -= 1
        if group.playing == 0:
            self._flush(lease)
        elif group.timer is None:
            group.timer = loop.call_later(self._patience, self._flush, lease)
        return await verdict

    def _flush(self, lease: Lease) -> None:
        group = self._groups[lease.group]
        if group.timer is not None:
            group.timer.cancel()
            group.timer = None
        waiting, group.waiting = group.waiting, []
        if group.playing == 0:
            del self._groups[lease.group]
        if waiting:
            task = asyncio.create_task(self._judge(lease, waiting))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _judge(self, lease: Lease, waiting: list[tuple[dict[str, bytes], asyncio.Future[Grade]]]) -> None:
        grades = await self._grades(lease.task, [files for files, _ in waiting], self._draw(lease.group))
        for (_, verdict), grade in zip(waiting, grades, strict=True):
            if not verdict.done():  # its rollout was cancelled
                verdict.set_result(grade)

    async def _grades(self, task: Task, submissions: list[dict[str, bytes]], seed: int) -> list[Grade]:
        seconds = GRADING_SECONDS + more_seconds(task, len(submissions))
        try:
            async with asyncio.timeout(seconds):
                return await self._grader.grade(task, submissions, seed)
        except (BoxLost, OSError) as error:  # TimeoutError is an OSError
            reason = f"grading failed: {str(error) or f'no grade within {seconds:g} s'}"
            return [Grade(solved=False, outcome=Outcome.INFRA, passed=0, total=0, reason=reason)] * len(submissions)
        except Exception as error:
            if len(submissions) > 1:  # so that only the one that brings it about pays
                return [grade for files in submissions for grade in await self._grades(task, [files], seed)]
            log.exception("grading a submission of %s failed in a way the grader does not know", task.id)
            reason = f"grading this submission failed: {type(error).__name__}: {error}"
            return [Grade(solved=False, outcome=Outcome.FAULT, passed=0, total=0, reason=reason)]
