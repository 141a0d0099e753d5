"""Long output, cut the same way everywhere: the beginning, a line that says how much is left out, the end."""

from __future__ import annotations

SMALLEST = 256
"""Below so many bytes there is no room for the line; only the beginning is kept then."""
ROOM = 48
"""Bytes of output that give way to the line."""


def cut(data: bytes, keep: int) -> bytes:
    """At most `keep` bytes of `data`."""
    if len(data) <= keep:
        return data
    half = keep // 2
    return join(data[:half] + data[len(data) - (keep - half) :], len(data) - keep, keep)


def join(kept: bytes, lost: int, keep: int) -> bytes:
    """What is shown of an output whose first and last half of `keep` bytes are `kept`, and `lost` are not."""
    if lost == 0:
        return kept
    half = keep // 2
    if keep < SMALLEST:
        return kept[:half]
    line = b"\n[... %d bytes left out ...]\n" % (lost + ROOM)
    return kept[: half - ROOM] + line + kept[half:]


class Kept:
    """The head and tail of a stream, as it comes in."""

    def __init__(self, keep: int):
        self.keep = keep
        self.data = bytearray()
        self.lost = 0
        self.seen = 0

    def add(self, data: bytes) -> None:
        self.seen += len(data)
        self.data += data
        if len(self.data) > self.keep:
            excess = len(self.data) - self.keep
            half = self.keep // 2
            del self.data[half : half + excess]
            self.lost += excess

    def take(self) -> tuple[bytes, bool]:
        """(what is shown, whether something is left out); begins anew."""
        shown, cut_short = join(bytes(self.data), self.lost, self.keep), self.lost > 0
        self.data, self.lost, self.seen = bytearray(), 0, 0
        return shown, cut_short
