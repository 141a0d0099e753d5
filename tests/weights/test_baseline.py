"""What a publisher remembers: the bytes last published, and the way back when a version does not come to be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stretto.weights import chain as chains
from stretto.weights.baseline import Baseline, Staged, compare, examine
from stretto.weights.publisher import Publisher
from stretto.weights.rebuild import rebuild
from stretto.weights.state import fingerprint
from stretto.weights.store import Store, StoreError

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]


def held(version: int, tensors: Tensors) -> Baseline:
    layout, arrays = examine(version, tensors, {})
    return Baseline(version, layout, [array.copy() for array in arrays])


def as_tensors(baseline: Baseline) -> Tensors:
    return {info.name: array for info, array in zip(baseline.layout, baseline.arrays, strict=True)}


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_staged_version_is_there_with_the_one_before_it_and_can_be_taken_back(
    model: Tensors, step: Step, share: float
) -> None:
    new, baseline = step(model, 1, share), held(0, model)
    _, changes = compare(1, new, {}, baseline)
    assert fingerprint(as_tensors(baseline)) == fingerprint(model), "comparing changes nothing"
    staged = Staged(baseline, changes)
    assert fingerprint(as_tensors(baseline)) == fingerprint(new)
    count, names = len(model), sorted(model)
    for first, last in ((0, count), (1, 3), (2, 3)):
        old_N, new_N = staged.frame(first, last)
        assert np.array_equal(old_N, np.concatenate([model[name].reshape(-1) for name in names[first:last]]))
        assert np.array_equal(new_N, np.concatenate([new[name].reshape(-1) for name in names[first:last]]))
    staged.reject()
    assert fingerprint(as_tensors(baseline)) == fingerprint(model)


class _Down(Store):
    """A store that can be taken away, and that can be made to wait."""

    down = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.free = threading.Event()
        self.free.set()

    def put_new(self, key: str, data: bytes) -> bool:
        self.free.wait(10)
        if self.down:
            raise StoreError("the store is down")
        return super().put_new(key, data)


@pytest.mark.parametrize("background", [False, True])
def test_WGT_1_what_was_not_published_is_no_base(tmp_path: Path, model: Tensors, step: Step, background: bool) -> None:
    store = _Down(tmp_path)
    publisher = Publisher(store, "run-0", {})
    publisher.publish(0, model)
    store.down = True
    with pytest.raises(StoreError):
        if background:
            publisher.submit(1, step(model, 1))
            publisher.wait()
        else:
            publisher.publish(1, step(model, 1))
    assert publisher._baseline is not None
    assert publisher._baseline.version == 0 and fingerprint(as_tensors(publisher._baseline)) == fingerprint(model)


def test_submitted_tensors_are_the_callers_at_once_and_skips_still_lead_back(
    tmp_path: Path, model: Tensors, step: Step
) -> None:
    """Each version is overwritten after `submit`; some are merged, because the store holds the background up."""
    store = _Down(tmp_path)
    publisher = Publisher(store, "run-0", {}, anchor_every=50)
    mine = {name: array.copy() for name, array in model.items()}
    bases, done = {}, set()
    for version in range(24):
        if version == 5:
            store.free.clear()
        if version == 8:
            store.free.set()
        now = {name: array.copy() for name, array in mine.items()}
        publisher.submit(version, mine)
        for name, array in step(mine, version, 0.01).items():
            mine[name][...] = array
        if not 5 <= version < 8:
            done |= {published.version for published in publisher.wait()}
            found = chains.read_head(store, "run-0")
            assert found is not None and found[0].version == version and found[0].root == fingerprint(now)
            bases[version] = now
    found = chains.read_head(store, "run-0")
    assert found is not None
    assert 6 not in done and done >= {0, 4, 8, 23}, "what was overtaken is left out"
    assert rebuild(store, found[0]).state.root == fingerprint(bases[23])
