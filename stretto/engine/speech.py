"""Text out of tokens as they come, released once later tokens can't change it.

Held back are: half a character (a token may end inside one), what could still become a stop string, and tool calls,
which are given whole when the turn is over.
"""

from __future__ import annotations

from stretto.harness.chat import Chat
from stretto.harness.parse import Attempt
from stretto.records import CallStatus

HALF = "\N{REPLACEMENT CHARACTER}"


class Speech:
    """One turn. `stops` end it and are not said; text from `hide` (an opening tag) on is kept for `close`."""

    def __init__(self, chat: Chat, stops: list[str], hide: str):
        self._chat, self._stops, self._hide = chat, stops, hide
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded together, because the first of them shapes the next
        self._read = 0  # ids before here are in `text`
        self._ending = ""  # what the token that ended the turn says before that
        self.text = ""
        self.shown = 0  # characters of `text` released so far
        self.stopped = False  # a stop string came; `text` ends before it

    def push(self, token: int) -> str:
        """Add a token; returns the text that can be shown now."""
        self.extend([token])
        limit = len(self.text)
        if not self.stopped:
            limit -= max((_overlap(self.text, mark) for mark in [*self._stops, self._hide] if mark), default=0)
        if self._hide and (hidden := self.text.find(self._hide)) >= 0:
            limit = min(limit, hidden)
        start, self.shown = self.shown, max(self.shown, limit)
        return self.text[start : self.shown]

    def extend(self, tokens: list[int]) -> None:
        """Add tokens without asking what can be shown."""
        self._ids += [token for token in tokens if token not in self._chat.ends]
        if tokens and tokens[-1] in self._chat.ends:
            self._ending = self._chat.said(tokens[-1:])
        self._decode(whole=False)

    def close(self) -> tuple[str, list[Attempt]]:
        """The turn is over: all text outside tool calls, and the calls that parse. Broken calls stay text, so that
        nothing is lost. What `push` has released is a prefix of the text."""
        if not self.stopped:
            self._decode(whole=True)
            self.text += self._ending
        attempts = [a for a in self._chat.parse(self.text) if a.status is CallStatus.OK] if self._hide else []
        said, at = "", 0
        for attempt in attempts:
            said += self.text[at : attempt.start]
            at = attempt.end
        said += self.text[at:]
        for mark in self._chat.format.frame if attempts else ():
            said = said.replace(mark, "")
        return (said[: self.shown] + said[self.shown :].strip() if attempts else said), attempts

    def _decode(self, whole: bool) -> None:
        known = self._chat.decode(self._ids[self._context : self._read])
        text = self._chat.decode(self._ids[self._context :])
        if text.endswith(HALF) and not whole:
            return
        start = len(self.text)
        self.text += text[len(known) :]
        self._context, self._read = self._read, len(self._ids)
        for stop in self._stops:
            at = self.text.find(stop, max(start - len(stop) + 1, 0))
            if at >= 0:
                self.text, self.stopped = self.text[:at], True


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
