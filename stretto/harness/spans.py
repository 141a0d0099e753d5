"""From character offsets of a turn's text to the token span that made them, without tokenising anything again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from stretto.harness.chat import Chat


class Spans:
    """Maps offsets for one tokenizer. Tokens are decoded one by one (and remembered) while their texts add up to the
    turn's text; where they don't (characters split over tokens), the prefixes of the turn are decoded instead."""

    def __init__(self, chat: Chat):
        self._chat = chat
        self._lengths: dict[int, int] = {}

    def ends(self, ids: list[int], text: str) -> list[int]:
        """Characters of `text`, which is `ids` decoded, that are complete after 0, 1, … len(ids) tokens."""
        if text.isascii():
            ends = list(accumulate(map(self._length, ids), initial=0))
            if ends[-1] == len(text):
                return ends
        prefixes = (len(self._chat.decode(ids[:count]).rstrip("\ufffd")) for count in range(len(ids)))
        return [*accumulate(prefixes, max), len(text)]

    def _length(self, token: int) -> int:
        if token not in self._lengths:
            self._lengths[token] = len(self._chat.decode([token]))
        return self._lengths[token]


def token_span(ends: list[int], start: int, end: int) -> tuple[int, int]:
    """Smallest token span that covers the characters `[start, end)`."""
    return max(bisect_right(ends, start) - 1, 0), bisect_left(ends, end)
