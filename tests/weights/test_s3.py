"""The whole chain on a real S3 API: publish, follow, join late, two publishers, restart, collect, verify, export."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stretto.weights import chain as chains
from stretto.weights import inspect
from stretto.weights.chain import ChainLost
from stretto.weights.collect import collect
from stretto.weights.publisher import Publisher
from stretto.weights.rebuild import rebuild
from stretto.weights.state import fingerprint
from stretto.weights.store import Store

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]
FILES = {"config.json": b"{}"}


@pytest.fixture
def store(s3: Callable[[], Store]) -> Store:
    return s3()


def head_of(store: Store) -> chains.Head:
    found = chains.read_head(store, "run-0")
    assert found is not None
    return found[0]


def test_a_chain_with_late_joins_restarts_and_a_collector(
    store: Store, tmp_path: Path, model: Tensors, step: Step
) -> None:
    publisher = Publisher(store, "run-0", FILES, anchor_every=5)
    follower, before = None, model
    for version in range(13):
        model = step(model, version)
        if version == 7:  # the trainer was restarted
            publisher = Publisher.go_on(store, "run-0", FILES, before, anchor_every=5)
        publisher.publish(version, model)
        before = model
        follower = rebuild(store, head_of(store), follower).state
        assert follower.root == fingerprint(model) == fingerprint(follower.tensors)
        if version in (4, 11):
            assert rebuild(store, head_of(store)).state.root == follower.root
    assert collect(store, "run-0").floor >= 5
    assert inspect.verify(store, "run-0") == []
    assert not [key for key in store.list("weights/run-0/anchors") if "/000000-" in key]
    assert inspect.export(store, "run-0", tmp_path / "out") == 12


def test_of_two_publishers_one_loses_at_head(store: Store, model: Tensors, step: Step) -> None:
    first = Publisher(store, "run-0", FILES)
    first.publish(0, model)
    second = Publisher.go_on(store, "run-0", FILES, model)
    second.publish(1, step(model, 1))
    with pytest.raises(
        ChainLost, match=r"version 1 was not published: HEAD of chain run-0 .* is at version 1, moved by"
    ):
        first.publish(1, step(model, 2))
    assert rebuild(store, head_of(store)).state.root == fingerprint(step(model, 1))


async def test_publishers_that_race_for_a_version_make_one(store: Store, model: Tensors, step: Step) -> None:
    Publisher(store, "run-0", FILES).publish(0, model)
    rivals = [Publisher.go_on(store, "run-0", FILES, model) for _ in range(4)]
    jobs = [asyncio.to_thread(rival.publish, 1, step(model, seed)) for seed, rival in enumerate(rivals)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert sum(isinstance(result, ChainLost) for result in results) == 3
    winner = next(seed for seed, result in enumerate(results) if not isinstance(result, BaseException))
    assert rebuild(store, head_of(store)).state.root == fingerprint(step(model, winner))
