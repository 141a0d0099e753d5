"""Several trainer ranks publish one version: each the tensors it owns, together or not at all.

    every rank:   hashes of its tensors ──▶ all others: layout and root     (`gather`)
                  objects, then what they are ──▶ rank 0                    (`gather`)
    rank 0:       manifest, HEAD ──▶ all others: the new HEAD               (`share`)

Ranks meet in the store, so they need no other way to talk. Whoever waits has a deadline, and the error names the ranks
that did not come. What they leave there is named after a session: a start of the trainer, so that parts of an attempt
that was killed never mix with those of the next.

Left out: tensors that are spread over ranks. A rank gathers the tensors it owns (`owned` deals them out).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from stretto.weights.chain import ChainError
from stretto.weights.store import Store

POLL_SECONDS = 0.05


class Alone:
    """The only rank: nobody to wait for."""

    rank, world = 0, 1

    def gather(self, label: str, data: bytes) -> list[bytes]:
        """What every rank gave under this label, in the order of ranks."""
        return [data]

    def share(self, label: str, data: bytes | None) -> bytes:
        """What rank 0 gave."""
        assert data is not None
        return data

    def fail(self, label: str, sentence: str) -> None:
        """Let those that wait in `gather` know at once that this rank will not come."""

    def clear(self, before: int) -> None:
        """Delete what is left of versions below `before`."""


class Ranks(Alone):
    """Ranks of one trainer. `session` is the same on all of them and another at each start (a random word that rank 0
    made and broadcast)."""

    def __init__(self, store: Store, chain: str, rank: int, world: int, session: str, seconds: float = 120.0) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}: ranks are 0 to {world - 1}")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", session):
            raise ValueError(f"session {session!r}: use letters, digits, dots, dashes and underscores")
        self.rank, self.world, self.seconds = rank, world, seconds
        self._store, self._folder = store, f"weights/{chain}/ranks/{session}"

    def gather(self, label: str, data: bytes) -> list[bytes]:
        self._store.put(self._key(label, self.rank), b"+" + data)
        return self._wait(label, range(self.world))

    def share(self, label: str, data: bytes | None) -> bytes:
        if self.rank == 0:
            assert data is not None
            self._store.put(self._key(label, 0), b"+" + data)
            return data
        return self._wait(label, range(1))[0]

    def fail(self, label: str, sentence: str) -> None:
        self._store.put(self._key(label, self.rank), b"-" + sentence.encode())

    def clear(self, before: int) -> None:
        for key in self._store.list(self._folder):
            if int(key.removeprefix(self._folder + "/").partition("-")[0]) < before:
                self._store.delete(key)

    def _key(self, label: str, rank: int) -> str:
        return f"{self._folder}/{label}/{rank}"

    def _wait(self, label: str, ranks: range) -> list[bytes]:
        found: dict[int, bytes] = {}
        deadline = time.monotonic() + self.seconds
        while True:
            for rank in ranks:
                if rank not in found:
                    try:
                        data = self._store.get(self._key(label, rank))
                    except KeyError:
                        continue
                    if data[:1] == b"-":
                        raise ChainError(f"rank {rank} gave up: {data[1:].decode()}")
                    found[rank] = data[1:]
            missing = [rank for rank in ranks if rank not in found]
            if not missing:
                return [found[rank] for rank in ranks]
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise ChainError(
                    f"rank {names} of {self.world} did not deliver {label} within {self.seconds:g} s: nothing was "
                    "published; look at that rank's log"
                )
            time.sleep(POLL_SECONDS)


def owned(sizes: Mapping[str, int], rank: int, world: int) -> list[str]:
    """Names of the tensors that `rank` publishes: neighbours, about the same number of bytes each.

    The same on every rank that is given the same sizes; each tensor has exactly one owner.
    """
    total, seen, mine = sum(sizes.values()), 0, []
    for name in sorted(sizes):
        middle = seen + sizes[name] / 2
        if min(int(middle * world / max(1, total)), world - 1) == rank:
            mine.append(name)
        seen += sizes[name]
    return mine
