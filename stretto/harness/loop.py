"""One rollout: the policy speaks, its tool calls are carried out and answered, until it submits or a budget ends.

    prompt ─▶ engine ─▶ sampled ids ─▶ text ─▶ attempts ─▶ box ─▶ observations ─▶ ids, appended ─▶ engine …

The history is append-only (see history.py): what was sampled is kept as sampled, text is only ever read from it.

A turn that is cut at its token limit has no stop token. The conversation needs one, so the harness appends it, marked
as *not sampled*: the policy is neither trained on a token it did not choose nor shown a conversation without it.

How it may end is listed in ending.py. Whatever the policy does is its own: only the engine, the box or the
clock of the lease, each seen from outside, make a rollout `infra`. Context compaction is not here: one segment.

An engine that fails in the middle of a rollout need not end it: `elsewhere` names another one, which gets the whole
history with the next request, as every request holds it.

Of the engine's room only `client.py` is used, which imports nothing of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from stretto.config import HarnessConfig
from stretto.engine.client import EngineClient, EngineError
from stretto.harness.chat import Chat, tool_prompt
from stretto.harness.ending import Ending
from stretto.harness.history import History, StreamError
from stretto.harness.parse import Attempt, parse
from stretto.harness.spans import Spans, token_span
from stretto.harness.tools import TOOLS, Workspace, run_call
from stretto.records import CallStatus, GenerateRequest, GenerateResponse, Lease, Message, Segment, ToolCall
from stretto.sandbox.box import Box, BoxError, BoxLost
from stretto.sandbox.pool import BoxPool

log = logging.getLogger("stretto.harness")

FAULT_AFTER = 5
"""Attempts in a row that were no well-formed calls, after which a rollout ends as the policy's fault."""
TOOL_SHARE = 0.25
"""Share of the lease's time that the policy's tools may run, so that it can't run out the clock of the lease."""
MAX_FILES, MAX_BYTES = 64, 1 << 20
"""What a submission may hold."""
RELEASE_SECONDS = 2.0
MAX_ABORTS = 8
"""Times the engine may break off one turn."""

_NO_CALL = "error: no tool call; write <tool_call> … </tool_call>"
_WELL_FORMED = {CallStatus.OK, CallStatus.FAILED}

Elsewhere = Callable[[EngineClient], Awaitable[EngineClient]]
"""From the engine that failed to the one to go on with. Raises EngineError when there is none."""


@dataclass(frozen=True)
class Played:
    """A rollout before grading. `files` is the workspace at the moment of submission, else empty."""

    segments: list[Segment]
    calls: list[ToolCall]
    messages: list[Message]
    turns: int
    ending: Ending
    files: dict[str, bytes] = field(default_factory=dict)
    reason: str = ""
    engine: str = ""  # URL of the one that served the last turn


async def play(
    lease: Lease,
    engine: EngineClient,
    chat: Chat,
    pool: BoxPool,
    config: HarnessConfig,
    spans: Spans | None = None,
    elsewhere: Elsewhere | None = None,
    turn_seconds: float = math.inf,
    latency: Iterator[float] | None = None,
) -> Played:
    """Play one lease to its ending and give its box and its KV cache back.

    Takes at most the lease's time less a tenth, which is left for grading. `spans` may be shared by the rollouts of a
    process, as it remembers token lengths. An engine that fails, or takes longer than `turn_seconds` for a turn, is
    left for the one that `elsewhere` names; without it the rollout ends as `infra`. `latency`, for experiments: seconds
    that the box sleeps before each tool call.
    """
    left = lease.deadline - time.time()
    rollout = _Rollout(
        lease, engine, chat, pool, config, spans or Spans(chat), left * TOOL_SHARE, elsewhere, turn_seconds, latency
    )
    try:
        async with asyncio.timeout(left * 0.9):
            ending, reason = await rollout.run()
    except TimeoutError:
        ending, reason = Ending.INFRA, f"the lease ran out after {left * 0.9:.0f} s, waiting for {rollout.waiting_for}"
    except StreamError as error:
        ending, reason = Ending.INFRA, f"{lease.engine}: {error}"
    except (EngineError, BoxLost, OSError) as error:
        ending, reason = Ending.INFRA, str(error) or type(error).__name__
    finally:
        await rollout.close()
    return Played(
        segments=[rollout.history.segment()],
        calls=rollout.calls,
        messages=rollout.messages,
        turns=rollout.turns,
        ending=ending,
        files=rollout.files,
        reason=reason,
        engine=rollout.engine.url,
    )


class _Rollout:
    def __init__(
        self,
        lease: Lease,
        engine: EngineClient,
        chat: Chat,
        pool: BoxPool,
        config: HarnessConfig,
        spans: Spans,
        tool_seconds: float,
        elsewhere: Elsewhere | None,
        turn_seconds: float,
        latency: Iterator[float] | None,
    ):
        self.lease, self.engine, self.chat, self.pool, self.config = lease, engine, chat, pool, config
        self.spans, self.tool_seconds = spans, tool_seconds
        self._elsewhere, self._turn_seconds, self._latency = elsewhere, turn_seconds, latency
        self.history = History(chat.start(lease.task.instruction, system_text(config)), lease.sampling.truncated)
        self.messages = [Message(role="user", text=lease.task.instruction)]
        self.calls: list[ToolCall] = []
        self.files: dict[str, bytes] = {}
        self.turns = 0
        self.waiting_for = "nothing"
        self._box: Box | None = None
        self._ill_formed = 0  # in a row

    async def run(self) -> tuple[Ending, str]:
        """Turns until an ending, with a sentence unless it is `submitted`."""
        budget = self.config.max_tokens
        if len(self.history) >= budget:
            return Ending.TOKENS, f"the prompt alone takes {len(self.history)} of {budget} tokens"
        while True:
            spoken = await self._speak(min(self.config.max_turn_tokens, budget - len(self.history)))
            self.turns += 1
            observations, ended = await self._act(spoken)
            if ended is None:
                ended = self._answer(spoken, observations)
            if ended is not None:
                return ended

    async def close(self) -> None:
        """Give the box and the KV cache back; an engine that does not answer drops its idle sessions by itself."""
        stop = self._box.stop() if self._box is not None else asyncio.sleep(0)
        await asyncio.gather(stop, self._release())

    async def _release(self) -> None:
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                await self.engine.release(self.lease.rollout)

    async def _speak(self, limit: int) -> list[int]:
        """One assistant turn. What the engine breaks off goes on from its last token, within the same limit."""
        spoken: list[int] = []
        for _ in range(MAX_ABORTS):
            request = GenerateRequest(
                ids=self.history.ids,
                max_tokens=limit - len(spoken),
                stop=self.chat.ends,
                sampling=self.lease.sampling,
                session=self.lease.rollout,
                routes_from=self.history.rows,
            )
            response = await self._generate(request)
            if len(response.ids) > request.max_tokens:
                raise StreamError(
                    f"the engine sampled {len(response.ids)} tokens where {request.max_tokens} were asked"
                )
            self.history.take(response)
            spoken += response.ids
            if spoken and (response.finish != "aborted" or spoken[-1] in self.chat.ends or len(spoken) == limit):
                return spoken
            if response.finish != "aborted":
                raise StreamError(f"the engine sampled nothing and calls that {response.finish!r}")
        raise StreamError(f"the engine broke off turn {self.turns + 1} of {self.lease.rollout} {MAX_ABORTS} times")

    async def _generate(self, request: GenerateRequest) -> GenerateResponse:
        while True:
            self.waiting_for = f"{self.engine.url} in turn {self.turns + 1}"
            seconds = min(self._turn_seconds, max(self.lease.deadline - time.time(), 0.1))
            try:
                return await self.engine.generate(request, timeout=seconds)
            except EngineError as error:
                if self._elsewhere is None or error.status == 400:  # a bad request is bad everywhere
                    raise
                self.waiting_for = f"an engine to go on with, as {error}"
                self.engine = await self._elsewhere(self.engine)

    async def _act(self, spoken: list[int]) -> tuple[list[str], tuple[Ending, str] | None]:
        """Carry out the calls of a turn in order, up to a submit: their observations, and the ending they bring."""
        text = self.chat.said(spoken)
        self.messages.append(Message(role="assistant", text=text))
        attempts = parse(text) or [Attempt(CallStatus.NO_CALL, end=len(text), error=_NO_CALL.removeprefix("error: "))]
        ends = self.spans.ends(spoken[:-1] if spoken[-1] in self.chat.stop else spoken, text)
        first = len(self.history) - len(spoken)
        observations = []
        for attempt in map(_sendable, attempts):
            started = time.perf_counter()
            observation, status = await self._carry_out(attempt)
            seconds = time.perf_counter() - started
            start, end = token_span(ends, attempt.start, attempt.end)
            self.calls.append(
                ToolCall(
                    name=attempt.name,
                    status=status,
                    segment=0,
                    start=first + start,
                    end=first + end,
                    arguments=attempt.arguments if status in _WELL_FORMED else {},
                    observation=observation,
                    seconds=seconds,
                )
            )
            self.messages.append(Message(role="tool", text=observation))
            observations.append(observation)
            self.tool_seconds -= seconds
            self._ill_formed = 0 if status in _WELL_FORMED else self._ill_formed + 1
            if status is CallStatus.OK and attempt.name == "submit":
                return observations, await self._collect()
            if self.tool_seconds < 0:
                return observations, (Ending.TIME, "the rollout's tools ran longer than their share of the lease")
            if self._ill_formed >= FAULT_AFTER:
                return observations, (Ending.FAULT, f"{FAULT_AFTER} attempts in a row were no well-formed tool calls")
        return observations, None

    async def _carry_out(self, attempt: Attempt) -> tuple[str, CallStatus]:
        self.waiting_for = f"the box to run {attempt.name or 'a call'}"
        if self._box is None and attempt.status is CallStatus.OK:
            try:
                self._box = await self.pool.box(self.lease.task.files)
            except BoxError as error:  # the policy has not touched it yet
                raise BoxLost(f"the files of task {self.lease.task.id} cannot be put into a box: {error}") from error
        try:
            if self._latency is not None and self._box is not None:
                await self._box.sleep(next(self._latency))
            workspace = Workspace(self._box, self.lease.task.files)  # type: ignore[arg-type]
            observation, status = await run_call(attempt, workspace)
        except (BoxLost, TimeoutError):
            raise
        except Exception as error:  # not proven to be ours, so it stays in the batch
            log.exception("%s: %s failed in a way its tool does not know", self.lease.rollout, attempt.name)
            observation, status = f"error: {attempt.name} failed ({type(error).__name__})", CallStatus.FAILED
        return observation.encode(errors="replace").decode(), status

    async def _collect(self) -> tuple[Ending, str]:
        assert self._box is not None
        self.waiting_for = "the box to hand over the workspace"
        try:
            self.files = await self._box.files(MAX_FILES, MAX_BYTES)
        except BoxError as error:
            return Ending.FAULT, f"the workspace cannot be collected: {error}"
        return Ending.SUBMITTED, ""

    def _answer(self, spoken: list[int], observations: list[str]) -> tuple[Ending, str] | None:
        """Append what the policy sees next, unless there will be no next turn."""
        if self.turns == self.config.max_turns:
            if self._ill_formed == len(self.calls):
                return Ending.FAULT, f"none of {self.turns} turns held a well-formed tool call"
            return Ending.TURNS, f"no submission within {self.turns} turns"
        ids = self.chat.observe(observations)
        if spoken[-1] not in self.chat.stop:  # cut at its limit, or ended by a token that opened another message
            ids = self.chat.stop[:1] + ids
        if len(self.history) + len(ids) >= self.config.max_tokens:
            return Ending.TOKENS, f"no submission within {self.config.max_tokens} tokens"
        self.history.give(ids)
        return None


def system_text(config: HarnessConfig) -> str:
    """The system message: the configured text, and the tools' schemas where `show_tools` asks for them."""
    shown = tool_prompt([tool.schema for tool in TOOLS.values()]) if config.show_tools else ""
    return "\n\n".join(part for part in (config.system_prompt, shown) if part)


def _sendable(attempt: Attempt) -> Attempt:
    """The attempt, or a broken one if its arguments are no ordinary text and numbers (lone surrogates, huge integers):
    JSON can spell them, but neither a file nor a record can hold them."""
    try:
        msgspec.msgpack.encode((attempt.name, attempt.arguments))
    except (UnicodeEncodeError, OverflowError, RecursionError, ValueError):
        error = "the call holds text or a number that cannot be stored"
        return Attempt(CallStatus.BAD_ARGUMENTS, start=attempt.start, end=attempt.end, error=error)
    return attempt
