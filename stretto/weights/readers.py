"""Who reads a chain: each follower keeps a small record in the store, with what it serves and what it needs.

    follower:   Lease.renew, again and again ──▶ weights/<chain>/readers/<cluster>-<random>     (deleted when it leaves)
    collector:  readers ──▶ nothing that a live one may still fetch is deleted; one that fell silent is forgotten

A record lives as long as it says after it was last written. Ages are differences between times of the *store's* clock,
so nobody's own clock matters. A follower that may not write there is served all the same, and is not waited for.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

import msgspec

from stretto.weights import chain as chains
from stretto.weights.store import Store

LEASE_SECONDS = 120.0
"""A follower that has written nothing for so long is gone."""

RENEW_SECONDS = 20.0
"""It writes at least so often."""


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """What a follower says about itself."""

    format: int
    cluster: str
    serves: int | None  # the lowest version among its engines: its acknowledgement
    needs: int  # it may still fetch objects of this version and later ones
    seconds: float  # after which it is taken for dead


@dataclass(frozen=True)
class Seen:
    """A reader, and how long ago the store heard from it."""

    key: str
    reader: Reader
    age: float

    @property
    def alive(self) -> bool:
        return self.age <= self.reader.seconds


class Lease:
    """A follower's own record."""

    def __init__(self, store: Store, chain: str, cluster: str, seconds: float = LEASE_SECONDS) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", cluster)[:60]
        self._key = f"weights/{chain}/readers/{name}-{secrets.token_hex(4)}"
        self._store, self._cluster, self._seconds = store, cluster, seconds

    def renew(self, serves: int | None, needs: int) -> None:
        record = Reader(format=chains.FORMAT, cluster=self._cluster, serves=serves, needs=needs, seconds=self._seconds)
        self._store.put(self._key, chains.dump(record))

    def end(self) -> None:
        self._store.delete(self._key)


def readers(store: Store, chain: str) -> list[Seen]:
    """Everybody who has left a record, dead ones too. Writes a mark into the store, to learn what time it is there."""
    clock = f"weights/{chain}/clock"
    store.put(clock, b"")
    now = store.modified(clock)
    found = []
    for key in store.list(f"weights/{chain}/readers"):
        try:
            written, record = store.modified(key), chains.parse(store.get(key), Reader, key)
        except KeyError:
            continue  # it left just now
        found.append(Seen(key, record, now - written))
    return found
