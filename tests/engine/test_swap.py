"""New weights under load: verified beside the live ones, swapped between two tokens, refused without a trace."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch

from stretto.engine.client import EngineClient, EngineError
from stretto.engine.standby import model_fingerprint
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.records import GenerateRequest, GenerateResponse, Sampling

from .conftest import engine, make_checkpoint

RNG = np.random.default_rng(1)


@dataclass
class Weights:
    path: Path
    fingerprint: str
    model: checkpoint.Transformer


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Three versions of one network."""
    made = []
    for seed in range(3):
        folder = make_checkpoint(tmp_path_factory.mktemp("versions") / f"v{seed}", seed)
        model = checkpoint.load(folder)
        made.append(Weights(folder / "model.safetensors", model_fingerprint(model), model))
    return made


@pytest.fixture(scope="module")
def served(weights: list[Weights]):
    with engine(weights[0].path.parent, slots=8, version=-1) as address:
        yield address


def request(ids: list[int], tokens: int, session: str = "", seed: int | None = None) -> GenerateRequest:
    return GenerateRequest(ids=ids, max_tokens=tokens, stop=[], sampling=Sampling(seed=seed), session=session)


async def update(client: EngineClient, version: int, weights: Weights, fingerprint: str = "") -> dict:
    body = {"version": version, "path": str(weights.path), "fingerprint": fingerprint or weights.fingerprint}
    async with client._session.post(f"{client.url}/update_weights", json=body) as answer:
        return {"status": answer.status, **await answer.json()}


def versions(response: GenerateResponse) -> list[int]:
    return np.frombuffer(response.versions, "<i4").tolist()


@torch.no_grad()
def logprobs_under(model: checkpoint.Transformer, history: list[int], ids: list[int]) -> np.ndarray:
    whole = torch.tensor(history + ids)
    out = model(whole, torch.arange(len(whole)), PackedCausal([len(whole)]))
    return token_logprobs(model, out.hidden_TD[len(history) - 1 : -1], torch.tensor(ids), 1.0)[0].numpy()


async def test_ENG_16_the_life_of_an_engine(served, weights, connect):
    """From no weights over a refusal to a swap under load; one process, in order."""
    client = connect(served)
    ids = RNG.integers(0, 256, 60).tolist()

    health = await client.health()
    assert (health["ready"], health["version"]) == (False, None)
    with pytest.raises(EngineError, match="no weights yet"):
        await client.generate(request(ids, 4), 10)

    assert (await update(client, 4, weights[0]))["status"] == 200
    health = await client.health()
    assert (health["ready"], health["version"], health["fingerprint"]) == (True, 4, weights[0].fingerprint)

    before = await client.generate(request(ids, 20, seed=5), 10)
    refused = await update(client, 5, weights[1], fingerprint=weights[2].fingerprint)
    assert refused["status"] == 409 and weights[1].fingerprint in refused["error"]
    assert (await update(client, 5, Weights(Path("/nowhere"), "x", weights[0].model)))["status"] == 409
    health = await client.health()
    assert (health["version"], health["fingerprint"]) == (4, weights[0].fingerprint)
    after = await client.generate(request(ids, 20, seed=5), 10)
    assert after.ids == before.ids and versions(after) == [4] * 20

    stop = asyncio.Event()
    answers: list[GenerateResponse] = []

    async def load(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            answers.append(await client.generate(request(rng.integers(0, 256, 20).tolist(), 100), 20))

    callers = [asyncio.create_task(load(seed)) for seed in range(6)]
    for version in (5, 6, 7, 8):
        await asyncio.sleep(0.15)
        answer = await update(client, version, weights[version % 3])
        assert (answer["status"], answer["version"]) == (200, version)
        assert 0 <= answer["pause_s"] < 0.1
    await asyncio.sleep(0.2)
    stop.set()
    await asyncio.gather(*callers)
    assert len({version for answer in answers for version in versions(answer)}) == 5
    mixed = 0
    for answer in answers:
        assert versions(answer) == sorted(versions(answer))
        assert np.isfinite(np.frombuffer(answer.logprobs, "<f4")).all()
        mixed += len(set(versions(answer))) > 1
    assert mixed >= 4, "some turns must have lived through a swap, or this shows nothing"


async def test_ENG_15_a_new_request_never_uses_old_kv_but_a_session_goes_on(served, weights, connect):
    client = connect(served)
    ids = RNG.integers(0, 256, 60).tolist()
    await update(client, 20, weights[0])
    first = await client.generate(request(ids, 10, session="goes on"), 10)
    assert (await client.generate(request(ids, 10), 10)).cached == 59

    await update(client, 21, weights[1])
    fresh = await client.generate(request(ids, 10), 10)
    assert fresh.cached == 0
    wanted = logprobs_under(weights[1].model, ids, fresh.ids)
    np.testing.assert_allclose(np.frombuffer(fresh.logprobs, "<f4"), wanted, atol=1e-5, rtol=0)

    longer = ids + first.ids + RNG.integers(0, 256, 8).tolist()
    going_on = await client.generate(request(longer, 10, session="goes on"), 10)
    assert going_on.cached == len(ids) + 9
    assert versions(going_on) == [21] * 10
    # its old rows are for it alone: the same history, asked anew, is computed anew
    anew = await client.generate(request(longer, 10), 10)
    assert anew.cached <= 60
    wanted = logprobs_under(weights[1].model, longer, anew.ids)
    np.testing.assert_allclose(np.frombuffer(anew.logprobs, "<f4"), wanted, atol=1e-5, rtol=0)


async def test_pause_holds_requests_and_resume_lets_them_go(served, weights, connect):
    client = connect(served)
    await update(client, 30, weights[2])
    await client._call("POST", "/pause", 5)
    waiting = asyncio.create_task(client.generate(request([1, 2, 3], 5), 10))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert (await update(client, 31, weights[0]))["status"] == 200
    await client._call("POST", "/resume", 5)
    assert versions(await waiting) == [31] * 5


async def test_repeating_an_update_changes_nothing(served, weights, connect):
    client = connect(served)
    await update(client, 40, weights[0])
    ids = RNG.integers(0, 256, 40).tolist()
    await client.generate(request(ids, 4), 10)
    assert (await update(client, 40, weights[0]))["status"] == 200
    assert (await client.generate(request(ids, 4), 10)).cached == 39


def test_update_body_is_checked(served):
    async def run() -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{served}/update_weights", json={"version": 1}) as answer,
        ):
            assert answer.status == 400
            assert "fingerprint" in (await answer.json())["error"]

    asyncio.run(run())
