"""Tool calls out of an assistant's text. One parser for training, evaluation and serving.

Every attempt is reported, the broken ones too, with its character span, so that each can be answered and counted.
"""

from __future__ import annotations

import json
import re
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


def parse(text: str) -> list[Attempt]:
    """Attempts in order. An opening tag without its closing one runs to the next opening tag or the end."""
    starts = [match.start() for match in _OPENING.finditer(text)]
    attempts = []
    for start, limit in zip(starts, [*starts[1:], len(text)]):
        close = text.find(CLOSE, start, limit)
        if close < 0:
            attempts.append(Attempt(CallStatus.UNCLOSED, start=start, end=limit, error=f"{CLOSE} is missing"))
        else:
            attempts.append(_read(text[start + len(OPEN) : close], start, close + len(CLOSE)))
    return attempts


def _read(body: str, start: int, end: int) -> Attempt:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or an integer of thousands of digits
        return Attempt(CallStatus.BAD_JSON, start=start, end=end, error=f"the call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return Attempt(CallStatus.NO_NAME, start=start, end=end, error='the call has no "name"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        error = f'"arguments" must be an object, not {type(arguments).__name__}'
        return Attempt(CallStatus.BAD_ARGUMENTS, call["name"], start=start, end=end, error=error)
    return Attempt(CallStatus.OK, call["name"], arguments, start, end)
