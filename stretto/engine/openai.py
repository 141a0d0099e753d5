"""OpenAI's chat completions on the engine, so that any agent or client library can talk to a policy.

Messages and tools become ids through `harness.chat`, which also reads calls back: the same that training uses. It
imports nothing of this room, and `harness.loop` imports only `engine.client`, which imports nothing of the harness: the
two rooms use each other without a circle of modules.

A parameter that this engine does not honour is a 400 naming it, never ignored. Left out on purpose: several choices
(`n`), biased or penalised logits, forced tool calls, constrained formats, images, top log-probs.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from stretto.engine.contract import BadRequest, Engine, Fault, Token, Unavailable
from stretto.engine.speech import Speech
from stretto.harness.chat import Chat
from stretto.harness.parse import Attempt
from stretto.harness.toolset import typed
from stretto.records import GenerateRequest, GenerateResponse, Sampling

ONLY: dict[str, Any] = {
    "n": 1,
    "top_logprobs": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "parallel_tool_calls": True,
    "store": False,
    "response_format": {"type": "text"},
}
"""Parameters that clients send with these values; another value asks for something we don't do."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class Called(msgspec.Struct):
    function: CalledFunction
    id: str = ""


class ChatMessage(msgspec.Struct):
    """Clients echo whole answers back, so fields beyond these are let through."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters understood; those of `ONLY` in one value only."""

    model: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # not OpenAI's, but common among open engines
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    n: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    parallel_tool_calls: Any = None
    store: Any = None
    response_format: Any = None


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
        return web.json_response(
            {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "stretto"}]}
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = self._read(await request.read())
        generate = self._request(body)
        calls = bool(body.tools) and body.tool_choice != "none"
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        answer = Answer(Speech(self.chat, stops=stops, hide=self.chat.format.opening if calls else ""))
        if body.stream:
            return await self._streamed(request, body, generate, answer)
        if stops:
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
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if attempts else "")}
        if attempts:
            message["tool_calls"] = [_call(attempt, body.tools) for attempt in attempts]
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer, attempts), "logprobs": None}
        if body.logprobs:
            choice["logprobs"] = self._logprobs(answer.tokens)
        head = self._head("chat.completion")
        return web.json_response({**head, "choices": [choice], "usage": _usage(generate, answer)})

    async def _streamed(
        self, request: web.Request, body: ChatRequest, generate: GenerateRequest, answer: Answer
    ) -> web.StreamResponse:
        head = self._head("chat.completion.chunk")
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        logged = 0

        async def send(delta: dict[str, Any], finish: str | None = None) -> None:
            nonlocal logged
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            if body.logprobs and len(answer.tokens) > logged:
                choice["logprobs"] = self._logprobs(answer.tokens[logged:])
                logged = len(answer.tokens)
            await out.write(_sse({**head, "choices": [choice]}))

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
                await out.write(_sse(error_body(str(error), 500)))
                return out
        shown = answer.speech.shown
        content, attempts = answer.speech.close()
        if rest := content[shown:]:
            await send({"content": rest})
        for index, attempt in enumerate(attempts):
            await send({"tool_calls": [{"index": index, **_call(attempt, body.tools)}]})
        await send({}, _finish(answer, attempts))
        if body.stream_options and body.stream_options.include_usage:
            await out.write(_sse({**head, "choices": [], "usage": _usage(generate, answer)}))
        await out.write(b"data: [DONE]\n\n")
        return out

    def _read(self, data: bytes) -> ChatRequest:
        try:
            body = msgspec.json.decode(data, type=ChatRequest)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"the chat request can't be read: {error}") from None
        for name, value in ONLY.items():
            given = getattr(body, name)
            if given is not None and given != value:
                raise BadRequest(f"{name} = {given!r} is not supported by this engine; leave it out or send {value!r}")
        if body.tool_choice not in (None, "auto", "none"):
            raise BadRequest(
                f"tool_choice = {body.tool_choice!r} can't be honoured, because this engine does not constrain what is "
                "sampled; use 'auto' or 'none'"
            )
        if body.model != self.model:
            raise NoSuchModel(f"there is no model {body.model!r} here; this engine serves {self.model!r}")
        return body

    def _request(self, body: ChatRequest) -> GenerateRequest:
        messages = msgspec.to_builtins(body.messages)
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        try:
            ids = self.chat.messages(messages, body.tools if body.tool_choice != "none" else None)
        except (ValueError, KeyError) as error:
            raise BadRequest(f"the messages can't be rendered: {error}") from None
        slot = self.service.max_tokens
        if len(ids) >= slot:
            raise BadRequest(f"the prompt has {len(ids)} tokens, but a slot of this engine holds {slot}")
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        return GenerateRequest(
            ids=ids,
            max_tokens=slot - len(ids) if limit is None else limit,
            stop=self.chat.ends,
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=body.top_k or 0,
                seed=body.seed,
            ),
            routes_from=len(ids),
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": f"version-{self.service.version}",
        }

    def _logprobs(self, tokens: list[tuple[int, float]]) -> dict[str, Any]:
        entries = []
        for token, logprob in tokens:
            text = self.chat.decode([token])
            entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries}


class NoSuchModel(Exception):
    """404: the sentence names the model that is here."""


def error_body(sentence: str, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": sentence, "type": kind, "param": None, "code": status}}


def _call(attempt: Attempt, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    given = typed(attempt.arguments, attempt.name, tools or []) if attempt.spelled else attempt.arguments
    arguments = json.dumps(given, ensure_ascii=False)
    return {
        "id": attempt.id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": attempt.name, "arguments": arguments},
    }


def _finish(answer: Answer, attempts: list[Attempt]) -> str:
    return "tool_calls" if attempts and answer.finish == "stop" else answer.finish


def _usage(request: GenerateRequest, answer: Answer) -> dict[str, Any]:
    prompt, sampled = len(request.ids), len(answer.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
    }


def _sse(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"
