"""One rollout's OpenAI endpoint: a client of your own speaks to the policy, and what was sampled is recorded.

    POST /v1/chat/completions     streamed or not; any model name is taken
    GET  /v1/models

The tokens go into `conversations.py` as they were sampled, with their log-probs, versions and experts. How they are
sampled is the run's affair (temperature, top-p, top-k, seed): a policy trained under another distribution than it was
sampled from learns something else. What can't be honoured besides is a 400 naming it (`engine/completions.py`).

A streamed answer comes whole, in one piece, once the turn is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from stretto.config import HarnessConfig
from stretto.engine import completions
from stretto.engine.client import EngineError
from stretto.engine.contract import BadRequest
from stretto.engine.speech import Speech
from stretto.harness.conversations import Conversations, TooLong
from stretto.harness.ending import Ending
from stretto.harness.history import StreamError
from stretto.harness.speaker import Speaker

MODEL = "policy"
MAX_BODY = 16 << 20
READERS = 2
"""Requests whose bodies are read at once: what a box sends is held in our memory."""


class Gateway:
    """gateway = Gateway(speaker, conversations, config)
    await gateway.start()
    reader, writer = await gateway.connect()     # an HTTP connection, without a port on this machine
    await gateway.over                           # a budget has ended (Ending, sentence), or our engine failed
    await gateway.close()
    """

    def __init__(self, speaker: Speaker, conversations: Conversations, config: HarnessConfig):
        self.speaker, self.conversations, self.config = speaker, conversations, config
        self.over: asyncio.Future[tuple[Ending, str]] = asyncio.get_running_loop().create_future()
        self.turns = 0
        self.too_long = ""
        """What was said to the last request that did not fit; empty when one has fitted since."""
        self._reading, self._taking = asyncio.Semaphore(READERS), asyncio.Lock()
        self._speaking, self._spoken_seconds, self._since = 0, 0.0, time.monotonic()
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        await self._runner.setup()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        assert self._runner.server, "start() first"
        await asyncio.get_running_loop().connect_accepted_socket(self._runner.server, theirs)
        return await asyncio.open_unix_connection(sock=ours)

    async def close(self) -> None:
        await self._runner.cleanup()
        if not self.over.cancel() and not self.over.cancelled():
            self.over.exception()  # nobody need have asked for it

    @property
    def speaking_seconds(self) -> float:
        """Time in which the policy was asked to speak and had not finished."""
        return self._spoken_seconds + (time.monotonic() - self._since if self._speaking else 0.0)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(completions.models(MODEL))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            async with self._reading:
                body = completions.read(await request.read())
            message, finish, usage = await self._answer(body)
        except (EngineError, StreamError) as error:  # ours, so before what is wrong with the request
            if not self.over.done():
                self.over.set_exception(error)
            return _refused("the policy can't be reached", 503)
        except TooLong as error:
            self.too_long = str(error)
            return _refused(self.too_long, 400, "context_length_exceeded")
        except (BadRequest, ValueError, RecursionError) as error:
            return _refused(str(error), 400)
        except _Over as error:
            return _refused(str(error), 429, "insufficient_quota")  # which clients do not try again
        if body.stream:
            return await self._streamed(request, body, message, finish, usage)
        head = completions.head("chat.completion", body.model, None)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    async def _answer(self, body: completions.ChatRequest) -> tuple[dict[str, Any], str, dict[str, Any]]:
        """The policy's turn as a message, why it ended, what it took."""
        if body.logprobs:
            raise BadRequest("log-probs are recorded, not told; leave logprobs out")
        if body.limit is not None and body.limit < 1:
            raise BadRequest(f"max_tokens is {body.limit}; it must be at least 1")
        if self.turns >= self.config.max_turns:
            if not self.over.done():
                self.over.set_result((Ending.TURNS, f"no end within {self.turns} turns"))
            raise _Over(f"this rollout's {self.config.max_turns} turns are used up")
        async with self._taking:  # a long text takes the tokenizer a while, and others share this loop
            conversation = await asyncio.to_thread(self.conversations.take, body.plain(), body.offered)
        self.turns, self.too_long = self.turns + 1, ""
        history = conversation.history
        prompt, room = len(history), self.conversations.max_tokens - len(history)
        limit = min(room, self.config.max_turn_tokens, room if body.limit is None else body.limit)
        with self._asking():
            spoken = await self.speaker.speak(history, limit, conversation.number)
        self.conversations.hear(conversation, spoken)
        chat = self.conversations.chat
        speech = Speech(chat, stops=body.stops, hide=chat.format.opening if body.offered else "")
        speech.extend(spoken)
        content, attempts = speech.close()
        message = completions.spoken(content, attempts, body.offered)
        if not speech.stopped:  # else the client goes on from less than was sampled: in another segment
            self.conversations.told(conversation, message)
        ended = "stop" if speech.stopped or spoken[-1] in chat.ends else "length"
        finish = completions.finish(ended, attempts)
        return message, finish, completions.usage(prompt, len(spoken), 0)

    async def _streamed(
        self,
        request: web.Request,
        body: completions.ChatRequest,
        message: dict[str, Any],
        finish: str,
        usage: dict[str, Any],
    ) -> web.StreamResponse:
        head = completions.head("chat.completion.chunk", body.model, None)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await out.prepare(request)
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
        delta = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
        for piece, ended in ((delta, None), ({}, finish)):
            choice = {"index": 0, "delta": piece, "finish_reason": ended, "logprobs": None}
            await out.write(completions.sse({**head, "choices": [choice]}))
        if body.stream_options and body.stream_options.include_usage:
            await out.write(completions.sse({**head, "choices": [], "usage": usage}))
        await out.write(completions.DONE)
        return out

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        if self._speaking == 0:
            self._since = time.monotonic()
        self._speaking += 1
        try:
            yield
        finally:
            self._speaking -= 1
            self.speaker.waiting_for = "the client"
            if self._speaking == 0:
                self._spoken_seconds += time.monotonic() - self._since


class _Over(Exception):
    """The rollout has ended."""


def _refused(sentence: str, status: int, code: str | None = None) -> web.Response:
    return web.json_response(completions.error(sentence, status, code), status=status)
