"""Speculative decoding on and off, at batch 1: `measure`, which `stretto bench midtrain` calls.

    rounds, interleaved:   plain engine ─ with the head's guesses ─ with repeated text's guesses
    then, with the head:   10^5 tokens of one prompt, against the exact distribution of the network's definition

A case is a turn of the agent in a held-out task, the one after it has read the file, as far as its stop token. Time is
this process's CPU time of the passes that decode; beside it that of whole turns, their prompts included.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.config import EngineConfig
from stretto.engine import lookahead
from stretto.engine.runner import Runner, Serving
from stretto.engine.scheduler import Ended, Streamed
from stretto.harness.chat import Chat
from stretto.midtrain.demonstrator import careful
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.mtp import Heads
from stretto.model.transformer import Transformer
from stretto.records import GenerateRequest, Sampling
from stretto.tasks.repair import generate

REPEATED = 3
"""Guesses of repeated text in a pass: it does not know when it is wrong, so that more cost more than they save."""
CHAIN = 5
"""Tokens of each answer whose distribution is tested."""
EXPECTED = 5.0
"""Expected count below which the outcomes of a chi-square test are put together."""


@dataclass
class Side:
    """An engine, driven pass by pass in this thread."""

    name: str
    model: Transformer
    speculate: int
    heads: Heads | None = None
    events: list[Ended | Streamed] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = EngineConfig(slots=lookahead.SLOTS, speculate=self.speculate)  # so that many requests are guessed for
        self.runner = Runner(
            self.model, config, serving=Serving(0, ""), seed=0, deliver=self.events.extend, heads=self.heads
        )

    def answer(self, *requests: GenerateRequest) -> tuple[list[list[int]], float, float]:
        """The answers in order; CPU seconds of all passes, and of those that only decode."""
        self.events.clear()
        keys = [self.runner.submit(request) for request in requests]
        counters, whole, decoding = self.runner.counters, 0.0, 0.0
        while True:
            prefilled, start = counters.prefilled, time.process_time()
            more = self.runner.advance()
            spent = time.process_time() - start
            if not more:
                break
            whole += spent
            decoding += spent if counters.prefilled == prefilled else 0.0
        ended = {e.job.key: e.response.ids for e in self.events if isinstance(e, Ended) and e.response is not None}
        return [ended[key] for key in keys], whole, decoding


def measure(
    model_path: Path | str,
    guesses: int = 6,
    rounds: int = 5,
    tokens: int = 64,
    turns: int = 24,
    samples: int = 100_000,
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """What guessing ahead does at batch 1, with at most `guesses` of the head in a pass, or `REPEATED` of repeated
    text. `model_path` is a checkpoint with the shipped model's chat and tools.

    `spec_speedup` is the median over `rounds` of plain CPU time over CPU time with the head's guesses, for the same
    `turns` of at most `tokens` tokens; `spec_distribution_p` the p-value of `samples` tokens. Under `sides`, for the
    head and for repeats: tokens per second, share of guesses that came true, guesses and tokens per pass (those of
    prompts included), and `same_text`, whether every token was the plain engine's. Raises CheckpointError, and
    ValueError for a checkpoint without a head.
    """
    model, chat = checkpoint.load(model_path).requires_grad_(False), Chat(Path(model_path))
    heads = checkpoint.load_heads(model_path)
    if heads is None:
        raise ValueError(f"{model_path} has no head to guess with: `stretto midtrain heads --out DIR/mtp` teaches one")
    heads.requires_grad_(False)
    prompts = held_out(chat, turns, seed)
    plain = Side("plain", model, 0)
    others = [Side("heads", model, guesses, heads), Side("repeats", model, REPEATED)]
    speeds: dict[str, list[float]] = {side.name: [] for side in (plain, *others)}
    ratios: dict[str, list[float]] = {side.name: [] for side in others}
    whole: dict[str, list[float]] = {side.name: [] for side in others}
    same = dict.fromkeys(ratios, True)
    for number in range(-1, rounds):  # the first one is not counted
        asked = [_request(ids, tokens, temperature, number + 1, stop=chat.stop) for ids in prompts]
        found = {side.name: _alone(side, asked) for side in (plain, *others)}
        if number < 0:
            for side in others:
                side.runner.counters.guessed = side.runner.counters.guessed_right = 0
                side.runner.counters.passes = side.runner.counters.sampled = 0
            continue
        text, turn, base = found["plain"]
        speeds["plain"].append(_decoded(text) / base)
        for side in others:
            own, own_turn, seconds = found[side.name]
            speeds[side.name].append(_decoded(own) / seconds)
            ratios[side.name].append(base / seconds)
            whole[side.name].append(turn / own_turn)
            same[side.name] &= own == text
    counts = {side.name: replace(side.runner.counters) for side in others}
    p, counted, contexts = distribution(others[0], prompts[0], samples, temperature)
    return {
        "guesses": guesses,
        "temperature": temperature,
        "plain_tokens_per_s": statistics.median(speeds["plain"]),
        "sides": {
            side.name: {
                "tokens_per_s": statistics.median(speeds[side.name]),
                "speedup": statistics.median(ratios[side.name]),
                "whole_turn_speedup": statistics.median(whole[side.name]),
                "acceptance": _share(counts[side.name].guessed_right, counts[side.name].guessed),
                "guesses_per_pass": _share(counts[side.name].guessed, counts[side.name].passes),
                "tokens_per_pass": _share(counts[side.name].sampled, counts[side.name].passes),
                "same_text": same[side.name],
            }
            for side in others
        },
        "spec_speedup": statistics.median(ratios["heads"]),
        "spec_distribution_p": p,
        "distribution_tokens": counted,
        "distribution_contexts": contexts,
    }


def held_out(chat: Chat, count: int, seed: int) -> list[list[int]]:
    """Beginnings of transcripts of held-out tasks, each up to a turn of the agent after it has read the file."""
    rng, prompts = random.Random(seed), []
    for repair in itertools.islice(generate("heldout", seed), count):
        document = careful(repair, chat, rng)
        turns = [
            at
            for at in range(1, len(document.ids))
            if document.weights[at - 1] not in (0.0, 1.0) and document.weights[at] in (0.0, 1.0)
        ]
        prompts.append(document.ids[: turns[min(1, len(turns) - 1)]])
    return prompts


def distribution(side: Side, prompt: list[int], samples: int, temperature: float) -> tuple[float, int, int]:
    """p-value of the engine's tokens after one prompt, how many were counted, after how many different prefixes.

    In every prefix that came up often enough, the next tokens are counts of a multinomial of the distribution that the
    network's own definition gives; the sum of their chi-squares is one too.
    """
    seen: dict[tuple[int, ...], Counter[int]] = {}
    made, seed, guessed = 0, 0, side.runner.counters.guessed
    while made < samples:
        requests = [_request(prompt, CHAIN, temperature, 1_000_003 + seed + n) for n in range(64)]
        seed += len(requests)
        for ids in side.answer(*requests)[0]:
            made += len(ids)
            for n, token in enumerate(ids):
                seen.setdefault(tuple(ids[:n]), Counter())[token] += 1
    if side.speculate and side.runner.counters.guessed == guessed:
        raise RuntimeError("nothing was guessed, so that these tokens show nothing")
    statistic, freedom, counted, contexts = 0.0, 0, 0, 0
    for prefix, counts in seen.items():
        total = counts.total()
        if total < 20 * EXPECTED:
            continue
        p_V = _exact(side.model, [*prompt, *prefix], temperature)
        seen_V = np.zeros(len(p_V))
        for token, count in counts.items():
            seen_V[token] = count
        x, degrees = chi_square(seen_V, p_V * total)
        statistic, freedom, contexts, counted = statistic + x, freedom + degrees, contexts + 1, counted + total
    return chi_square_p(statistic, freedom), counted, contexts


def chi_square(seen: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; outcomes expected less than `EXPECTED` times count as one."""
    often = expected >= EXPECTED
    seen = np.append(seen[often], seen[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    if expected[-1] < EXPECTED:  # the rest is too rare for a class of its own
        least = int(expected[:-1].argmin())
        seen[least] += seen[-1]
        expected[least] += expected[-1]
        seen, expected = seen[:-1], expected[:-1]
    return float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1


def chi_square_p(statistic: float, freedom: int) -> float:
    """The chance of such a statistic or a larger one."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@torch.no_grad()
def _exact(model: Transformer, ids: list[int], temperature: float) -> np.ndarray:
    out = model(torch.tensor(ids), torch.arange(len(ids)), PackedCausal([len(ids)]))
    return torch.softmax(model.logits(out.hidden_TD[-1:]).double() / temperature, -1)[0].numpy()


def _request(ids: list[int], tokens: int, temperature: float, seed: int, stop: list[int] | None = None):
    return GenerateRequest(
        ids=ids, max_tokens=tokens, stop=stop or [], sampling=Sampling(temperature=temperature, seed=seed)
    )


def _alone(side: Side, requests: list[GenerateRequest]) -> tuple[list[list[int]], float, float]:
    """One request after the other: answers, CPU seconds of all passes, of those that only decode."""
    answers, whole, decoding = [], 0.0, 0.0
    for request in requests:
        ids, all_passes, later = side.answer(request)
        answers += ids
        whole, decoding = whole + all_passes, decoding + later
    return answers, whole, decoding


def _decoded(answers: list[list[int]]) -> int:
    """Tokens of passes that only decode: all but the first of each answer."""
    return sum(len(ids) - 1 for ids in answers)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
