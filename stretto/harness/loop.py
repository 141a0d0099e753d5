"""One rollout: the policy speaks, its tool calls are carried out and answered, until it submits or a budget ends.

    prompt ─▶ engine ─▶ sampled ids ─▶ text ─▶ attempts ─▶ box ─▶ observations ─▶ ids, appended ─▶ engine …

The history is append-only (see history.py): what was sampled is kept as sampled, text is only ever read from it.

A turn that is cut at its token limit has no stop token. The conversation needs one, so the harness appends it, marked
as *not sampled*: the policy is neither trained on a token it did not choose nor shown a conversation without it.

How it may end is listed in ending.py. Whatever the policy does is its own: only the engine, the box or the
clock of the lease, each seen from outside, make a rollout `infra`.

An engine that fails in the middle of a rollout need not end it (speaker.py). A product's own loop in place of this one
is product.py. A context that fills up is summed up by the policy (summary.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from stretto.config import HarnessConfig
from stretto.engine.client import EngineClient
from stretto.harness.blame import ended
from stretto.harness.chat import Chat
from stretto.harness.declare import of
from stretto.harness.effort import Effort
from stretto.harness.ending import Ending
from stretto.harness.history import History
from stretto.harness.parse import Attempt
from stretto.harness.session import Called, Session
from stretto.harness.spans import Spans, token_span
from stretto.harness.speaker import Elsewhere, Speaker
from stretto.harness.summary import ASK, NO_ROOM, again
from stretto.harness.tools import NANO
from stretto.harness.toolset import ToolSet, ToolSetError
from stretto.harness.turn import said
from stretto.records import CallStatus, Lease, Message, Segment, Task, ToolCall
from stretto.sandbox.box import BoxError, BoxLost
from stretto.sandbox.pool import BoxPool

log = logging.getLogger("stretto.harness")

FAULT_AFTER = 5
"""Attempts in a row that were no well-formed calls, after which a rollout ends as the policy's fault."""
TRAIN = "train"
"""Purpose of a rollout that is trained on; all others are evaluations."""
TOOL_SHARE = 0.25
"""Share of the lease's time that the policy's tools may run, so that it can't run out the clock of the lease."""


@dataclass(frozen=True)
class Played:
    """A rollout before grading. `files` is the workspace at the moment of submission; in an evaluation also what was
    left behind without one, for the permissive grade."""

    segments: list[Segment]
    calls: list[ToolCall]
    messages: list[Message]
    turns: int
    ending: Ending
    files: dict[str, bytes] = field(default_factory=dict)
    reason: str = ""
    engine: str = ""  # URL of the one that served the last turn
    tools: str = ""  # the tool set's version
    effort: Effort = field(default_factory=Effort)


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
    toolset, problem = _toolset(lease.task, config)
    session = Session(lease.task, pool, toolset, latency)
    rollout = _Rollout(
        lease, engine, chat, config, spans or Spans(chat), left * TOOL_SHARE, elsewhere, turn_seconds, session
    )
    try:
        ending, reason = (Ending.INFRA, problem) if problem else await ended(rollout.play(), rollout.speaker, left)
    finally:
        await rollout.close()
    return Played(
        segments=[history.segment() for history in rollout.histories],
        calls=rollout.calls,
        messages=rollout.messages,
        turns=rollout.turns,
        ending=ending,
        files=rollout.files,
        reason=reason,
        engine=rollout.speaker.engine.url,
        tools=toolset.version,
        effort=rollout.effort,
    )


def _toolset(task: Task, config: HarnessConfig) -> tuple[ToolSet, str]:
    """The task's tools; those of nano and a sentence when its table can't be read: not the policy's doing."""
    try:
        return of(task, config.tools), ""
    except ToolSetError as error:
        return NANO, str(error)


class _Rollout:
    def __init__(
        self,
        lease: Lease,
        engine: EngineClient,
        chat: Chat,
        config: HarnessConfig,
        spans: Spans,
        tool_seconds: float,
        elsewhere: Elsewhere | None,
        turn_seconds: float,
        session: Session,
    ):
        self.lease, self.chat, self.config, self.session = lease, chat, config, session
        self.spans, self.tool_seconds = spans, tool_seconds
        self.speaker = Speaker(lease, engine, chat, elsewhere, turn_seconds)
        self.histories: list[History] = []
        self.messages: list[Message] = []
        self._begin(lease.task.instruction)
        self.calls: list[ToolCall] = []
        self.files: dict[str, bytes] = {}
        self.turns = 0
        self.effort = Effort()
        self._ill_formed = 0  # in a row
        self._attempts: list[Attempt] = []  # of the last turn
        self._summing = False  # the next turn is a summary

    async def play(self) -> tuple[Ending, str]:
        """Turns until an ending, with a sentence unless it is `submitted`. An evaluation also takes along what was left
        behind without a submission."""
        ending, reason = await self._run()
        if self.lease.purpose != TRAIN and ending is not Ending.SUBMITTED and self.session.opened:
            with contextlib.suppress(BoxError, BoxLost):
                self.files = await self.session.collect()
        return ending, reason

    async def _run(self) -> tuple[Ending, str]:
        budget = self.config.max_tokens
        if len(self.history) >= budget:
            return Ending.TOKENS, f"the prompt alone takes {len(self.history)} of {budget} tokens"
        while True:
            limit = min(self.config.max_turn_tokens, budget - len(self.history))
            spoken = await self.speaker.speak(self.history, limit, len(self.histories) - 1)
            self.turns += 1
            if self._summing:
                ended = self._go_on(spoken)
            else:
                observations, ended = await self._act(spoken)
                ended = ended or self._answer(spoken, observations)
            if ended is not None:
                return ended

    @property
    def history(self) -> History:
        """Of the present segment."""
        return self.histories[-1]

    async def close(self) -> None:
        """Give the box and the KV cache back."""
        await asyncio.gather(self.session.close(), self.speaker.release())

    async def _act(self, spoken: list[int]) -> tuple[list[str], tuple[Ending, str] | None]:
        """Carry out a turn's calls in order, up to one that ends the rollout: their observations, and the ending."""
        heard = said(spoken, self.chat, self.spans)
        text = heard.text
        self.messages.append(Message(role="assistant", text=text))
        self.effort.turn(text, heard.ends, len(spoken), heard.spans)
        attempts, spoken_calls = heard.attempts, heard.spans
        if not attempts:
            attempts = [Attempt(CallStatus.NO_CALL, end=len(text), error=self.chat.format.no_call)]
            spoken_calls = [token_span(heard.ends, 0, len(text))]
        self._attempts = attempts
        first = len(self.history) - len(spoken)
        observations = []
        for attempt, (start, end) in zip(attempts, spoken_calls, strict=True):
            self.speaker.waiting_for = f"the box to run {attempt.name or 'a call'}"
            self.session.left = self.tool_seconds
            called = await self.session.call(attempt)
            self.calls.append(called.record(len(self.histories) - 1, first + start, first + end))
            self.messages.append(Message(role="tool", text=called.observation))
            observations.append(called.observation)
            self.tool_seconds -= called.seconds
            self._ill_formed = 0 if called.well_formed else self._ill_formed + 1
            if called.ended("submit"):
                return observations, await self._collect()
            if called.ended("give_up"):
                return observations, (Ending.GAVE_UP, given_up(called))
            if self.tool_seconds < 0:
                return observations, (Ending.TIME, "the rollout's tools ran longer than their share of the lease")
            if self._ill_formed >= FAULT_AFTER:
                return observations, (Ending.FAULT, f"{FAULT_AFTER} attempts in a row were no well-formed tool calls")
        return observations, None

    async def _collect(self) -> tuple[Ending, str]:
        self.speaker.waiting_for = "the box to hand over the workspace"
        try:
            self.files = await self.session.collect()
        except BoxError as error:
            return Ending.FAULT, f"the workspace cannot be collected: {error}"
        return Ending.SUBMITTED, ""

    def _answer(self, spoken: list[int], observations: list[str]) -> tuple[Ending, str] | None:
        """Append what the policy sees next, unless there will be no next turn."""
        if self.turns == self.config.max_turns:
            if self._ill_formed == len(self.calls):
                return Ending.FAULT, f"none of {self.turns} turns held a well-formed tool call"
            return Ending.TURNS, f"no submission within {self.turns} turns"
        # a turn that was cut at its limit, or ended by a token that opened another message, is closed first
        closing = [] if spoken[-1] in self.chat.stop else self.chat.stop[:1]
        ids = closing + self.chat.observe(observations, self._attempts)
        if 0 < self.config.compact_tokens <= len(self.history) + len(ids):
            ids = closing + self.chat.observe(observations, self._attempts, then=ASK)
            if len(self.history) + len(ids) + self.config.max_turn_tokens > self.config.max_tokens:
                ids = closing + self.chat.observe([NO_ROOM] * len(observations), self._attempts, then=ASK)
            self.messages.append(Message(role="user", text=ASK))
            self._summing = True
        if len(self.history) + len(ids) >= self.config.max_tokens:
            return Ending.TOKENS, f"no submission within {self.config.max_tokens} tokens"
        self.history.give(ids)
        self.effort.reading += len(ids)
        return None

    def _go_on(self, spoken: list[int]) -> tuple[Ending, str] | None:
        """The turn was a summary: begin a new segment with it."""
        heard = said(spoken, self.chat, self.spans)
        self.messages.append(Message(role="assistant", text=heard.text))
        self.effort.turn(heard.text, heard.ends, len(spoken), [])
        if self.turns == self.config.max_turns:
            return Ending.TURNS, f"no submission within {self.turns} turns"
        self._summing = False
        self._begin(again(self.lease.task.instruction, heard.text, self.session.plan, len(self.histories)))
        if len(self.history) < self.config.compact_tokens:
            return None
        self.histories.pop()  # nothing was said in it
        return Ending.TOKENS, f"the summary alone takes more than {self.config.compact_tokens} tokens"

    def _begin(self, text: str) -> None:
        """A new segment that begins with the user's words `text`."""
        shown = self.session.toolset.schemas if self.config.show_tools else None
        prompt = self.chat.start(text, self.config.system_prompt, shown)
        self.histories.append(History(prompt, self.lease.sampling.truncated))
        self.messages.append(Message(role="user", text=text))


def given_up(called: Called) -> str:
    """Why the policy gave up, in its own words."""
    reason = next((str(value) for value in called.attempt.arguments.values()), "")
    return f"the policy gave up: {reason[:300]}" if reason else "the policy gave up"
