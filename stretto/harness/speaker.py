"""Turns from an engine into a history: one request after another until the turn is over, wherever the engine lives.

What an engine breaks off (a swap of weights that doesn't wait) goes on from its last token, within the same limit. An
engine that fails, or takes too long for a turn, is left for another one, which gets the whole history with the next
request, as every request holds it.

Of the engine's room only `client.py` is used, which imports nothing of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import msgspec

from stretto.engine.client import EngineClient, EngineError
from stretto.harness.chat import Chat
from stretto.harness.history import History, StreamError
from stretto.records import GenerateRequest, GenerateResponse, Lease, Sampling

MAX_ABORTS = 8
"""Times the engine may break off one turn."""
RELEASE_SECONDS = 2.0


Elsewhere = Callable[[EngineClient], Awaitable[EngineClient]]
"""From the engine that failed to the one to go on with. Raises EngineError when there is none."""


class Speaker:
    """Speaks for the policy in one rollout.

    speaker = Speaker(lease, engine, chat)
    spoken = await speaker.speak(history, limit=96)     # sampled ids, which `history` has taken
    await speaker.release()
    """

    def __init__(
        self, lease: Lease, engine: EngineClient, chat: Chat, elsewhere: Elsewhere | None, turn_seconds: float
    ):
        """Without `elsewhere` an engine that fails, or takes longer than `turn_seconds` for a turn, is the end."""
        self.lease, self.engine, self.chat = lease, engine, chat
        self._elsewhere, self._turn_seconds = elsewhere, turn_seconds
        self._sessions = {lease.rollout}
        self.waiting_for = "nothing"

    async def speak(self, history: History, limit: int, segment: int = 0) -> list[int]:
        """One assistant turn of at most `limit` tokens. `segment` is the history's number in the rollout: each has its
        own keys and values in the engine, and its own draws. Raises StreamError, EngineError."""
        session, sampling = self._of(segment)
        self._sessions.add(session)
        spoken: list[int] = []
        for _ in range(MAX_ABORTS):
            request = GenerateRequest(
                ids=history.ids,
                max_tokens=limit - len(spoken),
                stop=self.chat.ends,
                sampling=sampling,
                session=session,
                routes_from=history.rows,
            )
            response = await self._generate(request)
            if len(response.ids) > request.max_tokens:
                raise StreamError(
                    f"the engine sampled {len(response.ids)} tokens where {request.max_tokens} were asked"
                )
            history.take(response)
            spoken += response.ids
            if spoken and (response.finish != "aborted" or spoken[-1] in self.chat.ends or len(spoken) == limit):
                return spoken
            if response.finish != "aborted":
                raise StreamError(f"the engine sampled nothing and calls that {response.finish!r}")
        raise StreamError(f"the engine broke off a turn of {session} {MAX_ABORTS} times")

    async def release(self) -> None:
        """Give the KV cache back; an engine that does not answer drops its idle sessions by itself."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                await asyncio.gather(*(self.engine.release(session) for session in sorted(self._sessions)))

    def _of(self, segment: int) -> tuple[str, Sampling]:
        """The engine's session of a segment, and its sampling."""
        rollout, sampling = self.lease.rollout, self.lease.sampling
        if segment == 0:
            return rollout, sampling
        seed = None if sampling.seed is None else (sampling.seed + segment * 0x9E3779B1) % (1 << 31)
        return f"{rollout}/{segment}", msgspec.structs.replace(sampling, seed=seed)

    async def _generate(self, request: GenerateRequest) -> GenerateResponse:
        while True:
            engine = self.engine
            self.waiting_for = f"{engine.url} to speak"
            seconds = min(self._turn_seconds, max(self.lease.deadline - time.time(), 0.1))
            try:
                return await engine.generate(request, timeout=seconds)
            except EngineError as error:
                if self._elsewhere is None or error.status == 400:  # a bad request is bad everywhere
                    raise
                if engine is self.engine:  # else another turn of this rollout has moved it already
                    self.waiting_for = f"an engine to go on with, as {error}"
                    self.engine = await self._elsewhere(engine)
