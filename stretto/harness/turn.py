"""What a turn says: its text, and the attempts to call a tool in it, with the tokens that each of them took."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.harness.chat import Chat
from stretto.harness.parse import Attempt
from stretto.harness.spans import Spans, token_span


@dataclass(frozen=True)
class Said:
    """`spans` are the token spans `[start, end)` of `attempts`, counted from the turn's first token; `ends` the
    characters of `text` after each token."""

    text: str
    attempts: list[Attempt]
    spans: list[tuple[int, int]]
    ends: list[int]


def said(spoken: list[int], chat: Chat, spans: Spans) -> Said:
    """Read the sampled ids of one turn."""
    text = chat.said(spoken)
    attempts = chat.parse(text)
    ends = spans.ends(spoken[:-1] if spoken[-1] in chat.stop else spoken, text)
    return Said(text, attempts, [token_span(ends, attempt.start, attempt.end) for attempt in attempts], ends)
