"""OpenAI's chat completions on the engine, so that any agent or client library can talk to a policy.

Messages and tools become ids through `harness.chat`, which also reads calls back: the same that training uses. It
imports nothing of this room, and `harness.loop` imports only `engine.client`, which imports nothing of the harness: the
two rooms use each other without a circle of modules.

A parameter that this engine does not honour is a 400 naming it, never ignored (`completions.py`).
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from stretto.engine import completions
from stretto.engine.completions import ChatRequest, called, spoken, sse
from stretto.engine.contract import BadRequest, Engine, Fault, Token, Unavailable
from stretto.engine.speech import Speech
from stretto.harness.chat import Chat
from stretto.records import GenerateRequest, GenerateResponse, Sampling


@dataclass
class Answer:
    """One turn as it comes in: what was sampled, what of it is said, and why it ended."""

    speech: Speech
    tokens: list[tuple[int, float]] = field(default_factory=list)
    finish: str = "stop"
    cached: int = 0

    def take(self, event: Token | GenerateResponse) -> str:
        """Text that may be shown now. The response itself closes the turn."""
        if not isinstance(event, GenerateResponse):
            self.tokens.append((event.token, event.logprob))
            return self.speech.push(event.token)
        if event.finish == "aborted":
            raise Fault("the request was aborted in the engine")
        self.finish, self.cached = event.finish, event.cached
        return ""


class ChatEndpoint:
    """POST /v1/chat/completions and GET /v1/models for one model."""

    def __init__(self, service: Engine, chat: Chat, model: str):
        self.service, self.chat, self.model = service, chat, model

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(completions.models(self.model))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = self._read(await request.read())
        generate = self._request(body)
        answer = Answer(Speech(self.chat, stops=body.stops, hide=self.chat.format.opening if body.offered else ""))
        if body.stream:
            return await self._streamed(request, body, generate, answer)
        if body.stops:
            async with aclosing(self.service.stream(generate)) as events:
                async for event in events:
                    answer.take(event)
                    if answer.speech.stopped:
                        break
        else:
            response = await self.service.generate(generate)
            answer.tokens = list(zip(response.ids, np.frombuffer(response.logprobs, "<f4").tolist(), strict=True))
            answer.speech.extend(response.ids)
            answer.take(response)
        content, attempts = answer.speech.close()
        message, finish = spoken(content, attempts, body.tools), completions.finish(answer.finish, attempts)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        if body.logprobs:
            choice["logprobs"] = self._logprobs(answer.tokens)
        head = completions.head("chat.completion", self.model, self.service.version)
        return web.json_response({**head, "choices": [choice], "usage": _usage(generate, answer)})

    async def _streamed(
        self, request: web.Request, body: ChatRequest, generate: GenerateRequest, answer: Answer
    ) -> web.StreamResponse:
        head = completions.head("chat.completion.chunk", self.model, self.service.version)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        logged = 0

        async def send(delta: dict[str, Any], finish: str | None = None) -> None:
            nonlocal logged
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            if body.logprobs and len(answer.tokens) > logged:
                choice["logprobs"] = self._logprobs(answer.tokens[logged:])
                logged = len(answer.tokens)
            await out.write(sse({**head, "choices": [choice]}))

        async with aclosing(self.service.stream(generate)) as events:
            event = await anext(events)  # errors come before the first byte, with a status of their own
            await out.prepare(request)
            await send({"role": "assistant", "content": ""})
            try:
                while True:
                    if text := answer.take(event):
                        await send({"content": text})
                    if answer.speech.stopped or isinstance(event, GenerateResponse):
                        break
                    event = await anext(events)
            except (Fault, Unavailable) as error:
                await out.write(sse(completions.error(str(error), 500)))
                return out
        shown = answer.speech.shown
        content, attempts = answer.speech.close()
        if rest := content[shown:]:
            await send({"content": rest})
        for index, attempt in enumerate(attempts):
            await send({"tool_calls": [{"index": index, **called(attempt, body.tools)}]})
        await send({}, completions.finish(answer.finish, attempts))
        if body.stream_options and body.stream_options.include_usage:
            await out.write(sse({**head, "choices": [], "usage": _usage(generate, answer)}))
        await out.write(completions.DONE)
        return out

    def _read(self, data: bytes) -> ChatRequest:
        body = completions.read(data)
        if body.model != self.model:
            raise NoSuchModel(f"there is no model {body.model!r} here; this engine serves {self.model!r}")
        return body

    def _request(self, body: ChatRequest) -> GenerateRequest:
        try:
            ids = self.chat.messages(body.plain(), body.offered)
        except (ValueError, KeyError) as error:
            raise BadRequest(f"the messages can't be rendered: {error}") from None
        slot = self.service.max_tokens
        if len(ids) >= slot:
            raise BadRequest(f"the prompt has {len(ids)} tokens, but a slot of this engine holds {slot}")
        return GenerateRequest(
            ids=ids,
            max_tokens=slot - len(ids) if body.limit is None else body.limit,
            stop=self.chat.ends,
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=body.top_k or 0,
                seed=body.seed,
            ),
            routes_from=len(ids),
        )

    def _logprobs(self, tokens: list[tuple[int, float]]) -> dict[str, Any]:
        entries = []
        for token, logprob in tokens:
            text = self.chat.decode([token])
            entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries}


class NoSuchModel(Exception):
    """404: the sentence names the model that is here."""


def _usage(request: GenerateRequest, answer: Answer) -> dict[str, Any]:
    return completions.usage(len(request.ids), len(answer.tokens), answer.cached)
