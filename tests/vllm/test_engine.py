"""vLLM keeps our contract: log-probs are ours, each token knows its version, a swap is verified and falls between two
tokens, nothing begins on old KV, and what it can't do is refused by name. One engine, from no weights on, in order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from stretto.engine.client import EngineError
from stretto.records import GenerateRequest, GenerateResponse, Sampling, unknown_expert

from .conftest import SPEC, TOLERANCE, Served, Version

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = np.random.default_rng(1).integers(0, 256, 60).tolist()
LONG = np.random.default_rng(2).integers(0, 256, 200).tolist()
"""More than one of vLLM's blocks of 128 tokens, the unit of its prefix cache."""


def request(ids: list[int] = PROMPT, tokens: int = 20, stop: tuple[int, ...] = (), **other) -> GenerateRequest:
    sampling = Sampling(**{key: other.pop(key) for key in ("temperature", "top_p", "seed") if key in other})
    return GenerateRequest(ids=ids, max_tokens=tokens, stop=list(stop), sampling=sampling, **other)


def logprobs(response: GenerateResponse) -> np.ndarray:
    return np.frombuffer(response.logprobs, "<f4")


def labels(response: GenerateResponse) -> list[int]:
    return np.frombuffer(response.versions, "<i4").tolist()


async def settled(served: Served, **wanted: int) -> bool:
    """Whether /health comes to say so within two seconds."""
    for _ in range(40):
        health = await served.client.health()
        if all(health[key] == value for key, value in wanted.items()):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_without_weights_it_is_not_ready(served: Served) -> None:
    health = await served.client.health()
    assert (health["ready"], health["version"], health["role"]) == (False, None, "engine")
    with pytest.raises(EngineError, match="no weights yet") as caught:
        await served.client.generate(request(), 10)
    assert caught.value.status == 503


async def test_the_first_version_makes_it_ready(served: Served, versions: list[Version]) -> None:
    answer = await served.update(4, versions[1])
    assert (answer["status"], answer["version"]) == (200, 4) and answer["pause_s"] > 0
    health = await served.client.health()
    assert (health["ready"], health["version"], health["fingerprint"]) == (True, 4, versions[1].fingerprint)
    assert (await served.update(4, versions[1]))["pause_s"] == 0.0  # a repetition is a no-op


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3, 0.0])
async def test_log_probs_are_those_of_the_trainers_forward(served, versions, temperature: float) -> None:
    response = await served.client.generate(request(tokens=60, temperature=temperature), 30)
    assert len(response.ids) == 60 and response.finish == "length" and labels(response) == [4] * 60
    ours = versions[1].logprobs(PROMPT, response.ids, temperature or 1.0)
    assert np.abs(logprobs(response) - ours).max() < TOLERANCE
    if temperature == 0:
        again = await served.client.generate(request(PROMPT + response.ids[:30], 10, temperature=0.0), 30)
        assert again.ids == response.ids[30:40]


async def test_the_seed_decides_the_answer_and_turns_do_not_repeat_each_other(served) -> None:
    both = [served.client.generate(request(tokens=30, seed=seed), 30) for seed in (5, 5, 6)]
    first, second, other = await asyncio.gather(*both)
    assert first.ids == second.ids != other.ids
    turns = [await served.client.generate(request(PROMPT[:n], 1, temperature=2.0, seed=5), 30) for n in range(20, 40)]
    assert len({turn.ids[0] for turn in turns}) > 10


async def test_a_stop_token_ends_the_turn_and_is_part_of_it(served) -> None:
    whole = await served.client.generate(request(tokens=30, seed=7), 30)
    stop = whole.ids[10]
    response = await served.client.generate(request(tokens=30, seed=7, stop=(stop,)), 30)
    assert response.finish == "stop" and response.ids == whole.ids[: whole.ids.index(stop) + 1]


async def test_routes_that_are_not_known_say_so(served) -> None:
    response = await served.client.generate(request(tokens=5, routes_from=50), 30)
    assert response.route_shape == (2, 2) and response.route_bits == 8
    ids = np.array([*PROMPT, *response.ids], np.int32)[50:-1]
    assert response.routes is not None and (response.routes.start, response.routes.count) == (50, len(ids))
    rows = response.routes.open(ids, response.route_shape, 8)
    assert rows.shape == (14, 2, 2) and (rows == unknown_expert(8)).all()


MISTAKES = [
    (request(ids=[]), "ids is empty"),
    (request(ids=[1, 999]), "outside the vocabulary of 272"),
    (request(tokens=500), "do not fit a slot of 384 tokens"),
    (request(top_p=0.9), "top_p and top_k are not honoured by the vLLM engine"),
    (request(temperature=3.0), "temperature is 3.0; the vLLM engine takes 0"),
    (request(temperature=0.001), "temperature is 0.001"),
]


@pytest.mark.parametrize(("wrong", "sentence"), MISTAKES)
async def test_a_mistake_is_a_400_with_a_sentence(served, wrong: GenerateRequest, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence) as caught:
        await served.client.generate(wrong, 10)
    assert caught.value.status == 400


async def test_refused_weights_leave_no_trace(served, versions, tmp_path) -> None:
    before = await served.client.generate(request(seed=9), 30)
    wrong = await served.update(5, versions[2], fingerprint=versions[0].fingerprint)
    assert wrong["status"] == 409 and versions[2].fingerprint in wrong["error"]
    tensors = load_file(versions[2].path)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "short.safetensors")
    short = await served.update(5, versions[2], path=str(tmp_path / "short.safetensors"))
    assert short["status"] == 409 and "model.norm.weight" in short["error"]
    nowhere = await served.update(5, versions[2], path="/nowhere")
    assert nowhere["status"] == 409 and "/nowhere" in nowhere["error"]
    health = await served.client.health()
    assert (health["version"], health["fingerprint"], health["paused"]) == (4, versions[1].fingerprint, False)
    after = await served.client.generate(request(seed=9), 30)
    assert after.ids == before.ids and after.logprobs == before.logprobs and labels(after) == [4] * 20


async def test_weights_that_fail_half_way_are_taken_back(served, versions, tmp_path) -> None:
    """The file's own checks are passed by, as if a disk had failed in the middle of it."""
    from stretto.engine.contract import WeightsRefused
    from stretto.engine.vllm_service import Weights

    before = await served.client.generate(request(seed=10), 30)
    tensors = load_file(versions[2].path)
    tensors["model.layers.2.self_attn.q_proj.weight"] = tensors["model.layers.2.self_attn.q_proj.weight"][:7].clone()
    save_file(tensors, tmp_path / "bad.safetensors")
    bad = Weights(5, versions[2].fingerprint, {str(tmp_path / "bad.safetensors"): sorted(tensors)})
    with pytest.raises(WeightsRefused, match="vLLM could not take version 5"):
        await served.service._swap(bad)
    other = Weights(5, versions[0].fingerprint, {str(versions[2].path): sorted(tensors)})
    with pytest.raises(WeightsRefused, match=f"a worker was given {versions[2].fingerprint}"):
        await served.service._swap(other)
    after = await served.client.generate(request(seed=10), 30)
    assert after.ids == before.ids and after.logprobs == before.logprobs and labels(after) == [4] * 20


async def test_a_swap_falls_between_two_tokens(served, versions) -> None:
    """Tokens before it have the old version's log-probs and label, those after it neither."""
    prompts = [np.random.default_rng(seed).integers(0, 256, 20).tolist() for seed in range(6)]
    calls = [asyncio.create_task(served.client.generate(request(ids, 320, seed=1), 60)) for ids in prompts]
    while (await served.client.health())["active"] < 6:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert (await served.update(5, versions[2]))["status"] == 200
    await asyncio.sleep(0.1)
    assert (await served.update(6, versions[0]))["status"] == 200
    answers = await asyncio.gather(*calls)
    for ids, answer in zip(prompts, answers):
        found = labels(answer)
        assert len(found) == 320 and found == sorted(found) and set(found) == {4, 5, 6}
        swap = found.index(5)
        off = np.abs(logprobs(answer) - versions[1].logprobs(ids, answer.ids))
        assert off[:swap].max() < TOLERANCE
        assert (off[swap : swap + 10] > 10 * TOLERANCE).mean() > 0.8
    health = await served.client.health()
    assert (health["version"], health["fingerprint"]) == (6, versions[0].fingerprint)


async def test_no_request_begins_on_the_kv_of_old_weights(served, versions) -> None:
    """Neither by vLLM's prefix cache, nor because it was waiting while the weights changed."""
    first = await served.client.generate(request(LONG, 10, seed=1, session="one"), 30)
    again = await served.client.generate(request(LONG + first.ids, 10, seed=1, session="one"), 30)
    assert (first.cached, again.cached) == (0, 128)  # in one version a session goes on with what was computed
    await served.post("/pause")
    waiting = asyncio.create_task(served.client.generate(request(LONG, 40, seed=2), 60))
    assert await settled(served, waiting=1, paused=True)
    assert (await served.update(7, versions[1]))["status"] == 200
    assert (await served.client.health())["paused"]  # who paused it resumes it
    await served.post("/resume")
    response = await waiting
    assert (response.cached, labels(response)) == (0, [7] * 40)
    assert np.abs(logprobs(response) - versions[1].logprobs(LONG, response.ids)).max() < TOLERANCE
    assert (await served.client.generate(request(LONG, 5), 30)).cached == 128
    await served.client.release("one")


async def test_nothing_is_sampled_while_paused(served) -> None:
    call = asyncio.create_task(served.client.generate(request(tokens=300), 60))
    assert await settled(served, active=1)
    await served.post("/pause")
    await asyncio.sleep(0.2)
    (turn,) = served.service._turns
    count = len(turn.output.ids)
    await asyncio.sleep(0.5)
    assert len(turn.output.ids) == count < 300
    await served.post("/resume")
    assert len((await call).ids) == 300


async def test_releasing_a_session_ends_its_turn(served) -> None:
    call = asyncio.create_task(served.client.generate(request(tokens=300, session="gone"), 60))
    assert await settled(served, active=1, sessions=1)
    await served.client.release("gone")
    answer = await call
    assert answer.finish == "aborted" and len(answer.ids) == len(labels(answer)) < 300
    assert answer.routes is not None and answer.routes.count == max(len(PROMPT) + len(answer.ids) - 1, 0)
    assert await settled(served, active=0, waiting=0, sessions=0)


async def test_a_caller_that_leaves_takes_its_request_out_of_vllm(served) -> None:
    calls = [asyncio.create_task(served.client.generate(request(tokens=300), 60)) for _ in range(12)]
    assert await settled(served, active=8)  # slots; the others wait
    for call in calls:
        call.cancel()
    assert await settled(served, active=0, waiting=0)
    assert served.service._llm.get_num_unfinished_requests() == 0
    assert len((await served.client.generate(request(), 30)).ids) == 20


async def test_metrics_and_chat(served) -> None:
    text = (await served.client._call("GET", "/metrics", 5)).decode()
    assert 'stretto_engine_version{engine="e1"} 7' in text and "# TYPE stretto_engine_swaps_total counter" in text
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "logprobs": True}
    async with served.client._session.post(f"{served.client.url}/v1/chat/completions", json=body) as answer:
        choice = (await answer.json())["choices"][0]
    assert choice["finish_reason"] in ("length", "stop") and len(choice["logprobs"]["content"]) <= 8
    body |= {"stream": True}
    async with served.client._session.post(f"{served.client.url}/v1/chat/completions", json=body) as answer:
        assert (await answer.text()).rstrip().endswith("data: [DONE]")


async def test_layers_are_counted_as_the_network_does() -> None:
    """vLLM returns rows of all layers; ours are the MoE layers': the dense one in the middle is left out."""
    from stretto.engine.vllm_turn import Output, response

    rows = np.arange(3 * 3 * 2, dtype=np.uint8).reshape(3, 3, 2) % SPEC.experts
    output = Output(ids=[8], logprobs=[-1.0], routes=rows, finish="length")
    output.spans = [type("Span", (), {"version": "3", "start": 0, "end": 1})()]
    answer = response(request([5, 6, 7], 1), output, SPEC, routes=True)
    assert answer.routes is not None
    assert (answer.routes.open(np.array([5, 6, 7], np.int32), (2, 2), 8) == rows[:, [0, 2]]).all()
