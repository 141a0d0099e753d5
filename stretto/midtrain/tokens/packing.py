"""Best-fit packing (Ding et al., arXiv 2404.10830): documents into rows of equal length with hardly a cut.

A document longer than a row is cut into whole rows and a rest; rests and shorter documents go, longest first, each into
the row that leaves the least room. No token is lost, none is written twice, and no document sees another: rows keep
their documents' lengths, which is what attention needs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

Piece = tuple[int, int, int]
"""(document, start, stop)"""


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[Piece]]:
    """Rows of pieces, at most `capacity` tokens each; every token of every document is in exactly one piece."""
    if capacity < 1:
        raise ValueError(f"a row of {capacity} tokens holds nothing; use at least 1")
    rows: list[list[Piece]] = []
    rests: list[Piece] = []
    for document, length in enumerate(lengths):
        whole = length // capacity
        rows += [[(document, at * capacity, (at + 1) * capacity)] for at in range(whole)]
        if length % capacity:
            rests.append((document, whole * capacity, length))
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for piece in sorted(rests, key=lambda piece: piece[1] - piece[2]):  # longest first, stable
        size = piece[2] - piece[1]
        at = bisect_left(room, (size, -1))
        if at < len(room):
            left, row = room.pop(at)
            rows[row].append(piece)
        else:
            left, row = capacity, len(rows)
            rows.append([piece])
        if left > size:
            insort(room, (left - size, row))
    return rows
