"""Delete what no reader of a chain needs any more.

A version's objects go when HEAD has no link to it (it forgets those before the last anchor but one) and no live reader
says that it may still be fetching it. The order of looking makes this safe without a lock: a reader renews its lease
and *then* reads HEAD, a collector reads HEAD and *then* the leases. Either the collector sees the lease, or the reader
sees a HEAD at least as new as the collector's.

Objects newer than that are never touched, linked or not: a publisher may just be writing them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stretto.weights import chain as chains
from stretto.weights.chain import ChainError
from stretto.weights.readers import Seen, readers
from stretto.weights.store import Store

_OBJECT = re.compile(r"(?:manifests|deltas|anchors|ranks/[^/]+)/(\d{6,})-.*")


@dataclass(frozen=True)
class Collected:
    """What was (or, asked to only look, would be) deleted, and why not more."""

    deleted: list[str]
    floor: int  # the oldest version that is kept
    held_by: list[Seen]  # live readers without which more would go
    gone: list[Seen]  # readers that fell silent; their records are deleted too


def collect(store: Store, chain: str, dry: bool = False) -> Collected:
    """Delete old objects of `chain`. `dry`: only say which. ChainError when there is no such chain."""
    found = chains.read_head(store, chain)
    if found is None:
        raise ChainError(f"there is no chain {chain} in {store.url}")
    linked = min(link.version for link in found[0].links)
    seen = readers(store, chain)
    gone = [one for one in seen if not one.alive]
    held_by = [one for one in seen if one.alive and one.reader.needs < linked]
    floor = min([linked, *(one.reader.needs for one in held_by)])
    folder = f"weights/{chain}/"
    deleted = []
    for key in store.list(folder):
        match = _OBJECT.fullmatch(key.removeprefix(folder))
        if match and int(match[1]) < floor:
            deleted.append(key)
    if not dry:
        for key in [*deleted, *(one.key for one in gone)]:
            store.delete(key)
    return Collected(deleted, floor, held_by, gone)
