"""Tokens in, tokens out, over HTTP: what the engine says equals what the network says of the same ids.

Pins: log-probs of the distribution really sampled from,
routes of the very forward pass, the same answer whatever shares the batch, and reuse of KV (sessions, shared
prefixes) that changes nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.engine.sampler import kept
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.records import GenerateRequest, GenerateResponse, Sampling, encode
from stretto.support import Support

RNG = np.random.default_rng(0)
SETTINGS = [(0.7, 1.0, 0), (1.0, 1.0, 0), (1.3, 1.0, 0), (1.0, 0.8, 0), (0.7, 0.5, 0), (1.3, 1.0, 9), (1.0, 0.9, 40)]


def prompt(length: int, rng: np.random.Generator = RNG) -> list[int]:
    return rng.integers(0, 256, length).tolist()


def request(ids: list[int], tokens: int = 20, session: str = "", routes_from: int = 0, stop=(), **sampling):
    return GenerateRequest(
        ids=ids,
        max_tokens=tokens,
        stop=list(stop),
        sampling=Sampling(**sampling),
        session=session,
        routes_from=routes_from,
    )


def logprobs(response: GenerateResponse) -> np.ndarray:
    return np.frombuffer(response.logprobs, "<f4")


def routes(history: list[int], response: GenerateResponse) -> np.ndarray:
    ids = np.array((history + response.ids)[response.routes.start : -1], "<i4")
    return response.routes.open(ids, response.route_shape, response.route_bits)


class Reference:
    """The whole sequence through the network at once, as the trainer sees it."""

    def __init__(self, folder: Path):
        self.model = checkpoint.load(folder)

    @torch.no_grad()
    def forward(self, ids: list[int]):
        count = len(ids)
        return self.model(torch.tensor(ids), torch.arange(count), PackedCausal([count]), capture=True)

    @torch.no_grad()
    def check(
        self,
        history: list[int],
        response: GenerateResponse,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> None:
        """Log-probs within rounding (both are up to 1e-5 from float64 here) over the supports that came with them,
        routes equal, one row for each position but the last; the supports are those of the cut, up to rounding at its
        border."""
        out = self.forward(history + response.ids)
        predict = out.hidden_TD[len(history) - 1 : -1]
        support = None
        if top_p < 1 or top_k:
            support = Support.open(response.support)
            own = kept(self.model.logits(predict) / temperature, top_p, top_k).numpy()
            assert (support.mask(0, len(support)) == own).all(axis=1).mean() > 0.95
        else:
            assert response.support is None
        wanted, _ = token_logprobs(self.model, predict, torch.tensor(response.ids), temperature, support)
        np.testing.assert_allclose(logprobs(response), wanted.numpy(), atol=3e-5, rtol=0)
        np.testing.assert_array_equal(routes(history, response), out.routes_TLK[response.routes.start : -1].numpy())

    @torch.no_grad()
    def greedy(self, history: list[int], tokens: int) -> list[int]:
        ids = list(history)
        for _ in range(tokens):
            ids.append(int(self.model.logits(self.forward(ids).hidden_TD[-1:]).argmax()))
        return ids[len(history) :]


@pytest.fixture(scope="module")
def reference(nano: Path) -> Reference:
    return Reference(nano)


def same(one: GenerateResponse, other: GenerateResponse) -> None:
    assert one.ids == other.ids
    np.testing.assert_allclose(logprobs(one), logprobs(other), atol=1e-5, rtol=0)


async def test_greedy_is_the_argmax_of_the_full_forward(url, connect, reference):
    client = connect(url)
    prompts = [prompt(n) for n in (1, 2, 17, 90, 150)]
    answers = await asyncio.gather(*(client.generate(request(ids, 24, temperature=0), 20) for ids in prompts))
    for ids, answer in zip(prompts, answers):
        assert answer.ids == reference.greedy(ids, 24)
        assert answer.finish == "length"
        reference.check(ids, answer)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
async def test_ENG_5_ENG_6_logprobs_are_of_the_distribution_sampled_from(
    url, connect, reference, temperature, top_p, top_k
):
    client = connect(url)
    prompts = [prompt(n) for n in (3, 40, 75, 101)]
    answers = await asyncio.gather(
        *(client.generate(request(ids, 40, temperature=temperature, top_p=top_p, top_k=top_k), 20) for ids in prompts)
    )
    for ids, answer in zip(prompts, answers):
        reference.check(ids, answer, temperature, top_p, top_k)
        assert np.frombuffer(answer.versions, "<i4").tolist() == [0] * 40


async def test_seed_decides_whatever_else_is_in_the_batch(url, connect):
    client = connect(url)
    wanted = request(prompt(60), 40, seed=7)
    alone = await client.generate(wanted, 20)
    crowd = [request(prompt(5 + 9 * n), 30 + n, top_p=0.9, seed=n) for n in range(9)]
    crowded, *_ = await asyncio.gather(*(client.generate(r, 20) for r in [wanted, *crowd]))
    same(alone, crowded)
    other = await client.generate(request(wanted.ids, 40, seed=8), 20)
    assert other.ids != alone.ids


async def test_without_a_seed_attempts_differ(url, connect):
    client = connect(url)
    ids = prompt(30)
    answers = await asyncio.gather(*(client.generate(request(ids, 20), 20) for _ in range(4)))
    assert len({tuple(answer.ids) for answer in answers}) == 4


async def test_stop_token_ends_the_turn_and_is_part_of_it(url, connect):
    client = connect(url)
    ids = prompt(30)
    free = await client.generate(request(ids, 20, temperature=0), 20)
    stop = free.ids[5]
    cut = await client.generate(request(ids, 20, temperature=0, stop=[stop]), 20)
    assert cut.ids == free.ids[: free.ids.index(stop) + 1]
    assert cut.finish == "stop"


async def test_a_session_is_the_same_as_recomputation(url, connect, reference):
    """Three turns with observations: KV kept, routes from where the caller lacks them, the rest as from scratch."""
    client = connect(url)
    history, rows = prompt(40), 0
    for turn in range(3):
        ask = request(history, 15, session="s", routes_from=rows, seed=3)
        held = await client.generate(ask, 20)
        fresh = await client.generate(request(history, 15, routes_from=rows, seed=3), 20)
        reference.check(history, held)
        same(held, fresh)
        assert len(routes(history, held)) == len(history) + 15 - 1 - rows
        if turn:
            assert held.cached == rows
        rows = len(history) + 15 - 1
        history = history + held.ids + prompt(12)
    await client.release("s")


async def test_an_edited_history_drops_what_differs(url, connect, reference):
    client = connect(url)
    ids = prompt(60)
    await client.generate(request(ids, 10, session="edit"), 20)
    edited = [*ids[:50], (ids[50] + 1) % 256, *ids[51:]]
    answer = await client.generate(request(edited, 10, session="edit"), 20)
    assert answer.cached == 50
    reference.check(edited, answer)


async def test_a_group_computes_its_prompt_once(url, connect, reference):
    """Eight attempts at one prompt at the same time: seven copy its rows, and answer as if they had computed them."""
    client = connect(url)
    ids = prompt(120)
    before = await counters(client)
    answers = await asyncio.gather(*(client.generate(request(ids, 20, seed=n), 20) for n in range(8)))
    after = await counters(client)
    cached = sorted(answer.cached for answer in answers)
    assert cached[0] == 0 and set(cached[1:]) <= {119, 120}  # 120: it came early enough to wait for the last row too
    assert after["prefill_tokens_total"] - before["prefill_tokens_total"] == 120
    for n, answer in enumerate(answers):
        reference.check(ids, answer)
        # the same attempt later, on its own, from another prefix
        same(answer, await client.generate(request(ids, 20, seed=n), 20))


async def test_more_requests_than_slots_all_end(url, connect, reference):
    client = connect(url)
    prompts = [prompt(20 + n) for n in range(40)]
    answers = await asyncio.gather(
        *(client.generate(request(ids, 12, session=f"q{n}"), 30) for n, ids in enumerate(prompts))
    )
    for ids, answer in zip(prompts, answers):
        reference.check(ids, answer)
    for n in range(40):
        await client.release(f"q{n}")


async def test_RPL_5_bytes_are_linear_in_new_tokens(url, connect):
    """Ten turns: each sends the rows of its own tokens, compressed, and no row twice."""
    client = connect(url)
    history, rows, sizes = prompt(20), 0, []
    for _ in range(10):
        answer = await client.generate(request(history, 10, session="ten", routes_from=rows), 20)
        assert (answer.routes.start, answer.routes.end) == (rows, len(history) + 9)
        sizes.append(len(encode(answer)))
        rows = answer.routes.end
        history = history + answer.ids + prompt(6)
    await client.release("ten")
    assert rows == len(history) - 7
    new = 16  # tokens a turn
    assert max(sizes[1:]) < 1.15 * min(sizes[1:]) and sizes[1] < new * (4 + 8 + 4 + 2) + 200
    many = await client.generate(request(prompt(21), 160, routes_from=0), 20)
    plain = many.routes.count * 2 * 2
    assert len(many.routes.rows) < 0.75 * plain  # 6 experts take less than 8 bits


async def counters(client) -> dict[str, float]:
    text = (await client._call("GET", "/metrics", 5)).decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.split("{")[0].removeprefix("stretto_engine_"): float(value) for name, value in pairs}
