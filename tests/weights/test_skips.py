"""Skip deltas: who comes late pays for what changed, and the cheapest of all ways is taken, around damage too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.weights import chain as chains
from stretto.weights.chain import Head
from stretto.weights.frames import Since
from stretto.weights.publisher import Publisher
from stretto.weights.rebuild import State, rebuild
from stretto.weights.state import fingerprint
from stretto.weights.store import Store

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]


@pytest.fixture
def large() -> Tensors:
    rng = np.random.default_rng(0)
    shapes = {"a": (800, 400), "b": (70, 10), "c": (3,)}
    return {name: rng.integers(0x3C00, 0x3F80, shape, dtype=np.uint16) for name, shape in shapes.items()}


def copy(state: State) -> State:
    return replace(state, tensors={name: array.copy() for name, array in state.tensors.items()})


def publish(store: Store, large: Tensors, step: Step, versions: int, share: float, every: int = 100) -> list[State]:
    publisher = Publisher(store, "run-0", {"config.json": b"{}"}, anchor_every=every)
    states, state = [], None
    for version in range(versions):
        large = step(large, version, share) if version else large
        publisher.publish(version, large)
        state = rebuild(store, head_of(store), state).state
        assert state.root == fingerprint(large)
        states.append(copy(state))
    return states


def head_of(store: Store) -> Head:
    found = chains.read_head(store, "run-0")
    assert found is not None
    return found[0]


def test_a_late_reader_pays_for_what_changed(tmp_path: Path, large: Tensors, step: Step) -> None:
    store = Store(tmp_path)
    states = publish(store, large, step, 20, 0.002)
    skips = [(link.parent, link.version) for link in head_of(store).links if link.form == "skip"]
    assert skips == [(0, 8), (8, 16)]
    built = rebuild(store, head_of(store), copy(states[0]))
    assert built.path == ["skip 8", "skip 16", "delta 17", "delta 18", "delta 19"] and built.notes == []
    assert built.state.root == states[19].root == fingerprint(built.state.tensors)
    one_by_one = sum(link.bytes for link in head_of(store).links if link.form == "delta")
    assert built.bytes < 0.6 * one_by_one
    joined = rebuild(store, head_of(store))
    assert joined.path[:3] == ["anchor 0", "skip 8", "skip 16"]
    for version, state in enumerate(states):  # from anywhere
        assert fingerprint(rebuild(store, head_of(store), copy(state)).state.tensors) == states[19].root, version


def test_where_too_much_changes_there_are_no_skips(tmp_path: Path, large: Tensors, step: Step) -> None:
    store = Store(tmp_path)
    publish(store, large, step, 12, 0.3)
    assert not [link for link in head_of(store).links if link.form == "skip"]


def test_each_damaged_way_is_named_and_the_next_cheapest_taken(tmp_path: Path, large: Tensors, step: Step) -> None:
    store = Store(tmp_path)
    states = publish(store, large, step, 10, 0.002)
    head = head_of(store)
    base, ways = states[1], []
    for broken in ([], ["deltas/000005-from-000004"], ["deltas/000008-from-000000"]):
        for key in store.list():
            if any(name in key for name in broken):
                store.put(key, store.get(key)[:-2])
        built = rebuild(store, head, copy(base))
        assert built.state.root == head.root
        assert len(built.notes) == len(ways) and all("cut off" in note for note in built.notes)
        ways.append(built.path[0])
        if len(ways) == 2:  # the deltas are not whole any more: the anchor and the skip
            assert built.path == ["delta 2", "delta 3", "delta 4", "anchor 0", "skip 8", "delta 9"]
            break
    assert ways == ["delta 2", "delta 2"]
    for key in store.list("weights/run-0/deltas"):
        if "000008-from-000000" in key:
            store.delete(key)
    with pytest.raises(chains.ChainError, match="cannot use the delta to version 5.*cannot use the skip to version 8"):
        rebuild(store, head, copy(base))
    assert fingerprint(states[1].tensors) == states[1].root


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_was_there_is_remembered(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    first = now = rng.integers(0, 9, 40).astype(np.uint8)
    since = Since(0, "")
    for _ in range(data.draw(st.integers(1, 5))):
        new = np.where(rng.random(40) < 0.3, rng.integers(0, 9, 40), now).astype(np.uint8)
        since.note(0, now, new)
        if data.draw(st.booleans()):
            now = new
            since.keep()
        else:  # a step that was noted and then did not happen
            since.drop()
    assert np.array_equal(since.before(0, now), first)
