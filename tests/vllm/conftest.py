"""A tiny random Qwen3-MoE in several versions, and a real vLLM that serves it; `make test-vllm` installs one.

The engine starts once. It and its tests share one event loop, so that a test can also look behind the HTTP face.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stretto.config import EngineConfig
from stretto.engine.client import EngineClient
from stretto.engine.fit import fitting
from stretto.engine.standby import model_fingerprint
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.spec import ModelSpec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

torch.set_num_threads(1)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

TOLERANCE = 1e-4
"""Between two float32 forward passes that add in different orders, in nats."""

SPEC = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=272,
    hidden_size=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate_size=64,
    experts=6,
    experts_per_token=2,
    expert_size=32,
    norm_topk_prob=True,
    dense_layers=(1,),
    initializer_range=0.2,
)


@dataclass
class Version:
    """Weights, as a file for the engine and as a network for us."""

    path: Path
    fingerprint: str
    model: checkpoint.Transformer

    @torch.no_grad()
    def logprobs(self, history: list[int], ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """What the trainer's forward says of `ids` after `history`."""
        whole = torch.tensor(history + ids)
        out = self.model(whole, torch.arange(len(whole)), PackedCausal([len(whole)]))
        hidden = out.hidden_TD[len(history) - 1 : -1]
        return token_logprobs(self.model, hidden, torch.tensor(ids), temperature)[0].numpy()


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, plus the ChatML marks."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def version_of(model: checkpoint.Transformer, folder: Path) -> Version:
    checkpoint.save(model, folder)
    write_tokenizer(folder)
    return Version(folder / "model.safetensors", model_fingerprint(model), model)


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    root = tmp_path_factory.mktemp("versions")
    return [version_of(checkpoint.random_init(SPEC, seed), root / f"v{seed}") for seed in range(3)]


@dataclass
class Served:
    """The engine: by HTTP, and from inside."""

    client: EngineClient
    service: Any

    async def update(self, version: int, weights: Version, **other: str) -> dict[str, Any]:
        """Status and answer of /update_weights."""
        body = {"version": version, "path": str(weights.path), "fingerprint": weights.fingerprint, **other}
        async with self.client._session.post(f"{self.client.url}/update_weights", json=body) as answer:
            return {"status": answer.status, **json.loads(await answer.read())}

    async def post(self, path: str) -> None:
        await self.client._call("POST", path, 20)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(versions: list[Version]) -> AsyncIterator[Served]:
    from stretto.engine import vllm
    from stretto.engine.server import build_app

    config = EngineConfig(backend="vllm", routes="unknown", slots=8, max_tokens=384, prefill_tokens=256)
    folder = versions[0].path.parent
    spec, chat = fitting(folder, config)
    service = await vllm.start(folder, spec, config, version=-1, seed=0, name="e1", metrics=None)
    async with (
        TestServer(build_app(service, chat, "e1", "tiny"), handler_cancellation=True) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Served(EngineClient(str(server.make_url("")), session), service)
    await service.close()
