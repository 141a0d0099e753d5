"""Tool calls out of an assistant's text: what an attempt is, and the calls written between `<tool_call>` tags.

One parser for each format, for training, evaluation and serving alike (`formats.py` says which a checkpoint speaks).
Every attempt is reported, the broken ones too, with its character span, so that each can be answered and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stretto.records import CallStatus

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPENING = re.compile(re.escape(OPEN))


@dataclass(frozen=True)
class Attempt:
    """One attempted call; `[start, end)` are character offsets. `status` is OK when it parsed, else what broke."""

    status: CallStatus
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    start: int = 0
    end: int = 0
    error: str = ""
    id: str = ""  # what the policy calls this call, where its format has a name for each
    spelled: bool = False  # the arguments are all text, as in formats that mark no types


Reader = Callable[[str, int, int], Attempt]
"""Reads what stands between the tags of a call at the characters `[start, end)`."""


def parse(text: str, read: Reader | None = None) -> list[Attempt]:
    """Attempts in order. An opening tag without its closing one runs to the next opening tag or the end."""
    read = read or read_json
    starts = [match.start() for match in _OPENING.finditer(text)]
    attempts = []
    for start, limit in zip(starts, [*starts[1:], len(text)]):
        close = text.find(CLOSE, start, limit)
        if close < 0:
            attempts.append(Attempt(CallStatus.UNCLOSED, start=start, end=limit, error=f"{CLOSE} is missing"))
        else:
            attempts.append(read(text[start + len(OPEN) : close], start, close + len(CLOSE)))
    return attempts


def read_json(body: str, start: int, end: int) -> Attempt:
    """Hermes: {"name": …, "arguments": {…}}."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or an integer of thousands of digits
        return Attempt(CallStatus.BAD_JSON, start=start, end=end, error=f"the call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return Attempt(CallStatus.NO_NAME, start=start, end=end, error='the call has no "name"')
    return _checked(call.get("arguments", {}), call["name"], start, end)


def arguments_of(text: str, name: str, start: int, end: int, id: str = "") -> Attempt:
    """A call whose name stands outside its JSON."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        error = f"the arguments are not valid JSON: {error}"
        return Attempt(CallStatus.BAD_JSON, name, start=start, end=end, error=error, id=id)
    return _checked(arguments, name, start, end, id)


def _checked(arguments: Any, name: str, start: int, end: int, id: str = "") -> Attempt:
    if not isinstance(arguments, dict):
        error = f'"arguments" must be an object, not {type(arguments).__name__}'
        return Attempt(CallStatus.BAD_ARGUMENTS, name, start=start, end=end, error=error, id=id)
    return Attempt(CallStatus.OK, name, arguments, start, end, id=id)
