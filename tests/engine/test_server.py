"""The server's manners: sentences for mistakes, slots freed by callers that leave, a clean start and end.

Nothing is silently ignored, and failures speak: each says who did not do what.
"""

from __future__ import annotations

import asyncio
import socket
import time

import aiohttp
import numpy as np
import pytest

from stretto.engine.client import EngineClient, EngineError
from stretto.records import GenerateRequest, Sampling

from .conftest import Process, engine


def request(ids=(1, 2, 3), tokens: int = 5, routes_from: int = 0, session: str = "", **sampling) -> GenerateRequest:
    return GenerateRequest(
        ids=list(ids),
        max_tokens=tokens,
        stop=[],
        sampling=Sampling(**sampling),
        routes_from=routes_from,
        session=session,
    )


MISTAKES = [
    (request(ids=[]), "ids is empty"),
    (request(ids=[1, 999]), "outside the vocabulary of 272"),
    (request(ids=[-1]), "outside the vocabulary"),
    (request(tokens=0), "max_tokens is 0"),
    (request(ids=[1] * 200), "do not fit a slot of 192 tokens"),
    (request(tokens=190), "do not fit a slot"),
    (request(routes_from=4), "routes_from is 4"),
    (request(temperature=-1.0), "temperature is -1"),
    (request(top_p=0.0), "top_p is 0"),
    (request(top_k=-1), "top_k is -1"),
]


@pytest.mark.parametrize(("wrong", "sentence"), MISTAKES)
async def test_a_mistake_is_a_400_with_a_sentence(url, connect, wrong, sentence):
    with pytest.raises(EngineError, match=sentence) as caught:
        await connect(url).generate(wrong, 10)
    assert caught.value.status == 400
    assert url in str(caught.value)


async def test_a_body_that_is_no_request_is_a_400(url):
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", data=b"\x81\xa3ids\x01") as answer:
        assert answer.status == 400
        assert "ids" in (await answer.json())["error"]


async def test_an_unknown_path_is_a_404(url, connect):
    with pytest.raises(EngineError, match="404"):
        await connect(url)._call("GET", "/nothing", 5)


async def test_the_client_names_an_engine_that_is_not_there(connect):
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9 can't be reached"):
        await connect("http://127.0.0.1:9").health()


async def settled(client: EngineClient, **wanted: int) -> bool:
    """Whether /health comes to say so within a second."""
    for _ in range(20):
        health = await client.health()
        if all(health[key] == value for key, value in wanted.items()):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_caller_that_leaves_frees_its_slot(url, connect):
    client = connect(url)
    await client._call("POST", "/pause", 5)  # so that nothing can end on its own
    try:
        calls = [asyncio.create_task(client.generate(request(tokens=150), 20)) for _ in range(20)]
        assert await settled(client, waiting=20) or (await client.health())["active"] == 12
        for call in calls:
            call.cancel()
        assert await settled(client, active=0, waiting=0)
    finally:
        await client._call("POST", "/resume", 5)
    assert len((await client.generate(request(), 10)).ids) == 5


async def test_a_call_times_out_with_the_url(url, connect):
    client = connect(url)
    await client._call("POST", "/pause", 5)
    try:
        with pytest.raises(EngineError, match=f"{url} did not answer /generate within 0.2 s"):
            await client.generate(request(), 0.2)
        assert await settled(client, active=0, waiting=0)
    finally:
        await client._call("POST", "/resume", 5)


async def test_releasing_a_session_ends_its_turn_and_frees_it(url, connect):
    client = connect(url)
    await client._call("POST", "/pause", 5)
    try:
        call = asyncio.create_task(client.generate(request(tokens=100, session="gone"), 20))
        assert await settled(client, waiting=1)
        await client.release("gone")
        answer = await call
    finally:
        await client._call("POST", "/resume", 5)
    assert (answer.finish, answer.ids) == ("aborted", [])
    rows = answer.routes.open(np.array([1, 2], "<i4"), (2, 2), 8)
    assert rows.shape == (2, 2, 2) and (rows == 255).all()  # rows that no pass made are unknown
    assert await settled(client, sessions=0)


async def test_turns_of_one_session_come_one_after_the_other(url, connect):
    client = connect(url)
    both = [client.generate(request(range(30), 20, session="one", seed=4), 20) for _ in range(2)]
    first, second = await asyncio.gather(*both)
    assert first.ids == second.ids
    assert sorted([first.cached, second.cached]) == [0, 29]
    await client.release("one")


async def test_metrics_are_prometheus_text(url, connect):
    text = (await connect(url)._call("GET", "/metrics", 5)).decode()
    assert 'stretto_engine_version{engine="e1"} 0' in text
    assert "# TYPE stretto_engine_sampled_tokens_total counter" in text


def last_words(process: Process) -> tuple[int | None, list[str]]:
    try:
        return process.wait(), process.log.read_text().splitlines()
    finally:
        process.close()


def test_a_port_in_use_is_one_sentence(nano):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, lines = last_words(Process(nano, port=port))
    assert code == 1
    assert lines == [f"e1: port {port} on 127.0.0.1 is in use: stop what listens there, or choose another"]


def test_a_folder_without_a_model_is_one_sentence(tmp_path):
    code, lines = last_words(Process(tmp_path))
    assert code == 1
    assert len(lines) == 1 and str(tmp_path) in lines[0]


async def test_sigterm_answers_who_waits_and_exits_cleanly(nano, connect):
    with engine(nano, slots=2) as address:
        client = connect(address)
        await client._call("POST", "/pause", 5)
        call = asyncio.create_task(client.generate(request(), 20))
        await settled(client, waiting=1)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"going down|can't be reached"):
        await call
    assert time.monotonic() - start < 5
