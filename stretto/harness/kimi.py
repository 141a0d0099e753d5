"""Kimi K2's conversations and tool calls, after the chat template and tool guide of its checkpoints.

    <|im_system|>tool_declare<|im_middle|>[tools as JSON]<|im_end|>
    <|im_system|>system<|im_middle|> … <|im_end|><|im_user|>user<|im_middle|> … <|im_end|>
    <|im_assistant|>assistant<|im_middle|>
    <|tool_calls_section_begin|><|tool_call_begin|>functions.grep:0<|tool_call_argument_begin|>{"pattern": "x"}
        <|tool_call_end|> … <|tool_calls_section_end|><|im_end|>
    <|im_system|>grep<|im_middle|>## Return of functions.grep:0 … <|im_end|>

Nothing stands between messages. The policy numbers its calls itself, and each result names the call it answers. A
checkpoint needs a `tokenizer.json`; K2 itself ships a tiktoken file, which has to be converted once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from stretto.harness.parse import Attempt, arguments_of
from stretto.harness.pieces import Control, content
from stretto.records import CallStatus

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
STOP = "<|im_end|>"
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"
DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
_ID = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*")
_BEGIN = re.compile(re.escape(BEGIN))


@dataclass(frozen=True)
class Kimi:
    name: str = "kimi"
    stop: str = STOP
    controls: tuple[str, ...] = (STOP, "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", SECTION)
    opening: str = SECTION
    frame: tuple[str, ...] = (SECTION, SECTION_END)
    no_call: str = f"no tool call; write {SECTION} … {SECTION_END}"

    def parse(self, text: str) -> list[Attempt]:
        """Attempts in order. One without its end runs to the next one's beginning, or to the end."""
        starts = [match.start() for match in _BEGIN.finditer(text)]
        if not starts and SECTION in text:
            at = text.index(SECTION)
            return [Attempt(CallStatus.UNCLOSED, start=at, end=len(text), error=f"{BEGIN} is missing")]
        attempts = []
        for start, limit in zip(starts, [*starts[1:], len(text)]):
            close = text.find(END, start, limit)
            if close < 0:
                attempts.append(Attempt(CallStatus.UNCLOSED, start=start, end=limit, error=f"{END} is missing"))
            else:
                attempts.append(_read(text[start + len(BEGIN) : close], start, close + len(END)))
        return attempts

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[str]:
        pieces: list[str] = []
        if tools:
            schemas = json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
            pieces += [Control("<|im_system|>tool_declare<|im_middle|>"), schemas, Control(STOP)]
        if not messages or messages[0]["role"] != "system":
            pieces += [Control("<|im_system|>system<|im_middle|>"), DEFAULT_SYSTEM, Control(STOP)]
        return [*pieces, *_body(messages), Control(ASSISTANT)]

    def follow(self, messages: list[dict[str, Any]]) -> list[str]:
        return [*_body(messages), Control(ASSISTANT)]


def _body(messages: list[dict[str, Any]]) -> list[str]:
    pieces: list[str] = []
    names: dict[str, str] = {}
    for message in messages:
        role = message["role"]
        if role == "assistant":
            pieces += [Control(ASSISTANT), *_said(message, names), Control(STOP)]
        elif role == "tool":
            id = message.get("tool_call_id") or "functions.unknown:0"
            pieces += _result(names.get(id) or message.get("name") or "tool", id, content(message))
        elif role in ("system", "user"):
            pieces += [Control(f"<|im_{role}|>{role}<|im_middle|>"), content(message), Control(STOP)]
        else:
            raise ValueError(f"unknown message role {role!r}: use system, user, assistant or tool")
    return pieces


def call_text(name: str, arguments: dict[str, Any], number: int = 0) -> str:
    """A section with one call, as the policy writes it."""
    return f"{SECTION}{_call(f'functions.{name}:{number}', json.dumps(arguments, ensure_ascii=False))}{SECTION_END}"


def _call(id: str, arguments: str) -> str:
    return f"{BEGIN}{id}{ARGUMENTS}{arguments}{END}"


def _read(body: str, start: int, end: int) -> Attempt:
    head, mark, arguments = body.partition(ARGUMENTS)
    id = _ID.fullmatch(head)
    if id is None:
        error = "the call has no name; it begins with functions.name:number"
        return Attempt(CallStatus.NO_NAME, start=start, end=end, error=error)
    if not mark:
        return Attempt(CallStatus.BAD_JSON, id[1], start=start, end=end, error=f"{ARGUMENTS} is missing")
    return arguments_of(arguments, id[1], start, end, head.strip())


def _said(message: dict[str, Any], names: dict[str, str]) -> list[str]:
    """An assistant's turn; the names of its calls are noted for the results that follow."""
    pieces: list[str] = [content(message)]
    calls = message.get("tool_calls") or []
    for place, call in enumerate(calls):
        name = call["function"]["name"]
        id = call.get("id") or f"functions.{name}:{len(names)}"
        names[id] = name
        pieces += [Control((SECTION if not place else "") + BEGIN), id, Control(ARGUMENTS)]
        pieces += [call["function"]["arguments"] or "{}", Control(END)]
    return [*pieces, Control(SECTION_END)] if calls else pieces


def _result(name: str, id: str, text: str) -> list[str]:
    head, body = Control("<|im_system|>"), f"## Return of {id}\n{text}"
    return [head, name, Control("<|im_middle|>"), body, Control(STOP)]
