"""One attempt by a model behind an OpenAI-compatible endpoint: the same tools, texts and budgets, in messages.

Token ids, log-probs and routes stay with whoever serves the model, so what is played here is evaluated, not trained on.
The endpoint reads tool calls out of the model's text; where it leaves them in the text, our own parsers read them.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from stretto.config import HarnessConfig
from stretto.harness.ending import Ending
from stretto.harness.formats import parse_any
from stretto.harness.loop import FAULT_AFTER, TOOL_SHARE, given_up
from stretto.harness.parse import Attempt, arguments_of
from stretto.harness.session import Called, Session
from stretto.records import CallStatus, Message, ToolCall
from stretto.sandbox.box import BoxError, BoxLost

TRIES = 4
"""Requests for one turn, when the endpoint is overloaded or can't be reached."""
_AGAIN = {408, 409, 429, 500, 502, 503, 504, 529}
_FULL = ("context", "too long", "slot of this engine")
"""What endpoints say when a conversation does not fit."""
_NO_CALL = "no tool call; call one of the tools"


class EndpointError(Exception):
    """The endpoint did not serve a turn; the sentence names it. `full`: because the conversation is too long for it."""

    def __init__(self, sentence: str, full: bool = False):
        super().__init__(sentence)
        self.full = full


@dataclass(frozen=True)
class Endpoint:
    """`url` ends before `/chat/completions`."""

    url: str
    model: str
    session: aiohttp.ClientSession
    key: str = ""
    temperature: float = 1.0

    async def turn(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], limit: int, seconds: float
    ) -> tuple[dict[str, Any], int]:
        """The assistant's message, and the tokens of the conversation with it. Raises EndpointError."""
        body = {"model": self.model, "messages": messages, "tools": tools, "temperature": self.temperature}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        problem = ""
        for number in range(TRIES):
            if number:
                await asyncio.sleep(0.5 * 2**number)
            try:
                timeout = aiohttp.ClientTimeout(total=max(seconds, 0.1))
                async with self.session.post(
                    f"{self.url}/chat/completions",
                    json={**body, "max_tokens": limit},
                    headers=headers,
                    timeout=timeout,
                ) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        return _message(text, self.url)
                    problem = f"answers {answer.status}: {text[:300]}"
                    if answer.status not in _AGAIN:
                        full = answer.status in (400, 413) and any(word in text for word in _FULL)
                        raise EndpointError(f"{self.url} {problem}", full)
            except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
                problem = f"does not answer: {error or type(error).__name__}"
        raise EndpointError(f"{self.url} {problem}, {TRIES} times")


@dataclass
class Talked:
    """An attempt before grading."""

    ending: Ending
    reason: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    files: dict[str, bytes] = field(default_factory=dict)


async def talk(session: Session, endpoint: Endpoint, config: HarnessConfig, seconds: float) -> Talked:
    """Play to an ending, within `seconds`; the workspace that was left is in `files` however it ended."""
    talked = Talked(Ending.INFRA)
    deadline = time.monotonic() + seconds
    try:
        async with asyncio.timeout(seconds):
            try:
                await _talk(session, endpoint, config, talked, deadline, seconds * TOOL_SHARE)
            except EndpointError as error:
                full = error.full and talked.turns > 0
                talked.ending, talked.reason = Ending.TOKENS if full else Ending.INFRA, str(error)
            if talked.ending is Ending.SUBMITTED or (session.opened and talked.ending is not Ending.INFRA):
                await _collect(session, talked)
    except TimeoutError:
        talked.ending, talked.reason = Ending.INFRA, f"no ending within {seconds:g} s"
    except (BoxLost, OSError) as error:
        talked.ending, talked.reason = Ending.INFRA, str(error) or type(error).__name__
    return talked


async def _talk(
    session: Session, endpoint: Endpoint, config: HarnessConfig, talked: Talked, deadline: float, tool_seconds: float
) -> None:
    talked.messages.append(Message(role="user", text=session.task.instruction))
    messages: list[dict[str, Any]] = [{"role": "user", "content": session.task.instruction}]
    if config.system_prompt:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    ill_formed = 0
    talked.ending, talked.reason = Ending.TURNS, f"no submission within {config.max_turns} turns"
    while talked.turns < config.max_turns:
        left = deadline - time.monotonic()
        message, tokens = await endpoint.turn(messages, session.toolset.schemas, config.max_turn_tokens, left)
        talked.turns += 1
        attempts, native = read_calls(message)
        messages.append(message)
        talked.messages.append(Message(role="assistant", text=_shown(message)))
        said = []
        for attempt in attempts:
            session.left = tool_seconds
            called = await session.call(attempt)
            talked.calls.append(called.record())
            talked.messages.append(Message(role="tool", text=called.observation))
            said.append(called)
            tool_seconds -= called.seconds
            ill_formed = 0 if called.well_formed else ill_formed + 1
            if ended := _ended(called, ill_formed, tool_seconds):
                talked.ending, talked.reason = ended
                return
        messages += _results(said, native)
        if tokens >= config.max_tokens:
            talked.ending, talked.reason = Ending.TOKENS, f"no submission within {config.max_tokens} tokens"
            return
    if ill_formed and all(call.status not in (CallStatus.OK, CallStatus.FAILED) for call in talked.calls):
        talked.ending, talked.reason = Ending.FAULT, f"none of {talked.turns} turns held a well-formed tool call"


def _ended(called: Called, ill_formed: int, tool_seconds: float) -> tuple[Ending, str] | None:
    if called.ended("submit"):
        return Ending.SUBMITTED, ""
    if called.ended("give_up"):
        return Ending.GAVE_UP, given_up(called)
    if tool_seconds < 0:
        return Ending.TIME, "the tools ran longer than their share of the time"
    if ill_formed >= FAULT_AFTER:
        return Ending.FAULT, f"{FAULT_AFTER} attempts in a row were no well-formed tool calls"
    return None


def read_calls(message: dict[str, Any]) -> tuple[list[Attempt], bool]:
    """The attempts in an assistant's message, at least one, and whether the endpoint itself told them apart."""
    calls = message.get("tool_calls") or []
    attempts = []
    for call in calls:
        function = call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            attempts.append(Attempt(CallStatus.NO_NAME, error='the call has no "name"', id=str(call.get("id") or "")))
        else:
            text = arguments if isinstance(arguments, str) and arguments else "{}"
            attempts.append(arguments_of(text, name, 0, 0, str(call.get("id") or "")))
    if attempts:
        return attempts, True
    text = message.get("content")
    return (parse_any(text) if isinstance(text, str) else []) or [Attempt(CallStatus.NO_CALL, error=_NO_CALL)], False


def _results(said: list[Called], native: bool) -> list[dict[str, Any]]:
    """What the model sees next: a result for each call, or a user's message where it made none that has an id."""
    if not native:
        return [{"role": "user", "content": "\n\n".join(called.observation for called in said)}]
    return [{"role": "tool", "tool_call_id": call.attempt.id, "content": call.observation} for call in said]


async def _collect(session: Session, talked: Talked) -> None:
    try:
        talked.files = await session.collect()
    except BoxError as error:
        if talked.ending is Ending.SUBMITTED:
            talked.ending, talked.reason = Ending.FAULT, f"the workspace cannot be collected: {error}"


def _message(text: str, url: str) -> tuple[dict[str, Any], int]:
    try:
        answer = json.loads(text)
        message = answer["choices"][0]["message"]
        tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
        kept = {"role": "assistant", "content": message.get("content") or ""}
        if message.get("tool_calls"):
            kept["tool_calls"] = message["tool_calls"]
        return kept, tokens
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"{url} does not answer as OpenAI's chat completions do ({error!r}): {text[:200]}"
        ) from None


def _shown(message: dict[str, Any]) -> str:
    calls = [json.dumps(call.get("function"), ensure_ascii=False) for call in message.get("tool_calls") or []]
    return "\n".join([message["content"], *calls]).strip()
