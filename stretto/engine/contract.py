"""What an engine is to those who speak to it, whichever does the sampling: our own (`service`) or vLLM (`vllm`).

    server.py, openai.py  ──▶  Engine: generate, stream, update, pause, resume, release  ◀──  service.Service
                                                                                         ◀──  vllm.VllmService

Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from stretto.records import GenerateRequest, GenerateResponse, Sampling, WeightsOrder, WeightsTaken


class BadRequest(ValueError):
    """The request cannot be served here; the sentence says why. The user's mistake."""


class WeightsRefused(ValueError):
    """The weights are not what was promised; the sentence says how. The old ones go on serving."""


class WrongBase(ValueError):
    """A patch starts from weights that do not serve here; the sentence says which. A whole file will do."""


class Unavailable(Exception):
    """The engine can't serve now: no weights yet, or it is going down. The caller may try again later."""


class Fault(Exception):
    """The engine failed at a request that was in order."""


class Log(Protocol):
    def log(self, kind: str, **values: Any) -> None: ...


class Token(Protocol):
    """A sampled token as a stream gives it."""

    @property
    def token(self) -> int: ...
    @property
    def logprob(self) -> float: ...


class Gauge(NamedTuple):
    """A line of /metrics; `kind` is what Prometheus calls it."""

    name: str
    kind: str
    text: str
    value: float


@dataclass(frozen=True)
class Status:
    """What /health says."""

    version: int | None
    fingerprint: str
    paused: bool
    slots: int
    active: int
    waiting: int
    sessions: int


class Engine(Protocol):
    """Lives in one event loop."""

    broken: asyncio.Future[None]
    """Fails when the engine has failed for good: nothing will be served again."""

    @property
    def version(self) -> int | None:
        """Policy version that samples now; None before the first weights."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of one sequence, prompt and answer together."""
        ...

    def status(self) -> Status: ...

    def gauges(self) -> list[Gauge]:
        """Beside those of `status`."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """The whole turn. Cancelling it takes the request out. Raises BadRequest, Unavailable, Fault."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Token | GenerateResponse, None]:
        """Each token as it is sampled, then the response. Closing the iterator takes the request out."""
        ...

    async def update(self, order: WeightsOrder) -> WeightsTaken:
        """Load or patch, verify and swap. Raises WeightsRefused and, for a patch, WrongBase, after which the old
        version serves as before. Repeating the version that serves is a no-op."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def release(self, session: str) -> None: ...

    async def close(self) -> None: ...


def check_request(request: GenerateRequest, vocab_size: int, max_tokens: int) -> None:
    """Raise BadRequest with a sentence for what no engine of this size can do."""
    ids = request.ids
    if not ids:
        raise BadRequest("ids is empty: give at least one token to continue from")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BadRequest(f"ids holds a token outside the vocabulary of {vocab_size}")
    if request.max_tokens < 1:
        raise BadRequest(f"max_tokens is {request.max_tokens}; it must be at least 1")
    if len(ids) + request.max_tokens > max_tokens:
        raise BadRequest(
            f"{len(ids)} prompt tokens and max_tokens {request.max_tokens} do not fit a slot of {max_tokens} tokens: "
            "shorten the prompt, lower max_tokens, or raise engine.max_tokens"
        )
    if any(not 0 <= token < vocab_size for token in request.stop):
        raise BadRequest(f"stop holds a token outside the vocabulary of {vocab_size}")
    if not 0 <= request.routes_from <= len(ids):
        raise BadRequest(f"routes_from is {request.routes_from}, but the history has {len(ids)} tokens")
    check_sampling(request.sampling)


def check_sampling(sampling: Sampling) -> None:
    """Raise BadRequest for a distribution that does not exist."""
    if not 0 <= sampling.temperature <= 100:
        raise BadRequest(f"temperature is {sampling.temperature}; it must lie between 0 (greedy) and 100")
    if not 0 < sampling.top_p <= 1:
        raise BadRequest(f"top_p is {sampling.top_p}; it must lie above 0 and at most at 1")
    if sampling.top_k < 0:
        raise BadRequest(f"top_k is {sampling.top_k}; 0 keeps all tokens")
