"""Several ranks publish one version together: all of it or nothing, with names for whoever did not come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.weights import chain as chains
from stretto.weights import inspect
from stretto.weights import writer as module
from stretto.weights.chain import ChainError
from stretto.weights.publisher import NonFiniteError, Publisher
from stretto.weights.ranks import Ranks, owned
from stretto.weights.rebuild import State, rebuild
from stretto.weights.state import fingerprint
from stretto.weights.store import Store

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]
WORLD = 3


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def start(store: Store, session: str, seconds: float = 30.0, **options: Any) -> list[Publisher]:
    def one(rank: int) -> Publisher:
        ranks = Ranks(store, "run-0", rank, WORLD, session, seconds)
        return Publisher(store, "run-0", {"config.json": b"{}"}, anchor_every=4, ranks=ranks, **options)

    return [one(rank) for rank in range(WORLD)]


def share(model: Tensors, rank: int) -> Tensors:
    sizes = {name: array.nbytes for name, array in model.items()}
    return {name: model[name] for name in owned(sizes, rank, WORLD)}


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """What each gave, or its error."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job) for job in jobs]
        return [future.exception(60) or future.result() for future in futures]


def publish(publishers: list[Publisher], version: int, model: Tensors) -> list[Any]:
    return together([lambda p=p, r=r: p.publish(version, share(model, r)) for r, p in enumerate(publishers)])


def rebuilt(store: Store, base: State | None = None) -> State:
    found = chains.read_head(store, "run-0")
    assert found is not None
    return rebuild(store, found[0], base).state


def test_a_chain_of_three_ranks_equals_the_dense_copy(
    store: Store, tmp_path: Path, model: Tensors, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANCHOR_BYTES", 2000)  # several files per rank
    publishers, state = start(store, "s1"), None
    for version in range(6):
        model = step(model, version, 0.01)
        results = publish(publishers, version, model)
        assert [result.version for result in results] == [version] * WORLD
        state = rebuilt(store, state)
        assert state.root == fingerprint(model) == fingerprint(state.tensors)
    assert rebuilt(store).root == state.root
    assert inspect.verify(store, "run-0") == []
    assert not [key for key in store.list("weights/run-0/ranks") if "/000004-" in key], "old meetings are cleared"
    folder = sorted((tmp_path / "store" / "weights" / "run-0" / "anchors").iterdir())[-1]
    files = {path.name for path in folder.iterdir()}
    assert "model.safetensors.index.json" in files and "model-00002-00000.safetensors" in files

    again = together(
        [
            lambda r=r: Publisher.go_on(
                store, "run-0", {}, share(model, r), ranks=Ranks(store, "run-0", r, WORLD, "s2", 30.0)
            )
            for r in range(WORLD)
        ]
    )
    newer = step(model, 99)
    assert [result.version for result in publish(again, 6, newer)] == [6] * WORLD
    assert rebuilt(store, state).root == fingerprint(newer)
    assert all(isinstance(result, ChainError) for result in publish(publishers, 6, step(model, 98))), "the old start"
    assert rebuilt(store).root == fingerprint(newer)


def test_each_tensor_has_one_owner_and_the_shares_are_even() -> None:
    rng = np.random.default_rng(0)
    sizes = {f"w{number}": int(size) for number, size in enumerate(rng.integers(1, 1000, 200))}
    for world in (1, 2, 7):
        shares = [owned(sizes, rank, world) for rank in range(world)]
        assert sorted(name for share in shares for name in share) == sorted(sizes)
        totals = [sum(sizes[name] for name in share) for share in shares]
        assert max(totals) - min(totals) < 2 * 1000


def test_WGT_12_a_rank_that_does_not_come_is_named_by_the_deadline(store: Store, model: Tensors, step: Step) -> None:
    publishers = start(store, "s1", seconds=1.0)
    assert all(result.version == 0 for result in publish(publishers, 0, model))
    jobs = [lambda r=r: publishers[r].publish(1, share(step(model, 1), r)) for r in (0, 2)]
    for error in together(jobs):
        assert isinstance(error, ChainError)
        assert "rank 1 of 3 did not deliver 000001-tensors within 1 s: nothing was published" in str(error)
    assert rebuilt(store).root == fingerprint(model)


def test_WGT_12_a_rank_with_a_bad_tensor_is_named_at_once(store: Store, model: Tensors, step: Step) -> None:
    publishers = start(store, "s1")
    publish(publishers, 0, model)
    bad = step(model, 1)
    bad["norm.weight"][3] = 0x7F80
    results = publish(publishers, 1, bad)
    assert sum(isinstance(result, NonFiniteError) for result in results) == 1
    others = [str(result) for result in results if isinstance(result, ChainError)]
    assert len(others) == 2 and all("rank 2 gave up: tensor norm.weight of version 1 has 1 values" in o for o in others)
    assert rebuilt(store).root == fingerprint(model)


def test_WGT_7_parts_of_a_killed_start_never_mix_with_those_of_the_next(
    store: Store, model: Tensors, step: Step
) -> None:
    """Ranks 0 and 1 left their parts of version 1, rank 2 was killed. The next start makes another version 1."""
    first = start(store, "s1", seconds=0.5)
    publish(first, 0, model)
    together([lambda r=r: first[r].publish(1, share(step(model, 1), r)) for r in (0, 1)])
    again = together(
        [
            lambda r=r: Publisher.go_on(
                store, "run-0", {}, share(model, r), ranks=Ranks(store, "run-0", r, WORLD, "s2", 30.0)
            )
            for r in range(WORLD)
        ]
    )
    publish(again, 1, step(model, 2))
    assert rebuilt(store).root == fingerprint(step(model, 2))
    assert inspect.verify(store, "run-0") == []


def test_a_tensor_with_two_owners_is_refused(store: Store, model: Tensors) -> None:
    publishers = start(store, "s1")
    results = together([lambda p=p: p.publish(0, {"w": model["norm.weight"]}) for p in publishers])
    assert all("tensor w of version 0 was given by rank 0 and by rank 1" in str(result) for result in results)
    assert chains.read_head(store, "run-0") is None
