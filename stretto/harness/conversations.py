"""An OpenAI-compatible client's conversations, kept as append-only segments.

A client sends all its messages with every request. Where they are what a segment stands for (the messages it was asked
with, our answers) and then some, the new ones are appended: nothing is tokenised twice, what was sampled stays as
sampled. Where they aren't (a history that was compacted or edited, a second agent, other tools) a new segment begins.
What the client tells of earlier turns is context there, and trained on where it was sampled.

    request 1   system user                        segment 0   prompt | answer
    request 2   system user answer result                              … | result | answer
    request 3   system summary                     segment 1   prompt | answer

Answers are compared by meaning: their text without the space around it, the names and arguments of their calls. A
request whose answer did not reach the client is asked again in a new segment.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.harness.chat import Chat
from stretto.harness.effort import Effort
from stretto.harness.history import History
from stretto.harness.pieces import content
from stretto.harness.session import sendable
from stretto.harness.spans import Spans
from stretto.harness.turn import Said, said
from stretto.records import CallStatus, Message, Segment, ToolCall

Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""A message by meaning: role, text, calls."""


class TooLong(ValueError):
    """The conversation does not fit; a sentence with the numbers."""


@dataclass
class Conversation:
    """One segment in the making. `known`: the messages it stands for; None while it is being answered, and for ever
    when that failed, so that nobody goes on from it."""

    number: int
    history: History
    tools: str
    names: frozenset[str]
    """Of the tools."""
    known: list[Key] | None = None
    asked: list[Key] = field(default_factory=list)
    parsed: list[tuple[str, int]] = field(default_factory=list)
    """The last turn's calls that parsed: the id that the policy gave each, its place in `Conversations.calls`."""
    waiting: list[tuple[str, int]] = field(default_factory=list)
    """Those without a result, with the id that the client knows."""
    segment: Segment | None = None
    """As it was after the last turn that was heard to its end; what came after is nobody's."""
    closed: bool = True
    """Whether the last turn ended with the stop token."""


class Conversations:
    """Those of one rollout.

    conversation = conversations.take(messages, tools)       # appended to, or begun
    spoken = await speaker.speak(conversation.history, …)
    said = conversations.hear(conversation, spoken)           # what was said, to be told to the client
    conversations.told(conversation, message)                 # what the client has been told
    """

    def __init__(
        self, chat: Chat, spans: Spans, max_tokens: int, truncated: bool, does: Mapping[str, str] | None = None
    ):
        """A conversation holds fewer than `max_tokens` tokens before the policy speaks. `truncated`: sampled under
        top-p or top-k. `does`: what tools of the client are, by name, for the counts in reports."""
        self.chat, self.spans, self.max_tokens, self.truncated = chat, spans, max_tokens, truncated
        self.does = does or {}
        self.all: list[Conversation] = []
        self.calls: list[ToolCall] = []
        self.messages: list[Message] = []
        self.effort = Effort()

    def take(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Conversation:
        """The conversation that goes on with these messages, up to where the policy speaks. Raises TooLong and, for
        messages that can't be rendered, ValueError; then nothing has changed."""
        try:
            return self._take(messages, tools)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"the messages or tools can't be read: {error!r}") from None

    def _take(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Conversation:
        keys = [_key(message) for message in messages]
        names = frozenset(str(tool["function"]["name"]) for tool in tools or [])
        offered = json.dumps(tools or [], sort_keys=True)
        characters = sum(len(text) + sum(map(len, itertools.chain(*calls))) for _, text, calls in keys)
        least = max((characters + (len(offered) if tools else 0)) // self.chat.longest, len(keys))
        if least >= self.max_tokens:  # not worth a tokenizer's time
            raise TooLong(f"the conversation takes more than {least} tokens; there are {self.max_tokens} in all")
        found = self._going_on(keys, messages, offered)
        if found is None:
            ids, new = self.chat.messages(messages, tools), messages
        else:
            new, answered = self._answers(messages[len(found.known or ()) :], found)
            ids = (self.chat.stop[:1] if not found.closed else []) + self.chat.follow(new)
        held = len(found.history) if found else 0
        if held + len(ids) >= self.max_tokens:
            raise TooLong(f"the conversation takes {held + len(ids)} tokens; there are {self.max_tokens} in all")
        if found is None:
            found = Conversation(len(self.all), History(ids, self.truncated), offered, names)
            self.all.append(found)
        else:
            found.history.give(ids)
            self.effort.reading += len(ids)
            for place, observation in answered:
                self.calls[place] = msgspec.structs.replace(self.calls[place], observation=observation)
        found.asked, found.known = keys, None
        self.messages += [Message(role=message["role"], text=_shown(message)) for message in new]
        return found

    def hear(self, conversation: Conversation, spoken: list[int]) -> Said:
        """Note what the policy said: `spoken` are the ids that the history has just taken."""
        heard = said(spoken, self.chat, self.spans)
        first = len(conversation.history) - len(spoken)
        conversation.closed = spoken[-1] in self.chat.stop
        self.effort.turn(heard.text, heard.ends, len(spoken), heard.spans)
        self.messages.append(Message(role="assistant", text=heard.text))
        conversation.parsed = []
        for spoken_call, (start, end) in zip(heard.attempts, heard.spans, strict=True):
            attempt = sendable(spoken_call)
            status = attempt.status
            if spoken_call.status is CallStatus.OK:
                conversation.parsed.append((spoken_call.id, len(self.calls)))
            if status is CallStatus.OK and conversation.names and attempt.name not in conversation.names:
                status = CallStatus.UNKNOWN_TOOL
            self.calls.append(
                ToolCall(
                    name=attempt.name,
                    status=status,
                    segment=conversation.number,
                    start=first + start,
                    end=first + end,
                    arguments=attempt.arguments if status is CallStatus.OK else {},
                    tool=self.does.get(attempt.name, ""),
                )
            )
        conversation.segment = conversation.history.segment()
        return heard

    def told(self, conversation: Conversation, message: dict[str, Any]) -> None:
        """The client has this answer: it may go on from here."""
        conversation.waiting = list(conversation.parsed)
        if calls := message.get("tool_calls"):  # else they were told as text
            places = [place for _, place in conversation.parsed]
            conversation.waiting = [(call["id"], place) for call, place in zip(calls, places, strict=True)]
        conversation.known = [*conversation.asked, _key(message)]

    @property
    def turns(self) -> int:
        return self.effort.turns

    def segments(self) -> tuple[list[Segment], list[ToolCall]]:
        """The segments in which the policy was heard, up to its last turn, and the calls with their places in them."""
        heard = {conversation.number: conversation.segment for conversation in self.all if conversation.segment}
        places = {number: place for place, number in enumerate(heard)}
        calls = [msgspec.structs.replace(call, segment=places[call.segment]) for call in self.calls]
        return list(heard.values()), calls

    def _going_on(self, keys: list[Key], messages: list[dict[str, Any]], tools: str) -> Conversation | None:
        """The longest conversation that these messages only append tool results and users' words to."""
        for conversation in sorted(self.all, key=lambda one: -len(one.known or ())):
            known = conversation.known
            if known is None or conversation.tools != tools or len(keys) <= len(known) or keys[: len(known)] != known:
                continue
            if all(message["role"] in ("user", "tool") for message in messages[len(known) :]):
                return conversation
        return None

    def _answers(
        self, new: list[dict[str, Any]], conversation: Conversation
    ) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
        """The new messages, results with the name and id of the call that they answer, which not every client repeats;
        and the calls' places with their results. A result without an id is that of the first call that has none."""
        messages, answered, waiting = [], [], list(conversation.waiting)
        for message in new:
            if message["role"] == "tool":
                id = message.get("tool_call_id")
                found = next((one for one in waiting if not id or one[0] == id), None)
                if found:
                    waiting.remove(found)
                    answered.append((found[1], content(message)))
                    message = {
                        **message,
                        "name": message.get("name") or self.calls[found[1]].name,
                        "tool_call_id": id or found[0],
                    }
            messages.append(message)
        return messages, answered


def _key(message: dict[str, Any]) -> Key:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message["role"], content(message).strip(), tuple((call["name"], _same(call["arguments"])) for call in calls)


def _same(arguments: str) -> str:
    """Arguments by meaning: clients may spell JSON anew."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _shown(message: dict[str, Any]) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or []]
    return "\n".join([content(message), *calls]).strip()
