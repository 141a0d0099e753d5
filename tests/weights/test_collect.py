"""Acknowledgements and collection: nothing that a live follower may fetch is deleted, the dead hold up nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stretto.weights import chain as chains
from stretto.weights import inspect
from stretto.weights.collect import collect
from stretto.weights.publisher import Publisher
from stretto.weights.readers import Lease, readers
from stretto.weights.rebuild import rebuild
from stretto.weights.state import fingerprint
from stretto.weights.store import Store

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]


def head_of(store: Store) -> chains.Head:
    found = chains.read_head(store, "run-0")
    assert found is not None
    return found[0]


def anchors(store: Store) -> list[int]:
    return sorted({int(key.split("/")[3][:6]) for key in store.list("weights/run-0/anchors")})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def publish(store: Store, model: Tensors, step: Step, versions: range, publisher: Publisher | None = None) -> Publisher:
    publisher = publisher or Publisher(store, "run-0", {"config.json": b"{}"}, anchor_every=3)
    for version in versions:
        publisher.publish(version, step(model, version))
    return publisher


def test_a_long_run_keeps_two_anchors(store: Store, model: Tensors, step: Step) -> None:
    publish(store, model, step, range(31))
    assert len(anchors(store)) == 2
    assert inspect.verify(store, "run-0") == []
    oldest = min(link.version for link in head_of(store).links)
    for key in store.list("weights/run-0"):
        name = key.split("/")[3] if key.count("/") > 2 else ""
        assert not name[:6].isdigit() or int(name[:6]) >= oldest, key


class _Slow(Store):
    """Holds a reader up between two objects."""

    def __init__(self, url: Path) -> None:
        super().__init__(url)
        self.reached, self.go = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes:
        if "/anchors/" in key:
            self.reached.set()
            assert self.go.wait(30)
        return super().get(key)


def test_WGT_5_nothing_that_a_slow_reader_needs_is_deleted(
    store: Store, tmp_path: Path, model: Tensors, step: Step
) -> None:
    publisher = publish(store, model, step, range(2))
    slow, results = _Slow(tmp_path / "store"), []
    lease = Lease(slow, "run-0", "far away")
    lease.renew(serves=None, needs=0)
    head = head_of(slow)
    reader = threading.Thread(target=lambda: results.append(rebuild(slow, head)))
    reader.start()
    assert slow.reached.wait(30)
    publish(store, model, step, range(2, 20), publisher)
    assert anchors(store)[0] == 0, "kept for the slow reader"
    assert [seen.reader.cluster for seen in collect(store, "run-0").held_by] == ["far away"]
    slow.go.set()
    reader.join(30)
    assert results[0].state.root == fingerprint(step(model, 1)) and results[0].notes == []
    lease.renew(serves=1, needs=15)
    assert collect(store, "run-0").floor == 15
    assert anchors(store)[0] == 15
    lease.end()
    assert readers(store, "run-0") == []


def test_WGT_5_without_a_lease_it_would_have_been_deleted(store: Store, model: Tensors, step: Step) -> None:
    """That the test above can fail."""
    publisher = publish(store, model, step, range(2))
    head = head_of(store)
    publish(store, model, step, range(2, 20), publisher)
    with pytest.raises(chains.ChainError, match="is missing"):
        rebuild(store, head)


def test_the_dead_hold_up_nobody_and_no_clock_but_the_stores_counts(
    store: Store, tmp_path: Path, model: Tensors, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publish(store, model, step, range(2))
    Lease(store, "run-0", "alive").renew(serves=1, needs=0)
    Lease(store, "run-0", "silent").renew(serves=0, needs=0)
    monkeypatch.setattr("time.time", lambda: 0.0)  # this machine thinks it is 1970
    publish(store, model, step, range(2, 12), publisher)
    found = collect(store, "run-0", dry=True)
    assert len(found.held_by) == 2 and found.gone == [] and found.floor == 0
    (path,) = (tmp_path / "store" / "weights" / "run-0" / "readers").glob("silent-*")
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 121))
    found = collect(store, "run-0")
    assert [seen.reader.cluster for seen in found.gone] == ["silent"]
    assert [seen.reader.cluster for seen in readers(store, "run-0")] == ["alive"]
    assert found.floor == 0
    for seen in readers(store, "run-0"):
        store.delete(seen.key)
    dry = collect(store, "run-0", dry=True)
    assert dry.deleted and all(store.exists(key) for key in dry.deleted)
    assert collect(store, "run-0").deleted == dry.deleted
    assert not any(store.exists(key) for key in dry.deleted)


def test_what_is_being_written_is_not_old(store: Store, model: Tensors, step: Step) -> None:
    publish(store, model, step, range(12))
    leftovers = ["deltas/000012-from-000011-aaaa/0", "anchors/000012-aaaa/model.safetensors"]
    for name in leftovers:
        store.put(f"weights/run-0/{name}", b"half of it")
    collect(store, "run-0")
    assert all(store.exists(f"weights/run-0/{name}") for name in leftovers)
