"""What several rooms' tests share: the chat of the shipped tokenizer, and an engine peer that speaks a script.

The peer is a real HTTP server with the contract of `/generate`. It answers each request with the next turn of the
session's script, checks that histories only grow, and marks every route row with the token and position it belongs to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stretto.harness.chat import Chat
from stretto.records import GenerateRequest, GenerateResponse, RouteChunk, SupportChunk, decode, encode
from stretto.support import Support

L, K = 3, 2


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped tokenizer."""
    shipped = Path(str(resources.files("stretto") / "assets" / "nano"))
    if (shipped / "tokenizer.json").is_file():
        return shipped
    folder = tmp_path_factory.mktemp("tokenizer")
    _byte_level(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def chat(chat_folder: Path) -> Chat:
    return Chat(chat_folder)


class ScriptedEngine:
    """`script(request, turn)` gives what the policy says: text (the stop token follows) or token ids as they are."""

    def __init__(self, chat: Chat):
        self.chat = chat
        self.script: Callable[[GenerateRequest, int], str | list[int]] = lambda request, turn: ""
        self.turns: dict[str, int] = defaultdict(int)
        self.requests: dict[str, list[GenerateRequest]] = defaultdict(list)
        self.released: list[str] = []
        self.version = 7
        self.change: Callable[[GenerateResponse], GenerateResponse] = lambda response: response
        self.pause: Callable[[GenerateRequest], Awaitable[object]] | None = None
        self.url = ""

    def say(self, *turns: str | list[int]) -> None:
        """The same script for every session; its last turn is repeated."""
        self.script = lambda request, turn: turns[min(turn, len(turns) - 1)]

    @staticmethod
    def route_row(position: int, token: int) -> list[list[int]]:
        """The recognisable routes [L, K] of a token at a position."""
        return [[(position + token + 11 * layer + k) % 60 for k in range(K)] for layer in range(L)]

    def support(self, ids: list[int]) -> SupportChunk:
        """Each token was drawn from itself and its neighbours."""
        kept = np.zeros((len(ids), self.chat.vocab_size + 1), bool)
        for near in (-1, 0, 1):
            kept[np.arange(len(ids)), np.array(ids) + near] = True
        return Support.of(kept).seal()

    async def generate(self, http: web.Request) -> web.Response:
        request = decode(await http.read(), GenerateRequest)
        if self.pause is not None:
            await self.pause(request)
        earlier = self.requests[request.session]
        if earlier:
            assert request.ids[: len(earlier[-1].ids)] == earlier[-1].ids, "a history was rewritten"
        earlier.append(request)
        said = self.script(request, self.turns[request.session])
        self.turns[request.session] += 1
        ids = self.chat.encode(said) + self.chat.stop if isinstance(said, str) else said
        finish = "stop" if len(ids) <= request.max_tokens and ids[-1:] == self.chat.stop else "length"
        ids = ids[: request.max_tokens]
        history = request.ids + ids
        rows = [self.route_row(p, history[p]) for p in range(request.routes_from, len(history) - 1)]
        response = GenerateResponse(
            ids=ids,
            logprobs=np.linspace(-1, -0.1, len(ids), dtype="<f4").tobytes(),
            versions=np.full(len(ids), self.version, "<i4").tobytes(),
            support=self.support(ids) if request.sampling.truncated else None,
            routes=RouteChunk.seal(
                request.routes_from,
                np.array(history[request.routes_from : -1], "<i4"),
                np.array(rows, "u1").reshape(-1, L, K),
            ),
            route_shape=(L, K),
            route_bits=8,
            finish=finish,
            cached=0,
        )
        return web.Response(body=encode(self.change(response)), content_type="application/msgpack")

    async def release(self, http: web.Request) -> web.Response:
        self.released.append((await http.json())["session"])
        return web.json_response({})


@pytest.fixture
async def scripted_engine(chat: Chat) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(chat)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/release", engine.release)
    async with TestServer(app) as server:
        engine.url = str(server.make_url("")).rstrip("/")
        yield engine


def _byte_level(path: Path) -> None:
    """A byte-level BPE tokenizer with the ChatML tokens, for a checkout without the shipped one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['<tool_call>\n{"name": "read_file", "arguments": {}}\n</tool_call>'] * 9, trainer)
    tokenizer.save(str(path))
