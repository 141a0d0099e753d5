"""A tiny mixture of experts, and rollouts that it really produced: ids, log-probs, versions and routes of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from stretto.engine.sampler import kept
from stretto.model.attention import PackedCausal
from stretto.model.checkpoint import random_init
from stretto.model.logprobs import token_logprobs
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer
from stretto.records import (
    NOT_SAMPLED,
    Batch,
    BatchItem,
    Outcome,
    Rollout,
    RouteChunk,
    Segment,
    SupportChunk,
    encode,
)
from stretto.support import Support
from stretto.trainer.learner import geometry
from stretto.trainer.samples import Prepared, prepare

SPEC = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    experts=4,
    experts_per_token=2,
    expert_size=16,
    norm_topk_prob=True,
    tie_embeddings=True,
    initializer_range=0.3,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def spec() -> ModelSpec:
    return SPEC


@pytest.fixture
def model() -> Transformer:
    return random_init(SPEC, seed=0)


@torch.no_grad()
def play_segment(
    model: Transformer,
    rng: np.random.Generator,
    version: int,
    prompt: int,
    answer: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Segment:
    """Random prompt, two random "sampled" turns with an observation between; scored by the model as an engine would.
    Under top-p or top-k a token that was cut off counts as kept, as it is random."""
    observation = 2
    tokens = prompt + 2 * answer + observation
    ids = rng.integers(0, model.spec.vocab_size, tokens)
    sampled = np.zeros(tokens, bool)
    sampled[prompt : prompt + answer] = True
    sampled[prompt + answer + observation :] = True
    ids_T = torch.from_numpy(ids)
    output = model(ids_T, torch.arange(tokens), PackedCausal([tokens]), capture=True)
    support = None
    if top_p < 1 or top_k:
        kept_TV = kept(model.logits(output.hidden_TD[:-1]) / temperature, top_p, top_k)
        support = Support.of(kept_TV.scatter(1, ids_T[1:, None], True).numpy())
    logp, _ = token_logprobs(model, output.hidden_TD[:-1], ids_T[1:], temperature, support)
    logprobs = np.full(tokens, np.nan, "<f4")
    logprobs[sampled] = np.concatenate([[0.0], logp.numpy()])[sampled]
    routes = output.routes_TLK[:-1].numpy().astype("u1")  # the last token has not been through the network
    ids = ids.astype("<i4")
    turns = np.flatnonzero(sampled)[:answer], np.flatnonzero(sampled)[answer:]
    return Segment(
        ids=ids.tobytes(),
        logprobs=logprobs.tobytes(),
        versions=np.where(sampled, version, NOT_SAMPLED).astype("<i4").tobytes(),
        support=None if support is None else [_of(support, turn - 1) for turn in turns],
        routes=[RouteChunk.seal(0, ids[:-1], routes)],
        route_shape=model.spec.route_shape,
        route_bits=8,
    )


def _of(support: Support, tokens: np.ndarray) -> SupportChunk:
    return Support.of(support.mask(0, len(support))[tokens]).seal()


@dataclass
class Data:
    """A batch with its payloads in order."""

    batch: Batch
    rollouts: list[Rollout]

    @property
    def payloads(self) -> list[bytes]:
        return [encode(rollout) for rollout in self.rollouts]


@dataclass
class Maker:
    """Makes batches and prepares them for `model`."""

    model: Transformer
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def batch(
        self, version: int = 0, groups: int = 2, size: int = 4, segments: int = 1, sampled_by: int | None = None
    ) -> Data:
        sampled_by = version if sampled_by is None else sampled_by
        rollouts, items = [], []
        for group in range(groups):
            rewards = (np.arange(size) % 2).astype(float)
            for member in range(size):
                name = f"v{version}-g{group}-{member}"
                parts = [
                    play_segment(
                        self.model,
                        self.rng,
                        sampled_by,
                        *self.rng.integers(2, 12, 2),
                        self.temperature,
                        self.top_p,
                        self.top_k,
                    )
                    for _ in range(segments)
                ]
                rollouts.append(rollout(name, parts, reward=float(rewards[member])))
                items.append(
                    BatchItem(
                        rollout=name,
                        group=f"v{version}-g{group}",
                        key=f"rollouts/{name}.msgpack",
                        reward=float(rewards[member]),
                        advantage=float(rewards[member] - rewards.mean()),
                        oldest_version=sampled_by,
                    )
                )
        batch = Batch(
            run="test",
            version=version,
            items=items,
            groups=groups,
            rollouts=len(items),
            dropped_equal=0,
            solve_rate=0.5,
            staleness=[version - sampled_by] * len(items),
        )
        return Data(batch, rollouts)

    def prepare(self, data: Data, **changes: object) -> Prepared:
        truncated = self.top_p < 1 or self.top_k > 0
        defaults = {"max_staleness": 2, "replay": True, "normalizer": "constant", "budget": 64, "truncated": truncated}
        settings = {**defaults, **changes}
        return prepare(data.batch, data.payloads, geometry(self.model.spec), **settings)  # type: ignore[arg-type]


def rollout(name: str, segments: list[Segment], reward: float = 0.0) -> Rollout:
    return Rollout(
        id=name,
        group=name.rpartition("-")[0],
        task="t/0",
        purpose="train",
        outcome=Outcome.SCORED,
        reward=reward,
        rewards={"solved": reward},
        solved=reward > 0,
        segments=segments,
        calls=[],
        messages=[],
        turns=2,
        engine="http://engine",
        worker="w0",
        started=0.0,
        ended=1.0,
    )


@pytest.fixture
def maker(model: Transformer) -> Maker:
    return Maker(model)


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    return rollout
