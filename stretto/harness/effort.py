"""What a rollout took: tokens by what they were for, calls and turns. Shaping may charge for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stretto.harness.spans import token_span

THINKING = re.compile(r"\A.*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)
"""What is thought aloud; the opening tag may stand in the prompt."""


@dataclass
class Effort:
    """Counts of one rollout. `thinking`, `calling` and `saying` are the sampled tokens; `reading` are those of tool
    results and what stands around them."""

    thinking: int = 0
    calling: int = 0
    saying: int = 0
    reading: int = 0
    calls: int = 0
    turns: int = 0

    def turn(self, text: str, ends: list[int], sampled: int, calls: Iterable[tuple[int, int]]) -> None:
        """Count a turn: `ends` are the characters of `text` after each token, `calls` the token spans of its calls."""
        spans = list(calls)
        calling = sum(end - start for start, end in spans)
        thinking = 0
        for match in THINKING.finditer(text):
            start, end = token_span(ends, *match.span())
            thinking += end - start - sum(max(min(end, e) - max(start, s), 0) for s, e in spans)
        self.thinking += thinking
        self.calling += calling
        self.saying += max(sampled - thinking - calling, 0)
        self.calls += len(spans)
        self.turns += 1
