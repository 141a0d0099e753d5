"""Runs of `n` tokens (n-grams) as 64-bit hashes, and an index that tells whose runs a text holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PRIME = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1
TABLE_BITS = 22
"""The first look at a gram is into a table of 2 to this many entries, 4 MB, by its upper bits."""


def ngrams(values_T: np.ndarray, n: int) -> np.ndarray:
    """uint64 [T - n + 1]: polynomials in PRIME over `n` neighbours, put together from runs of 1, 2, 4, … tokens."""
    size = len(values_T)
    if size < n:
        return np.empty(0, np.uint64)
    run, length, power = values_T.astype(np.uint64), 1, PRIME
    made, covered = run, 0
    while True:
        if n & length:
            made = run if covered == 0 else made[: size - covered - length + 1] * np.uint64(power) + run[covered:]
            covered += length
        if covered == n:
            return made
        run = run[:-length] * np.uint64(power) + run[length:]
        length, power = 2 * length, power * power & WORD


def ngrams_by_text(values_T: np.ndarray, offsets: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(the `ngrams` that do not reach from one text into the next, where those of each text begin and end). Text d's
    tokens are [offsets[d] : offsets[d + 1]]."""
    grams = ngrams(values_T, n)
    counts = np.maximum(np.diff(offsets) - n + 1, 0)
    inside = np.zeros(len(values_T) + 1, np.int8)
    np.add.at(inside, offsets[:-1], np.sign(counts).astype(np.int8))
    np.add.at(inside, offsets[:-1] + counts, -np.sign(counts).astype(np.int8))
    stay = np.cumsum(inside[: len(grams)], dtype=np.int8) > 0
    return grams[stay], np.concatenate([[0], np.cumsum(counts)])


def renamed_ngrams(values_T: np.ndarray, names_T: np.ndarray, n: int) -> np.ndarray:
    """uint64 [T - n + 1]: as `ngrams`, but of a name only counts how many tokens ago it last stood in the same run, so
    that consistent renaming changes nothing (parameterised matching: Baker 1993)."""
    size = len(values_T) - n + 1
    if size < 1:
        return np.empty(0, np.uint64)
    order = np.argsort(values_T, kind="stable")
    again = values_T[order[1:]] == values_T[order[:-1]]
    back_T = np.zeros(len(values_T), np.uint64)
    back_T[order[1:][again]] = (order[1:] - order[:-1])[again]
    rolled = np.zeros(size, np.uint64)
    for at in range(n):
        here = slice(at, at + size)
        back = np.where(back_T[here] <= at, back_T[here], 0)
        rolled = rolled * np.uint64(PRIME) + np.where(names_T[here], back, values_T[here])
    return rolled


@dataclass(frozen=True)
class Index:
    """`grams_G` sorted and unique; gram i belongs to entries `owners[starts[i] : starts[i + 1]]`."""

    n: int
    sizes: np.ndarray  # distinct n-grams of each entry
    grams_G: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    likely: np.ndarray  # bool [2 ** TABLE_BITS]

    def held(self, grams: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(text, entries, share of the distinct n-grams of each that the text holds), for texts that hold any.

        `grams` of several texts one after the other; text d begins at offsets[d] and ends at offsets[d + 1].
        """
        at = np.flatnonzero(self.likely[grams >> np.uint64(64 - TABLE_BITS)])
        where = np.searchsorted(self.grams_G, grams[at])
        where[where == len(self.grams_G)] = 0
        texts = np.searchsorted(offsets, at, side="right") - 1
        hit = (self.grams_G[where] == grams[at]) & (at + self.n <= offsets[texts + 1])
        where, texts = where[hit], texts[hit]
        bounds = np.flatnonzero(np.diff(texts, prepend=-1, append=-1))
        for begin, end in itertools.pairwise(bounds):
            owners = [self.owners[self.starts[gram] : self.starts[gram + 1]] for gram in np.unique(where[begin:end])]
            entries, counts = np.unique(np.concatenate(owners), return_counts=True)
            yield int(texts[begin]), entries, counts / self.sizes[entries]


def index(entries: Sequence[np.ndarray], n: int) -> Index:
    """Of the n-grams of each entry, at least one."""
    grams = [np.unique(each) for each in entries]
    sizes = np.array([len(each) for each in grams], np.int64)
    flat = np.concatenate(grams) if grams else np.empty(0, np.uint64)
    owners = np.repeat(np.arange(len(grams), dtype=np.int64), sizes)
    order = np.argsort(flat, kind="stable")
    unique, first = np.unique(flat[order], return_index=True)
    likely = np.zeros(1 << TABLE_BITS, bool)
    likely[unique >> np.uint64(64 - TABLE_BITS)] = True
    return Index(n, sizes, unique, np.append(first, len(flat)), owners[order], likely)
