"""The follower against real HTTP peers: an engine that loads and fingerprints files, an orchestrator that listens."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stretto.config import WeightsConfig
from stretto.records import EngineStatus, decode
from stretto.watch.metrics import Metrics, read
from stretto.weights import cluster, complaints, follower, patchfile, peers
from stretto.weights.follower import Follower
from stretto.weights.publisher import Publisher
from stretto.weights.state import fingerprint
from stretto.weights.store import Store
from stretto.weights.tensorfile import unpack

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]


class Engine:
    """`/update_weights` and `/health` as the contract has them. Hooks let a test break the engine or its disk."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.fingerprint = ""
        self.tensors: Tensors = {}
        self.updates = 0
        self.orders: list[dict] = []  # those that were not refused at once
        self.patches = True
        self.before_load: Callable[[Path], object] = lambda path: None
        self.deaf = False  # says yes and does nothing
        self.hang = asyncio.Event()
        self.hang.set()
        app = web.Application()
        app.router.add_post("/update_weights", self._update)
        app.router.add_get("/health", self._health)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def _update(self, request: web.Request) -> web.Response:
        order = await request.json()
        self.updates += 1
        await self.hang.wait()
        self.before_load(Path(order["path"]))
        if order["parent"] and (not self.patches or order["parent"] != self.fingerprint):
            return web.json_response({"error": "that patch is for others"}, status=412)
        self.orders.append(order)
        if order["parent"]:
            tensors = {name: array.copy() for name, array in self.tensors.items()}
            for change in patchfile.load(Path(order["path"]), {name: array.size for name, array in tensors.items()}):
                change.write(tensors[change.name])
        else:
            tensors, _ = unpack(Path(order["path"]).read_bytes())
        if fingerprint(tensors) != order["fingerprint"]:
            return web.json_response({"error": "the file has another fingerprint"}, status=409)
        if not self.deaf:
            self.version, self.fingerprint, self.tensors = order["version"], order["fingerprint"], tensors
        return web.json_response({"version": order["version"], "pause_s": 0.001})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"role": "engine", "version": self.version, "fingerprint": self.fingerprint})


class Desk:
    """The orchestrator's `/engine`: what is routable, and everything that was said."""

    def __init__(self) -> None:
        self.routable: dict[str, EngineStatus] = {}
        self.said: list[tuple[str, str, int | None]] = []
        app = web.Application()
        app.router.add_post("/engine", self._add)
        app.router.add_delete("/engine", self._remove)
        self.server = TestServer(app)

    async def _add(self, request: web.Request) -> web.Response:
        status = decode(await request.read(), EngineStatus)
        self.routable[status.url] = status
        self.said.append(("add", status.url, status.version))
        return web.json_response({})

    async def _remove(self, request: web.Request) -> web.Response:
        self.routable.pop(request.query["url"], None)
        self.said.append(("remove", request.query["url"], None))
        return web.json_response({})


class World:
    def __init__(self, folder: Path, engines: list[Engine], desk: Desk) -> None:
        self.store, self.cache, self.log = Store(folder / "store"), folder / "cache", folder / "metrics.jsonl"
        self.engine, self.second = engines
        self.engines, self.desk = [self.engine], desk  # a cluster of one, unless a test adds the second
        self.publisher = Publisher(self.store, "run-0", {"config.json": b"{}"}, anchor_every=4)
        self.config = WeightsConfig(poll_seconds=0.01, drain_seconds=0.0)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[Follower]:
        stop = asyncio.Event()
        with Metrics(self.log, "follower-a") as metrics:
            async with aiohttp.ClientSession() as session:
                one = Follower(
                    self.store,
                    "run-0",
                    "a",
                    [engine.url for engine in self.engines],
                    str(self.desk.server.make_url("")),
                    self.cache,
                    self.config,
                    metrics,
                    session,
                )
                task = asyncio.create_task(one.run(stop))
                try:
                    yield one
                finally:
                    stop.set()
                    await asyncio.wait_for(task, 10)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"{what} did not happen; events: {self.events()}")

    async def routable(self, version: int, engine: Engine | None = None) -> None:
        url = (engine or self.engine).url
        await self.until(
            lambda: url in self.desk.routable and self.desk.routable[url].version == version,
            f"version {version} at {url}",
        )

    def events(self) -> list[str]:
        return [line["text"] for line in read(self.log) if line["kind"] == "event"]

    def swaps(self) -> list[dict]:
        return [line for line in read(self.log) if line["kind"] == "swap"]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    short = [(cluster, "CHECK_SECONDS", 0.05), (cluster, "AGAIN_SECONDS", 0.5), (peers, "ANSWER_SECONDS", 2.0)]
    short += [(complaints, "REPEAT_SECONDS", 0.5), (complaints, "PATIENCE_SECONDS", 0.0)]
    short += [(follower, "AGAIN_SECONDS", 0.5)]
    for module, name, seconds in short:
        monkeypatch.setattr(module, name, seconds)
    engines, desk = [Engine(), Engine()], Desk()
    servers = [desk.server, *(engine.server for engine in engines)]
    for server in servers:
        await server.start_server()
    world = World(tmp_path, engines, desk)
    yield world
    for engine in engines:
        engine.hang.set()
    for server in servers:
        await server.close()


async def test_every_version_arrives_and_becomes_routable(world: World, model: Tensors, step: Step) -> None:
    async with world.following():
        await world.until(world.events, "a complaint")
        assert world.events() == [f"chain run-0 in {world.store.url} has no version yet"]
        for version in range(6):
            world.publisher.publish(version, model)
            await world.routable(version)
            assert fingerprint(world.engine.tensors) == fingerprint(model) == world.engine.fingerprint
            assert len(list(world.cache.iterdir())) <= 4
            model = step(model, version)
    assert world.desk.said[-1] == ("remove", world.engine.url, None)
    swaps = world.swaps()
    assert [(swap["version"], swap["form"]) for swap in swaps] == [(0, "anchor"), *((v, "delta") for v in range(1, 6))]
    assert all(swap["cluster"] == "a" and swap["pause_s"] == 0.001 and swap["bytes"] > 0 for swap in swaps)
    assert len(world.events()) == 1


async def test_engines_that_serve_the_version_before_get_what_changed_and_others_all(
    world: World, model: Tensors, step: Step
) -> None:
    second = world.second
    world.engines.append(second)
    second.patches = False  # takes whole files only
    world.config = WeightsConfig(poll_seconds=0.01, kv="drain", drain_seconds=3.0)
    before = ""
    async with world.following():
        for version in range(3):
            world.publisher.publish(version, model)
            for engine in world.engines:
                await world.routable(version, engine)
                assert fingerprint(engine.tensors) == fingerprint(model)
            assert world.engine.orders[-1]["parent"] == before
            before, model = fingerprint(model), step(model, version)
        world.engine.version, world.engine.fingerprint = 0, "something else"
        world.publisher.publish(3, model)
        await world.routable(3)
    assert [bool(order["parent"]) for order in world.engine.orders[:4]] == [False, True, True, False]
    assert not any(order["parent"] for order in second.orders)
    assert {(order["kv"], order["drain_seconds"]) for order in world.engine.orders} == {("drain", 3.0)}
    sizes = [path.stat().st_size for path in world.cache.glob("*.patch")]
    assert len(sizes) == 2 and max(sizes) < 4000  # of small tensors the names are most


async def test_a_step_that_changes_nothing_is_a_version_too(world: World, model: Tensors) -> None:
    async with world.following():
        for version in range(2):
            world.publisher.publish(version, model)
            await world.routable(version)


async def test_one_download_serves_all_engines_of_a_cluster(world: World, model: Tensors) -> None:
    world.engines.append(world.second)
    world.publisher.publish(0, model)
    async with world.following():
        for engine in world.engines:
            await world.routable(0, engine)
    assert sorted(swap["bytes"] > 0 for swap in world.swaps()) == [False, True]


async def test_a_late_joiner_and_a_restart_from_the_cache(world: World, model: Tensors, step: Step) -> None:
    for version in range(6):
        model = step(model, version)
        world.publisher.publish(version, model)
    async with world.following():
        await world.routable(5)
    model = step(model, 6)
    world.publisher.publish(6, model)
    world.engine.version = None
    async with world.following():
        await world.routable(6)
    first, second = world.swaps()
    assert (first["form"], second["form"]) == ("anchor", "delta")
    assert second["bytes"] < first["bytes"] / 2
    for path in world.cache.iterdir():  # a cache that rotted is no base
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    world.engine.version = None
    async with world.following():
        await world.routable(6)
    assert world.swaps()[-1]["form"] == "anchor"


async def test_WGT_2_an_engine_that_says_yes_but_does_not_serve_is_never_routed(world: World, model: Tensors) -> None:
    world.engine.deaf = True
    world.publisher.publish(0, model)
    async with world.following():
        await world.until(lambda: world.engine.updates > 1, "a second try")
        await world.until(lambda: any("not routable" in text for text in world.events()), "a complaint")
        assert world.desk.said == []
        assert world.engine.url in world.events()[-1]
        world.engine.deaf = False
        await world.routable(0)


async def test_WGT_1_an_engine_that_refuses_keeps_its_version_and_gets_an_anchor(
    world: World, model: Tensors, step: Step
) -> None:
    async with world.following():
        world.publisher.publish(0, model)
        await world.routable(0)

        def rot(path: Path) -> None:
            world.engine.before_load = lambda path: None
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

        world.engine.before_load = rot
        newer = step(model, 1)
        world.publisher.publish(1, newer)
        await world.until(lambda: world.engine.updates == 2, "the refusal")
        assert world.engine.version == 0, "the old version serves on"
        await world.routable(1)
    assert fingerprint(world.engine.tensors) == fingerprint(newer)
    assert any("refused version 1: the file has another fingerprint; fetching an anchor" in e for e in world.events())
    assert world.swaps()[-1]["form"] == "anchor"


async def test_an_engine_that_always_refuses_is_not_hammered(world: World, model: Tensors) -> None:
    world.engine.before_load = lambda path: path.write_bytes(path.read_bytes()[:-2] + b"zz")
    world.publisher.publish(0, model)
    async with world.following():
        await world.until(
            lambda: any("it goes on with the version it has" in text for text in world.events()), "refusal"
        )
        before = world.engine.updates
        await asyncio.sleep(0.3)
        assert world.engine.updates <= before + 1
    assert world.desk.said == []


async def test_WGT_10_a_restarted_engine_is_not_routable_until_it_serves_the_version(
    world: World, model: Tensors
) -> None:
    world.publisher.publish(0, model)
    async with world.following():
        await world.routable(0)
        world.desk.said.clear()
        world.engine.version, world.engine.fingerprint = None, ""
        await world.until(lambda: world.engine.updates == 2, "a second update")
        await world.routable(0)
        assert ("remove", world.engine.url, None) in world.desk.said
        assert any("fell from version 0 to None" in text for text in world.events())


async def test_an_engine_that_dies_is_named_and_leaves(world: World, model: Tensors) -> None:
    world.publisher.publish(0, model)
    async with world.following():
        await world.routable(0)
        url = world.engine.url
        await world.engine.server.close()
        await world.until(lambda: url not in world.desk.routable, "leaving")
        await world.until(lambda: world.events(), "a complaint")
        assert world.events()[-1].startswith(f"{url} cannot be reached for GET /health")


async def test_a_hanging_engine_holds_up_nobody(
    world: World, model: Tensors, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "UPDATE_SECONDS", 0.3)
    quick = world.second
    world.engines.append(quick)
    world.publisher.publish(0, model)
    async with world.following():
        for engine in world.engines:
            await world.routable(0, engine)
        world.engine.hang.clear()
        for version in range(1, 5):
            model = step(model, version)
            world.publisher.publish(version, model)
            await world.routable(version, quick)
        sentence = f"{world.engine.url} did not answer POST /update_weights within 0.3 s"
        await world.until(lambda: sentence in world.events(), "the deadline")
        assert world.desk.routable[world.engine.url].version == 0, "still routable at the version it serves"
        world.desk.said.clear()
        await world.until(lambda: ("add", world.engine.url, 0) in world.desk.said, "a renewal during the update")
        world.engine.hang.set()
        await world.routable(4)


async def test_damage_in_the_store_is_named_and_gone_around(world: World, model: Tensors, step: Step) -> None:
    async with world.following():
        world.publisher.publish(0, model)
        await world.routable(0)
    model = step(model, 1)
    world.publisher.publish(1, model)
    (key,) = (key for key in world.store.list() if "/deltas/" in key)
    data = bytearray(world.store.get(key))
    data[9] ^= 4
    world.store.put(key, bytes(data))
    async with world.following():
        await world.until(lambda: any(key in text for text in world.events()), "the damage")
        await world.routable(0)
        assert fingerprint(world.engine.tensors) == world.engine.fingerprint
        assert any("a stays at version 0: cannot use the delta to version 1" in text for text in world.events())
        for version in range(2, 5):  # at 4 there is an anchor
            model = step(model, version)
            world.publisher.publish(version, model)
        await world.routable(4)
        assert fingerprint(world.engine.tensors) == fingerprint(model)


CHILD = """
import sys
from pathlib import Path
from stretto.config import WeightsConfig
from stretto.weights.follower import follow
follow(sys.argv[1], "run-0", "a", [sys.argv[2]], sys.argv[3], Path(sys.argv[4]), WeightsConfig(), None)
print("torch" in sys.modules, "obstore" in sys.modules)
"""


async def test_as_a_process_until_sigterm(world: World, model: Tensors) -> None:
    world.publisher.publish(0, model)
    arguments = [str(world.store.url), world.engine.url, str(world.desk.server.make_url("")), str(world.cache)]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        await world.routable(0)
        os.kill(process.pid, signal.SIGTERM)
        out, err = await asyncio.to_thread(process.communicate, None, 10)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "False False\n", "")
    assert world.desk.routable == {}
