"""What a conversation is rendered from: content, which is only ever text, and control, which may be control tokens."""

from __future__ import annotations

import json
from typing import Any


class Control(str):
    """A piece of the template: may contain control tokens."""


def content(message: dict[str, Any]) -> str:
    """A message's text. Raises ValueError when it is none."""
    held = message.get("content") or ""
    if isinstance(held, list):
        if any(part.get("type") != "text" for part in held):
            raise ValueError("message content holds parts that are not text: this model reads text only")
        held = "".join(part["text"] for part in held)
    if not isinstance(held, str):
        raise ValueError(f"message content must be a string, not {type(held).__name__}")
    return held


def call_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an entry of `tool_calls`."""
    arguments = call["function"]["arguments"]
    return json.loads(arguments) if arguments else {}
