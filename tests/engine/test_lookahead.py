"""Pins: guessing ahead changes nothing but the time. Tokens, log-probs, routes and supports are those of the plain
engine for the same seed, whoever guesses; kept draws follow the sampler's exact distribution; nothing runs past a stop
token or a limit; a swap falls between two rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stretto.bench.speculation import Side, chi_square, chi_square_p, held_out
from stretto.config import EngineConfig, ModelConfig
from stretto.engine.drafter import Guesser, Repeats
from stretto.engine.guess import chance
from stretto.engine.lookahead import accepted, extended, narrowed
from stretto.engine.runner import Runner, Serving
from stretto.engine.sampler import kept as cut
from stretto.engine.sampler import sample, uniforms
from stretto.engine.scheduler import Ended, Plan, Streamed
from stretto.harness.chat import Chat
from stretto.model import checkpoint, mtp
from stretto.model.attention import PackedCausal
from stretto.model.numerics import Numerics
from stretto.model.rotary import rotary_angles
from stretto.model.transformer import Transformer
from stretto.records import GenerateRequest, GenerateResponse, Sampling

from ..model.test_deepseek import SPEC as DEEPSEEK
from .conftest import SPEC

SPECS = {"moe": SPEC, "dense": replace(SPEC, experts=0, experts_per_token=0, expert_size=0, dense_layers=())}


class Engine:
    """A runner that is driven pass by pass."""

    def __init__(self, model: Transformer, speculate: int, heads: mtp.Heads | None = None, slots: int = 6) -> None:
        config = EngineConfig(slots=slots, max_tokens=160, prefill_tokens=256, speculate=speculate)
        self.events: list[Ended | Streamed] = []
        self.runner = Runner(model, config, serving=Serving(0, ""), seed=0, deliver=self.events.extend, heads=heads)

    def answer(self, *requests: GenerateRequest, stream: bool = False) -> list[GenerateResponse]:
        self.events.clear()
        keys = [self.runner.submit(request, stream) for request in requests]
        while self.runner.advance():
            pass
        ended = {event.job.key: event.response for event in self.events if isinstance(event, Ended) and event.response}
        return [ended[key] for key in keys]


def request(ids: list[int], tokens: int = 40, stop: tuple[int, ...] = (), session: str = "", **sampling: Any):
    sampling = {"seed": 5} | sampling
    return GenerateRequest(ids=ids, max_tokens=tokens, stop=list(stop), sampling=Sampling(**sampling), session=session)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [np.tile(rng.integers(0, 256, 6), 4).tolist()[: 9 + 3 * n] for n in range(count)]


def network(name: str = "moe") -> Transformer:
    return checkpoint.random_init(replace(SPECS[name], initializer_range=0.12), 1).requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return network()


@pytest.fixture(scope="module")
def plain(model: Transformer) -> Engine:
    return Engine(model, 0)


@pytest.fixture(scope="module", params=["heads", "repeats"])
def ahead(request, model: Transformer) -> Engine:
    engine = Engine(model, 3, mtp.fresh(model) if request.param == "heads" else None)
    assert isinstance(engine.runner.drafter, Guesser if request.param == "heads" else Repeats)
    daring(engine)
    return engine


def daring(engine: Engine) -> None:
    """Have a head that was never taught, and so is never sure, guess all the same."""
    if isinstance(engine.runner.drafter, Guesser):
        engine.runner.drafter.ROW = engine.runner.drafter.FURTHER = 0.0


def same(one: GenerateResponse, other: GenerateResponse) -> None:
    assert (one.ids, one.finish) == (other.ids, other.finish)
    close = {"atol": 1e-5, "rtol": 0}
    np.testing.assert_allclose(np.frombuffer(one.logprobs, "<f4"), np.frombuffer(other.logprobs, "<f4"), **close)
    assert one.versions == other.versions
    assert one.routes == other.routes
    assert one.support == other.support


SETTINGS = [{"temperature": 0}, {}, {"temperature": 0.6}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 9}]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_answers_are_those_of_the_plain_engine(plain: Engine, ahead: Engine, sampling: dict) -> None:
    asked = [request(ids, 40, **sampling) for ids in prompts(3)]
    passes = ahead.runner.counters.passes
    for batch in ([asked[0]], asked, [*asked, request([7])]):
        for one, other in zip(ahead.answer(*batch), plain.answer(*batch), strict=True):
            same(one, other)
    assert ahead.runner.counters.passes > passes


def test_guesses_do_come_true(ahead: Engine, plain: Engine) -> None:
    """Without right guesses the tests of this file would show nothing."""
    before = ahead.runner.counters.passes, plain.runner.counters.passes
    for ids in prompts(3):
        same(ahead.answer(request(ids, 80, temperature=0))[0], plain.answer(request(ids, 80, temperature=0))[0])
    assert ahead.runner.counters.guessed_right > 0
    assert ahead.runner.counters.passes - before[0] < plain.runner.counters.passes - before[1]


def test_stop_tokens_limits_and_sessions_hold_inside_an_accepted_run(plain: Engine, ahead: Engine) -> None:
    ids = prompts(1)[0]
    free = plain.answer(request(ids, 60, temperature=0))[0].ids
    for at in range(0, 60, 7):
        wanted = request(ids, 60, stop=(free[at],), temperature=0)
        cut = ahead.answer(wanted)[0]
        assert (cut.ids, cut.finish) == (free[: free.index(free[at]) + 1], "stop")
    for tokens in range(1, 9):
        assert ahead.answer(request(ids, tokens, temperature=0))[0].ids == free[:tokens]
    history = list(ids)
    for turn in range(3):
        ask = request(history, 11, session="s", temperature=0.7)
        one, other = ahead.answer(ask)[0], plain.answer(ask)[0]
        same(one, other)
        assert not turn or one.cached == other.cached > 0
        history += [*one.ids, 3, 1, 4]


def test_streams_tell_each_token_once_and_in_order(ahead: Engine) -> None:
    response = ahead.answer(request(prompts(1)[0], 30, temperature=0), stream=True)[0]
    assert [event.token for event in ahead.events if isinstance(event, Streamed)] == response.ids


def test_routes_and_logprobs_are_those_of_the_whole_sequence_at_once(ahead: Engine, model: Transformer) -> None:
    ids = prompts(2)[1]
    response = ahead.answer(request(ids, 50))[0]
    whole = torch.tensor(ids + response.ids)
    with torch.no_grad():
        out = model(whole, torch.arange(len(whole)), PackedCausal([len(whole)]), capture=True)
        logp_NV = torch.log_softmax(model.logits(out.hidden_TD[len(ids) - 1 : -1]), -1)
    wanted = logp_NV.gather(1, whole[len(ids) :, None]).squeeze(1).numpy()
    np.testing.assert_allclose(np.frombuffer(response.logprobs, "<f4"), wanted, atol=3e-5, rtol=0)
    assert response.routes is not None and out.routes_TLK is not None
    routes = response.routes.open(whole[:-1].numpy().astype("<i4"), response.route_shape, response.route_bits)
    np.testing.assert_array_equal(routes, out.routes_TLK[:-1].numpy())


def test_a_swap_falls_between_two_rounds(model: Transformer) -> None:
    engine = Engine(network(), 3, mtp.fresh(model))
    daring(engine)
    runner, ids = engine.runner, prompts(1)[0]
    runner.submit(request(ids, 60, temperature=0))
    for _ in range(4):
        runner.advance()
    runner.standby.copy.take(runner.live)
    runner.exchange(Serving(1, "next"))
    while runner.advance():
        pass
    response = next(event.response for event in engine.events if isinstance(event, Ended))
    assert response is not None
    versions = np.frombuffer(response.versions, "<i4")
    assert set(versions.tolist()) == {0, 1} and (np.diff(versions) >= 0).all()
    assert response.ids == Engine(network(), 0).answer(request(ids, 60, temperature=0))[0].ids


@pytest.mark.parametrize("speculate", [0, 3])
def test_passes_of_few_rows_know_of_each_new_version(model: Transformer, speculate: int) -> None:
    """Their narrow weights are copies: after two swaps they lie where those of the first version were."""
    engine = Engine(network(), speculate, mtp.fresh(model))
    daring(engine)
    for version in (1, 2, 3):
        new = checkpoint.random_init(replace(SPEC, initializer_range=0.12), version + 1).requires_grad_(False)
        checkpoint.load_named(engine.runner.standby.model, checkpoint.named_tensors(new))
        engine.runner.exchange(Serving(version, ""))
        asked = request(prompts(1)[0], 20, temperature=0)
        assert engine.answer(asked)[0].ids == Engine(new, 0).answer(asked)[0].ids


@pytest.mark.parametrize("name", ["dense", "exact", "latent"])
def test_other_networks_guess_too(name: str) -> None:
    """Dense blocks have heads; exact numerics and latent attention repeat, and exact ones agree to the bit."""
    spec = {"dense": SPECS["dense"], "exact": SPEC, "latent": DEEPSEEK}[name]
    numerics = Numerics(rounding=True, exact=True) if name == "exact" else Numerics()
    model = checkpoint.random_init(replace(spec, initializer_range=0.12), 1, numerics=numerics).requires_grad_(False)
    heads = mtp.fresh(model) if name != "latent" else None
    engine, plain = Engine(model, 3, heads), Engine(model, 0)
    assert isinstance(engine.runner.drafter, Guesser if name == "dense" else Repeats)
    daring(engine)
    ids = [i % spec.vocab_size for i in prompts(3)[2]]
    for temperature in (0, 0.8):
        one, other = (e.answer(request(ids, 60, temperature=temperature))[0] for e in (engine, plain))
        same(one, other)
        assert name != "exact" or one.logprobs == other.logprobs
    assert engine.runner.counters.guessed > 0


def test_a_run_of_guesses_ends_where_it_is_not_likely_enough(model: Transformer, plain: Engine) -> None:
    """One more than are likely may be made, and none is worth a row that is less likely than that."""
    engine = Engine(model, 3, mtp.fresh(model))
    drafter, counters = engine.runner.drafter, engine.runner.counters
    assert isinstance(drafter, Guesser)
    for drafter.ROW, drafter.FURTHER, most in ((1.1, 1.1, 0), (0.0, 1.1, 1), (0.0, 0.0, 3)):
        guessed, passes = counters.guessed, counters.passes
        one, other = (e.answer(request(prompts(1)[0], 40))[0] for e in (engine, plain))
        same(one, other)
        guessed, passes = counters.guessed - guessed, counters.passes - passes
        assert guessed <= most * passes and (guessed > 0) == (most > 0)
        assert most < 2 or guessed > 1.5 * passes


def test_the_chance_of_a_guess_falls_towards_the_ends_of_its_stretch_and_with_doubt() -> None:
    assert chance(0.9, 0.4) > chance(0.9, 0.05) > chance(0.9, 0.0) == 0
    assert 1 > chance(0.9, 0.1) > chance(0.5, 0.1) > chance(0.2, 0.1) > 0


def test_the_shipped_head_guesses_on_the_shipped_model() -> None:
    """Turns of held-out tasks: more than two tokens a pass, and the plain engine's text."""
    folder = ModelConfig().folder
    model, chat, heads = checkpoint.load(folder).requires_grad_(False), Chat(folder), checkpoint.load_heads(folder)
    assert heads is not None and model.spec.mtp_layers == 0
    asked = [request(ids, 40, stop=tuple(chat.stop)) for ids in held_out(chat, 12, 5)]
    sides = [Side("plain", model, 0), Side("heads", model, 6, heads.requires_grad_(False))]
    answers = [[side.answer(one)[0][0] for one in asked] for side in sides]
    assert answers[0] == answers[1]
    counters = sides[1].runner.counters
    assert isinstance(sides[1].runner.drafter, Guesser)
    assert counters.guessed_right > 0.6 * counters.guessed
    assert counters.sampled - len(asked) > 2.2 * (counters.passes - len(asked))  # but for the prompts' passes


def plan(ids: list[int]) -> Plan:
    zero = np.zeros(1, np.int64)
    one = Plan([], zero, zero, np.array(ids[:1]), 1, [], zero, zero, zero + 1, [], 0)
    return extended(one, [ids[1:]])


def test_draws_count_up_to_the_first_that_differs_from_its_guess() -> None:
    stop_SV = np.zeros((1, 50), bool)
    row = plan([9, 1, 2, 3])
    good = np.zeros(4, np.float32)
    assert accepted(row, np.array([1, 2, 3, 4]), good, stop_SV).tolist() == [0, 1, 2, 3]
    assert accepted(row, np.array([1, 7, 3, 4]), good, stop_SV).tolist() == [0, 1]
    assert accepted(row, np.array([8, 2, 3, 4]), good, stop_SV).tolist() == [0]
    bad = np.array([0, np.nan, 0, 0], np.float32)
    assert accepted(row, np.array([1, 2, 3, 4]), bad, stop_SV).tolist() == [0, 1]
    stop_SV[0, 2] = True
    assert accepted(row, np.array([1, 2, 3, 4]), good, stop_SV).tolist() == [0, 1]
    kept = narrowed(row, np.array([0, 1]))
    assert (kept.ids_T.tolist(), kept.next_N.tolist(), kept.decoding) == ([9, 1], [1, 2], 2)


@pytest.mark.parametrize("sampling", [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.4, 1.0, 5)])
def test_1e5_accepted_and_corrected_tokens_follow_the_samplers_distribution(sampling: tuple) -> None:
    """Two tokens in a row of a Markov chain, guessed by a bad drafter that knows the uniforms: chi-square of the pairs
    that come out, p > 0.01."""
    temperature, top_p, top_k = sampling
    count, vocab = 100_000, 8
    generator = torch.Generator().manual_seed(3)
    chain_VV = torch.randn(vocab, vocab, generator=generator) * 1.5
    guesser_VV = chain_VV + torch.randn(vocab, vocab, generator=generator)

    def draw(logits_NV: torch.Tensor, uniform_N: np.ndarray) -> np.ndarray:
        full = np.full(count, temperature, np.float32), np.full(count, top_p), np.full(count, top_k)
        return sample(logits_NV, *full, uniform_N).ids_N

    seeds = np.arange(count)
    first, second = uniforms(seeds, np.full(count, 1)), uniforms(seeds, np.full(count, 2))
    guesses = draw(guesser_VV[:1].expand(count, -1), first)
    drawn = draw(chain_VV[:1].expand(count, -1), first), draw(chain_VV[guesses], second)
    right = drawn[0] == guesses
    assert 0.3 < right.mean() < 1
    # one slot per chain, in one plan: rows of token 0 and of its guess
    slots = np.arange(count)
    one = Plan([], slots, slots * 0, slots * 0, count, [], slots, slots, slots * 0 + 1, [], 0)
    ids_T = np.stack(drawn, 1).reshape(-1)
    kept = accepted(
        extended(one, guesses[:, None].tolist()), ids_T, np.zeros(2 * count), np.zeros((count, vocab), bool)
    )
    seconds = kept[kept % 2 == 1]
    np.testing.assert_array_equal(seconds // 2, np.flatnonzero(right))
    rest = draw(chain_VV[drawn[0]], second)  # what the next pass draws after a wrong guess, with the same uniform
    final = np.where(right, drawn[1], rest)
    chances = [np.zeros(vocab), np.zeros((vocab, vocab))]
    for row in range(vocab):
        scaled = chain_VV[row : row + 1] / temperature
        p = torch.softmax(scaled.masked_fill(~cut(scaled, top_p, top_k), -torch.inf), -1)[0].double().numpy()
        chances[1][row] = p
        if row == 0:
            chances[0] = p
    wanted = chances[0][:, None] * chances[1]
    seen = np.bincount(drawn[0] * vocab + final, minlength=vocab**2)
    wanted = wanted.reshape(-1) / wanted.sum() * count
    assert seen[wanted == 0].sum() == 0
    assert chi_square_p(*chi_square(seen, wanted)) > 0.01
    assert chi_square_p(*chi_square(np.roll(seen, 1), wanted)) < 0.01


@pytest.mark.parametrize("name", SPECS)
def test_the_compiled_head_guesses_what_its_definition_does(name: str) -> None:
    """The first of three greedy guesses, at every position of two answers of a session, beside another request; keys
    and values came with prompts and passes."""
    model = network(name)
    heads = mtp.fresh(model, seed=4)
    for name_, parameter in heads.named_parameters():
        if name_.endswith("norm.weight"):
            parameter.data.normal_(1.0, 0.3, generator=torch.Generator().manual_seed(1))
        else:
            parameter.data = parameter.data.bfloat16().float()  # as the engine takes matrices
    engine = Engine(model, 3, heads)
    daring(engine)
    drafter, told = engine.runner.drafter, []
    assert isinstance(drafter, Guesser)
    propose = drafter.propose

    def record(plan: Plan, scheduler, model) -> list[list[int]]:
        made = propose(plan, scheduler, model)
        told.extend(
            (int(position), guesses)
            for slot, position, guesses in zip(plan.slots_T, plan.positions_T, made, strict=True)
            if scheduler.active[slot].request.session
        )
        return made

    drafter.propose = record
    history = prompts(1)[0]
    for _ in range(2):  # the second turn goes on with the keys and values of the first
        asked = request(history, 30, temperature=0, session="s")
        history = history + engine.answer(asked, request([9, 8, 7], 5))[0].ids + [3, 1, 4]
    whole = torch.tensor(history)
    with torch.no_grad():
        hidden_TD = model(whole, torch.arange(len(whole)), PackedCausal([len(whole)])).hidden_TD
        for position, guesses in told:
            at = torch.arange(position)
            angles = rotary_angles(at, SPEC.rotary_dim, SPEC.rope_theta, torch.float32)
            embedded_TD = model.embed_tokens(whole[1 : position + 1])
            out_TD = heads.head(0).guess(embedded_TD, hidden_TD[:position], angles, PackedCausal([position]))
            if guesses:
                assert guesses[0] == int(model.logits(out_TD[-1:]).argmax())
    assert sum(len(guesses) > 0 for _, guesses in told) > 10
