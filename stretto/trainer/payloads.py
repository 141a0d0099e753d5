"""The rollouts of a batch, fetched from the store: several at a time, in the batch's order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from stretto.records import Batch
from stretto.trainer.samples import BatchError
from stretto.weights.store import Store

LOADERS = 8


class Payloads:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._loaders = ThreadPoolExecutor(max_workers=LOADERS, thread_name_prefix="load")

    def of(self, batch: Batch) -> list[bytes]:
        """`[i]` belongs to `batch.items[i]`. Raises BatchError when the store lacks one."""
        payloads = list(self._loaders.map(self._get, [item.key for item in batch.items]))
        for item, data in zip(batch.items, payloads, strict=True):
            if data is None:
                raise BatchError(f"rollout {item.rollout}: the store holds no payload {item.key}")
        return [data for data in payloads if data is not None]

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except KeyError:
            return None
