"""A rollout as a conversation for people: who spoke, what was called, what came back.

`pieces` takes a rollout apart; the terminal (`to_text`) and the report draw the same pieces their own way.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from rich.text import Text

from stretto.harness.formats import parse_any
from stretto.records import CallStatus, Message, Rollout, decode
from stretto.weights.store import Store, StoreError

_CONTROL = re.compile(r"<\|im_(?:start|end)\|>(?:assistant|user|system|tool)?\n?")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a policy's escape codes must not reach a terminal
_RESPONSE = re.compile(r"</?tool_response>\n?")

ROLE_STYLES = {"user": "cyan", "say": "white", "call": "bold yellow", "broken": "bold red", "result": "dim"}


@dataclass(frozen=True)
class Piece:
    """One thing said. `head` is short (a role, `read_file path=a.py`), `body` may have lines."""

    kind: Literal["user", "say", "call", "broken", "result"]
    head: str
    body: str = ""


def load(store: Store, key: str) -> Rollout | None:
    """A rollout's payload from the run's store; None when it is not there or cannot be read."""
    try:
        return decode(store.get(key), Rollout)
    except (KeyError, OSError, StoreError, msgspec.MsgspecError):
        return None


def pieces(messages: list[Message]) -> list[Piece]:
    """The conversation in order; text around a call comes as its own piece."""
    found: list[Piece] = []
    for message in messages:
        text = _UNPRINTABLE.sub("�", _CONTROL.sub("", message.text))
        if message.role == "assistant":
            found += _assistant(text)
        elif message.role == "tool":
            found.append(Piece("result", "result", _RESPONSE.sub("", text).strip()))
        else:
            found.append(Piece("user", "task" if message.role == "user" else message.role, text.strip()))
    return found


def verdict(rollout: Rollout) -> str:
    """'solved', or how it ended and why."""
    if rollout.solved:
        return "solved"
    how = "not solved" if rollout.outcome == "scored" else rollout.outcome.value
    return f"{how}: {_UNPRINTABLE.sub('�', rollout.reason)}" if rollout.reason else how


def to_text(rollout: Rollout, width: int = 96, lines: int = 24) -> Text:
    """A compact rendering for the terminal, the middle left out where it is longer than `lines`."""
    rows: list[Text] = []
    for piece in pieces(rollout.messages):
        style = ROLE_STYLES[piece.kind]
        mark = {"user": "▌ ", "say": "  ", "call": "→ ", "broken": "✗ ", "result": "  "}[piece.kind]
        body = piece.body.splitlines()
        if piece.kind in ("call", "broken"):
            rows.append(Text(mark + piece.head, style=style))
        rows += [Text(("  " if piece.kind != "user" else mark) + line, style=style) for line in body]
    if len(rows) > lines:
        half = lines // 2
        rows = [*rows[:half], Text(f"  … {len(rows) - 2 * half} lines …", style="dim italic"), *rows[-half:]]
    for row in rows:
        row.truncate(width, overflow="ellipsis")
    return Text("\n").join(rows)


def _assistant(text: str) -> list[Piece]:
    found: list[Piece] = []
    at = 0
    for attempt in parse_any(text):
        found += _said(text[at : attempt.start])
        if attempt.status is CallStatus.OK:
            short, long = _arguments(attempt.arguments)
            found.append(Piece("call", f"{attempt.name} {short}".strip(), long))
        else:
            head = f"{attempt.name or 'call'} ({attempt.status.value.replace('_', ' ')})"
            found.append(Piece("broken", head, text[attempt.start : attempt.end].strip()))
        at = attempt.end
    found += _said(text[at:])
    return found or [Piece("broken", "no call")]


def _said(text: str) -> list[Piece]:
    return [Piece("say", "agent", text.strip())] if text.strip() else []


def _arguments(arguments: dict[str, Any]) -> tuple[str, str]:
    """Short arguments for the head; program text (`text`, or anything long) for the body."""
    short, long = [], []
    for name, value in arguments.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if name == "text" or len(shown) > 60 or "\n" in shown:
            long.append(shown)
        else:
            short.append(f"{name}={shown}")
    return " ".join(short), "\n".join(long)
