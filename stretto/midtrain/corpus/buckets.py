"""Which texts share a key with this one: 64-bit keys and the numbers of texts, 12 bytes each, in sorted runs.

New keys wait in a dictionary; when there are many they become a run, and runs of like size are merged: a look-up is a
binary search in a few arrays.
"""

from __future__ import annotations

import numpy as np

RECENT = 1 << 17
"""Keys in the dictionary, which takes some 200 bytes for each."""
FACTOR = 4
"""A run is merged with the one before it unless that is so many times as long."""


class Buckets:
    def __init__(self, recent: int = RECENT) -> None:
        self._limit = recent
        self._recent: dict[int, list[int]] = {}
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []  # keys uint64, sorted; texts int32

    def add(self, keys: np.ndarray, text: int) -> None:
        """`keys` uint64."""
        for key in keys.tolist():
            self._recent.setdefault(key, []).append(text)
        if len(self._recent) >= self._limit:
            self._settle()

    def sharing(self, keys: np.ndarray) -> list[int]:
        """Texts that have one of the keys, in their order."""
        found = {text for key in keys.tolist() for text in self._recent.get(key, ())}
        for known, texts in self._runs:
            first, last = np.searchsorted(known, keys, "left"), np.searchsorted(known, keys, "right")
            for begin, end in zip(first[first < last], last[first < last], strict=True):
                found.update(texts[begin:end].tolist())
        return sorted(found)

    def _settle(self) -> None:
        counts = [len(texts) for texts in self._recent.values()]
        keys = np.repeat(np.fromiter(self._recent, np.uint64, len(counts)), counts)
        texts = np.array([text for several in self._recent.values() for text in several], np.int32)
        self._recent = {}
        while True:
            order = np.argsort(keys, kind="stable")
            keys, texts = keys[order], texts[order]
            if not self._runs or len(self._runs[-1][0]) >= FACTOR * len(keys):
                break
            before = self._runs.pop()
            keys, texts = np.concatenate([before[0], keys]), np.concatenate([before[1], texts])
        self._runs.append((keys, texts))
