"""A relay: one download per region, trusted no more than a link; readers' records pass through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from stretto.weights import chain as chains
from stretto.weights.chain import Head
from stretto.weights.publisher import Publisher
from stretto.weights.readers import Lease, readers
from stretto.weights.rebuild import State, rebuild
from stretto.weights.relay import FRESH_SECONDS, Cached, serving
from stretto.weights.state import fingerprint
from stretto.weights.store import Store, StoreError

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("s3")()


@pytest.fixture
def cached(store: Store, tmp_path: Path) -> Cached:
    return Cached(store, tmp_path / "relay")


@pytest.fixture
async def relay(cached: Cached) -> AsyncIterator[str]:
    async with serving(cached, "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}"


def head_of(store: Store) -> Head:
    found = chains.read_head(store, "run-0")
    assert found is not None
    return found[0]


def follow(url: Store, base: State | None) -> State:
    return rebuild(url, head_of(url), base).state


async def test_three_followers_one_download(
    store: Store, cached: Cached, relay: str, model: Tensors, step: Step
) -> None:
    publisher = Publisher(store, "run-0", {"config.json": b"{}"}, anchor_every=3)
    near = [Store(relay) for _ in range(3)]
    states: list[State | None] = [None, None, None]
    for version in range(6):
        model = step(model, version)
        await asyncio.to_thread(publisher.publish, version, model)
        await asyncio.sleep(FRESH_SECONDS)
        states = list(await asyncio.gather(*(asyncio.to_thread(follow, *pair) for pair in zip(near, states))))
        assert [state.root for state in states if state] == [fingerprint(model)] * 3
    objects = [key for key in store.list("weights/run-0") if not key.endswith(("HEAD", ".json"))]
    assert cached.bytes_kept > 1.9 * cached.bytes_fetched, f"each of {len(objects)} objects came once, and went thrice"
    head = head_of(store)
    cached.forget("run-0", head.version)
    assert await asyncio.to_thread(follow, near[0], states[0]) is not None


async def test_an_unchanged_head_costs_no_body(store: Store, relay: str, model: Tensors) -> None:
    Publisher(store, "run-0", {}).publish(0, model)
    url = f"{relay}/weights/run-0/HEAD"
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as first:
            tag = first.headers["ETag"]
        async with session.get(url, headers={"If-None-Match": tag}) as second:
            assert (second.status, await second.read()) == (304, b"")
    near = Store(relay)
    await asyncio.sleep(2 * FRESH_SECONDS)
    known = await asyncio.to_thread(chains.read_head, near, "run-0")
    assert await asyncio.to_thread(chains.read_head, near, "run-0", known) is known
    assert await asyncio.to_thread(chains.read_head, near, "run-1") is None


async def test_what_rots_in_a_relay_is_fetched_again(
    store: Store, cached: Cached, relay: str, tmp_path: Path, model: Tensors
) -> None:
    Publisher(store, "run-0", {}).publish(0, model)
    near = Store(relay)
    await asyncio.to_thread(follow, near, None)
    for path in (tmp_path / "relay").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert (await asyncio.to_thread(follow, near, None)).root == fingerprint(model)


async def test_readers_records_pass_and_nothing_else_is_written(store: Store, relay: str, model: Tensors) -> None:
    Publisher(store, "run-0", {}).publish(0, model)
    near = Store(relay)
    lease = Lease(near, "run-0", "far")
    await asyncio.to_thread(lease.renew, 0, 0)
    (seen,) = readers(store, "run-0")
    assert (seen.reader.cluster, seen.reader.serves, seen.alive) == ("far", 0, True)
    await asyncio.to_thread(lease.end)
    assert readers(store, "run-0") == []
    with pytest.raises(StoreError, match="cannot write weights/run-0/HEAD"):
        await asyncio.to_thread(near.put, "weights/run-0/HEAD", b"{}")
    assert head_of(store).version == 0


async def test_a_relay_whose_store_is_down_says_so(tmp_path: Path) -> None:
    class Down(Store):
        def get_with_tag(self, key: str) -> tuple[bytes, str]:
            raise StoreError(f"cannot read {key} in s3://far: connection refused")

    async with (
        serving(Down(tmp_path), "127.0.0.1", 0) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/weights/run-0/HEAD") as answer,
    ):
        assert answer.status == 502
        assert await answer.text() == "cannot read weights/run-0/HEAD in s3://far: connection refused"
