"""Random ragged schedules: does the engine say the very log-probs that the trainer computes?

Each schedule is another life of one engine: prompts of random lengths, some of which share a prefix, arriving between
passes, cut into chunks of a random budget, decoded together, some going on for a second turn in their KV cache. What
was sampled then goes through the trainer's own packing, in micro-batches of a random size, with and without replay.

    agreement = exactness(folder, schedules=1000, seed=0)
    agreement.max_abs_dlogp   # 0.0 where `exact` holds
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stretto.config import EngineConfig
from stretto.engine.runner import Events, Runner, Serving
from stretto.engine.scheduler import Ended
from stretto.model import checkpoint
from stretto.model.logprobs import token_logprobs
from stretto.model.numerics import Numerics
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer
from stretto.records import GenerateRequest, GenerateResponse, Sampling
from stretto.support import Support
from stretto.trainer.packing import pack
from stretto.trainer.samples import Sample

SLOTS, SLOT_TOKENS = 7, 160
BUDGETS = (1, 7, 16, 50, 200)
TEMPERATURES = (1.0, 0.7)
EXACT = Numerics(exact=True)


@dataclass(frozen=True)
class Agreement:
    """How far trainer and engine were apart."""

    max_abs_dlogp: float
    rows_differing: int  # (token, MoE layer) rows of the trainer without replay that used other experts
    schedules: int
    tokens: int  # sampled ones, whose log-probs were compared


def exactness(source: ModelSpec | Path, schedules: int, seed: int, numerics: Numerics = EXACT) -> Agreement:
    """Compare engine and trainer of one network, from a checkpoint folder or with random weights of `source`."""
    if isinstance(source, ModelSpec):
        engine, trainer = (checkpoint.random_init(source, seed, numerics=numerics) for _ in range(2))
    else:
        engine, trainer = (checkpoint.load(source, numerics=numerics) for _ in range(2))
        for model in (engine, trainer):
            _round_weights(model)
    rng = np.random.default_rng(seed)
    answers: list[Ended] = []

    def deliver(events: Events) -> None:
        answers.extend(event for event in events if isinstance(event, Ended))

    config = EngineConfig(slots=SLOTS, max_tokens=SLOT_TOKENS)
    runner = Runner(engine, config, serving=Serving(0, ""), seed=seed, deliver=deliver)
    largest, rows, tokens = 0.0, 0, 0
    for number in range(schedules):
        answers.clear()
        temperature = float(rng.choice(TEMPERATURES))
        _live(runner, rng, temperature, number, answers)
        assert all(ended.response is not None for ended in answers), [ended.error for ended in answers]
        samples = [_sample(ended, engine.spec) for ended in answers]
        dlogp, differing = _compare(trainer, samples, temperature, rng)
        largest, rows = max(largest, dlogp), rows + differing
        tokens += sum(len(sample.targets_N) for sample in samples)
    return Agreement(largest, rows, schedules, tokens)


def _live(runner: Runner, rng: np.random.Generator, temperature: float, number: int, answers: list[Ended]) -> None:
    """One schedule, until every request has ended."""
    runner.scheduler.prefill_tokens = int(rng.choice(BUDGETS))
    vocab = runner.model.spec.vocab_size
    shared = rng.integers(0, vocab, 40).tolist()
    turns = 0
    for request in range(int(rng.integers(1, 7))):
        prompt = rng.integers(0, vocab, int(rng.integers(1, 60))).tolist()
        if rng.random() < 0.4:
            prompt = [*shared[: int(rng.integers(20, 41))], *prompt[:20]]
        session = f"{number}-{request}" if rng.random() < 0.3 else ""
        _ask(runner, rng, prompt, session, temperature)
        turns += 1
        for _ in range(int(rng.integers(0, 3))):
            runner.advance()
    went_on = 0
    while len(answers) < turns:
        busy = runner.advance()
        assert busy or len(answers) == turns, "the engine has nothing to do, but not every request has ended"
        for ended in answers[went_on:]:
            went_on += 1
            request, response = ended.job.request, ended.response
            if request.session and response is not None and len(request.ids) < SLOT_TOKENS // 2:
                observation = rng.integers(0, vocab, int(rng.integers(1, 12))).tolist()
                _ask(runner, rng, [*request.ids, *response.ids, *observation], request.session, temperature)
                turns += 1


def _ask(runner: Runner, rng: np.random.Generator, ids: list[int], session: str, temperature: float) -> None:
    top_p = float(rng.choice((1.0, 0.9)))
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=int(rng.integers(1 << 30)))
    count = int(rng.integers(1, 8))
    runner.submit(GenerateRequest(ids=ids, max_tokens=count, stop=[], sampling=sampling, session=session))


def _sample(ended: Ended, spec: ModelSpec) -> Sample:
    request, response = ended.job.request, ended.response
    assert response is not None
    ids_T = np.array([*request.ids, *response.ids], np.int64)
    count = len(response.ids)
    return Sample(
        rollout="",
        ids_T=ids_T[:-1],
        routes_TLK=_routes(response, ids_T[:-1]),
        route_ids_T=ids_T[:-1] if spec.moe_layers else None,
        support=_support(response, count, spec.vocab_size),
        predict_N=np.arange(len(request.ids) - 1, len(ids_T) - 1),
        targets_N=ids_T[-count:],
        behaviour_N=np.frombuffer(response.logprobs, "<f4"),
        versions_N=np.zeros(count, np.int32),
        advantage=1.0,
        share=1.0,
    )


def _routes(response: GenerateResponse, ids_T: np.ndarray) -> np.ndarray | None:
    if response.routes is None:
        return None
    return response.routes.open(ids_T, response.route_shape, response.route_bits).astype(np.int64)


def _support(response: GenerateResponse, count: int, vocab: int) -> Support:
    """All samples of a micro-batch have one or none does; the whole vocabulary where nothing was cut off."""
    if response.support is not None:
        return Support.open(response.support)
    return Support.of(np.ones((count, vocab), bool))


def _compare(
    trainer: Transformer, samples: list[Sample], temperature: float, rng: np.random.Generator
) -> tuple[float, int]:
    """The largest difference, and the rows that were routed otherwise when nothing was replayed."""
    largest, differing = 0.0, 0
    for micro in pack(samples, budget=int(rng.integers(50, 500))):
        for routes_TLK in {False: [None], True: [None, micro.routes_TLK]}[micro.routes_TLK is not None]:
            out = trainer(micro.ids_T, micro.positions_T, micro.attend, routes_TLK, capture=True, replay_ratio=0.8)
            hidden_ND = out.hidden_TD[micro.predict_N]
            logp_N, _ = token_logprobs(trainer, hidden_ND, micro.targets_N, temperature, micro.support)
            largest = max(largest, float((logp_N.detach() - micro.behaviour_N).abs().max()))
            if routes_TLK is None and micro.routes_TLK is not None:
                differing += int((out.routes_TLK != micro.routes_TLK).any(-1).sum())
    return largest, differing


@torch.no_grad()
def _round_weights(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
