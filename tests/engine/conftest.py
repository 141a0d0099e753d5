"""A tiny random checkpoint with a byte-level ChatML tokenizer, and real engine processes that serve it."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stretto.config import EngineConfig
from stretto.engine.client import EngineClient
from stretto.engine.server import serve
from stretto.model import checkpoint
from stretto.model.spec import ModelSpec

torch.set_num_threads(1)

SPEC = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=272,
    hidden_size=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    experts=6,
    experts_per_token=2,
    expert_size=16,
    norm_topk_prob=True,
    dense_layers=(1,),
    initializer_range=0.3,
)


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, plus the ChatML marks."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def make_checkpoint(folder: Path, seed: int) -> Path:
    checkpoint.save(checkpoint.random_init(SPEC, seed), folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the shared engine serves as version 0."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "nano", seed=1)


class Process:
    """A server in a process of its own, forked from here so that torch need not be imported again."""

    def __init__(self, model: Path, port: int = 0, slots: int = 12, max_tokens: int = 192, version: int = 0):
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        config = EngineConfig(slots=slots, max_tokens=max_tokens, prefill_tokens=256)
        arguments = (self.log, model, "e1", "127.0.0.1", port, config, version, None, 0)
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def address(self, seconds: float = 15.0) -> str:
        """Its URL, once it listens."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.is_alive():
            if found := re.search(r"http://\S+", self.log.read_text()):
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"the engine did not start: {self.log.read_text()}")

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, seconds: float = 10.0) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.log.unlink()


def _serve(log: Path, *arguments: Any) -> None:
    sys.stdout = sys.stderr = os.fdopen(os.open(log, os.O_WRONLY), "w", buffering=1)  # lives as long as the process
    serve(*arguments)


@contextmanager
def engine(model: Path, **options: int) -> Iterator[str]:
    """Gives the URL of a server, and demands a clean exit on SIGTERM."""
    process = Process(model, **options)
    try:
        yield process.address()
        process.terminate()
        assert process.wait() == 0, process.log.read_text()
    finally:
        process.close()


@pytest.fixture(scope="session")
def url(nano: Path) -> Iterator[str]:
    """One engine for all tests that leave its weights alone."""
    with engine(nano) as address:
        yield address


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], EngineClient]]:
    """Clients of engines, inside the test's event loop."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield lambda address: EngineClient(address, session)
