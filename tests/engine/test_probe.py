"""Pins PITFALLS RPL-4: with replay on, an engine whose answer holds no usable routes is found by one token at start."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from aiohttp import ClientSession, web

from stretto.engine.client import EngineError
from stretto.engine.probe import PROBE, RoutesMissing, probe
from stretto.records import GenerateResponse, RouteChunk, decode, encode

from .conftest import SPEC

SHAPE = (2, 2)


async def test_RPL_4_a_real_engine_returns_routes_of_the_right_shape(url):
    await probe(url, SHAPE, SPEC.experts)


@pytest.fixture
async def proxied(url, unused_tcp_port):
    """Starts a proxy before the real engine that does something to its answers."""
    runners = []

    async def start(change) -> str:
        async def forward(incoming: web.Request) -> web.Response:
            async with ClientSession() as session, session.post(url + incoming.path, data=await incoming.read()) as got:
                answer = decode(await got.read(), GenerateResponse)
            return web.Response(body=encode(change(answer)))

        app = web.Application()
        app.add_routes([web.post("/generate", forward)])
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
        return f"http://127.0.0.1:{unused_tcp_port}"

    yield start
    for runner in runners:
        await runner.cleanup()


def stripped(answer: GenerateResponse) -> GenerateResponse:
    return msgspec.structs.replace(answer, routes=None, route_shape=(0, 0))


def unknown(answer: GenerateResponse) -> GenerateResponse:
    rows = np.full((len(PROBE), *SHAPE), 255, np.uint8)
    return msgspec.structs.replace(answer, routes=RouteChunk.seal(0, np.array(PROBE, np.int32), rows))


def of_other_tokens(answer: GenerateResponse) -> GenerateResponse:
    rows = np.zeros((len(PROBE), *SHAPE), np.uint8)
    return msgspec.structs.replace(answer, routes=RouteChunk.seal(0, np.array([1, 1, 1], np.int32), rows))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (stripped, "returns no routed experts"),
        (unknown, "does not know the experts of 3 of 3 tokens"),
        (of_other_tokens, "cannot be read"),
    ],
)
async def test_RPL_4_an_answer_without_usable_routes_is_refused(proxied, change, sentence):
    url = await proxied(change)
    with pytest.raises(RoutesMissing, match=sentence) as caught:
        await probe(url, SHAPE, SPEC.experts)
    assert url in str(caught.value) and "trainer.replay = false" in str(caught.value)


async def test_RPL_4_an_engine_of_another_network_is_refused(url):
    with pytest.raises(RoutesMissing, match=r"\(2, 2\), the model has \(4, 2\)"):
        await probe(url, (4, 2), SPEC.experts)
    with pytest.raises(RoutesMissing, match="names expert"):
        await probe(url, SHAPE, 1)


async def test_an_engine_that_does_not_answer_is_said():
    with pytest.raises(EngineError, match="can't be reached"):
        await probe("http://127.0.0.1:9", SHAPE, SPEC.experts)
