"""The tools of one rollout at work: its box, opened at the first call that needs one, and what each call came to.

Shared by everyone who acts in an environment: the policy (`loop.py`), a model behind an OpenAI-compatible endpoint
(`remote.py`), a person in a terminal (`person.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from stretto.harness.parse import Attempt
from stretto.harness.toolbox.implementations import IMPLEMENTATIONS
from stretto.harness.toolbox.workspace import Workspace
from stretto.harness.tools import run_call
from stretto.harness.toolset import ToolSet
from stretto.records import CallStatus, Task, ToolCall
from stretto.sandbox.box import Box, BoxLost
from stretto.sandbox.cgroup import Limits
from stretto.sandbox.pool import BoxPool

log = logging.getLogger("stretto.harness")

WELL_FORMED = {CallStatus.OK, CallStatus.FAILED}
_LIMITS = {"memory_mib": "memory", "workspace_mib": "disk"}


@dataclass(frozen=True)
class Called:
    """What became of one attempt. `tool` is its key in the tool set, empty when there is no such tool."""

    attempt: Attempt
    tool: str
    observation: str
    status: CallStatus
    seconds: float

    @property
    def well_formed(self) -> bool:
        return self.status in WELL_FORMED

    def ended(self, key: str) -> bool:
        """Whether this is a carried-out call of the tool `key`."""
        return self.tool == key and self.status is CallStatus.OK

    def record(self, segment: int = 0, start: int = 0, end: int = 0) -> ToolCall:
        """`[start, end)` is the call's token span in that segment."""
        return ToolCall(
            name=self.attempt.name,
            status=self.status,
            segment=segment,
            start=start,
            end=end,
            arguments=self.attempt.arguments if self.well_formed else {},
            observation=self.observation,
            seconds=self.seconds,
            tool=self.tool if self.tool != self.attempt.name else "",
        )


class Session:
    """session = Session(task, pool, toolset)
    called = await session.call(attempt)      # never raises for what the policy does; BoxLost is ours
    files = await session.collect()           # the workspace; BoxError when it can't be collected
    await session.close()
    """

    def __init__(self, task: Task, pool: BoxPool, toolset: ToolSet, latency: Iterator[float] | None = None):
        """`latency`, for experiments: seconds that the box sleeps before each call."""
        self.left = math.inf
        """Seconds that tools may still run; whoever plays counts."""
        self.task, self.pool, self.toolset, self._latency = task, pool, toolset, latency
        self.workspace: Workspace | None = None
        self._box: Box | None = None

    async def call(self, attempt: Attempt) -> Called:
        attempt = sendable(attempt)
        tool = self.toolset.tools.get(attempt.name)
        box = await self.open() if attempt.status is CallStatus.OK else None
        started = time.perf_counter()  # a box takes its time to start, which is not the policy's
        try:
            if box is not None:
                if self._latency is not None:
                    await box.sleep(next(self._latency))
                assert self.workspace is not None
                self.workspace.left = self.left
            observation, status = await run_call(attempt, self.workspace, self.toolset)  # type: ignore[arg-type]
        except (BoxLost, TimeoutError):
            raise
        except Exception as error:  # not proven to be ours, so it stays in the batch
            log.exception("%s of task %s failed in a way its tool does not know", attempt.name, self.task.id)
            observation, status = f"error: {attempt.name} failed ({type(error).__name__})", CallStatus.FAILED
        observation = observation.encode(errors="replace").decode()
        key = tool.key if tool else ""
        return Called(attempt, key, observation, status, time.perf_counter() - started)

    async def typed(self, command: str) -> str:
        """What the box's terminal answers, for a person whose tools include none. Raises BoxError, BoxLost."""
        await self.open()
        assert self.workspace is not None
        return await IMPLEMENTATIONS["run"](self.workspace, command)

    async def collect(self) -> dict[str, bytes]:
        box = await self.open()
        limits = self.toolset.limits
        return await box.files(limits.files, limits.bytes)

    @property
    def plan(self) -> list[dict[str, str]]:
        """The steps of the last todo."""
        return self.workspace.todos if self.workspace else []

    @property
    def opened(self) -> bool:
        """Whether there is a box: a call has come as far as that."""
        return self._box is not None

    async def close(self) -> None:
        if self._box is not None:
            await self._box.stop()

    async def open(self) -> Box:
        """The box, begun at the first need of it. Raises BoxLost."""
        if self._box is None:
            try:
                self._box = await agent_box(self.task, self.pool, self.toolset.libraries)
            except BoxLost:
                raise
            except Exception as error:  # the policy has not touched it yet
                reason = str(error) or type(error).__name__
                raise BoxLost(f"the files of task {self.task.id} cannot be put into a box: {reason}") from error
            libraries = bool(self.task.libraries or self.toolset.libraries)
            self.workspace = Workspace(
                self._box, self.task.files, self.toolset.limits, self.toolset.user, libraries=libraries
            )
        return self._box


async def agent_box(task: Task, pool: BoxPool, libraries: Sequence[str] = ()) -> Box:
    """A box as an agent gets it: the task's tree, its libraries and those of its tools, its limits. Raises BoxLost,
    BoxError, ValueError for a library or folder that is not there."""
    wider = limits(task, pool) if task.limits else None
    libraries = [*task.libraries, *libraries]
    return await pool.box(task.files, base=task.environment or None, libraries=libraries, limits=wider)


def limits(task: Task, pool: BoxPool) -> Limits:
    """The box's limits as the task wants them, else the pool's."""
    known = {name: int(task.limits[key] * (1 << 20)) for key, name in _LIMITS.items() if task.limits.get(key)}
    return replace(pool.limits, **known)


def sendable(attempt: Attempt) -> Attempt:
    """The attempt, or a broken one if its arguments are no ordinary text and numbers (lone surrogates, huge integers):
    JSON can spell them, but neither a file nor a record can hold them."""
    try:
        msgspec.msgpack.encode((attempt.name, attempt.arguments))
    except (UnicodeEncodeError, OverflowError, RecursionError, ValueError):
        error = "the call holds text or a number that cannot be stored"
        return Attempt(CallStatus.BAD_ARGUMENTS, start=attempt.start, end=attempt.end, error=error, id=attempt.id)
    return attempt
