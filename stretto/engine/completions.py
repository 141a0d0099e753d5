"""OpenAI's chat completions as data: what a request may hold, and how an answer is spelled.

Used by the engine's endpoint (`openai.py`) and by the recording one of a rollout (`harness/gateway.py`). A parameter
that can't be honoured is a BadRequest naming it, never ignored. Left out on purpose: several choices (`n`), biased or
penalised logits, forced tool calls, constrained formats, images, top log-probs.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from stretto.engine.contract import BadRequest
from stretto.harness.parse import Attempt
from stretto.harness.toolset import typed

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

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the policy is shown."""
        return self.tools if self.tool_choice != "none" else None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def plain(self) -> list[dict[str, Any]]:
        """The messages as dicts, `developer` as `system`."""
        messages = msgspec.to_builtins(self.messages)
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        return messages


def read(data: bytes) -> ChatRequest:
    """Raises BadRequest with a sentence for what isn't a request, or asks for what we don't do."""
    try:
        body = msgspec.json.decode(data, type=ChatRequest)
    except msgspec.MsgspecError as problem:
        raise BadRequest(f"the chat request can't be read: {problem}") from None
    if not body.messages:
        raise BadRequest("messages is empty: give at least one")
    for name, value in ONLY.items():
        given = getattr(body, name)
        if given is not None and given != value:
            raise BadRequest(f"{name} = {given!r} is not supported by this engine; leave it out or send {value!r}")
    if "" in body.stops:
        raise BadRequest("stop holds an empty text, which would end every answer")
    if body.tool_choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice = {body.tool_choice!r} can't be honoured, because this engine does not constrain what is "
            "sampled; use 'auto' or 'none'"
        )
    return body


def models(name: str) -> dict[str, Any]:
    """The answer of GET /v1/models."""
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "stretto"}]}


def head(kind: str, model: str, version: int | None) -> dict[str, Any]:
    """What every answer, and every piece of a stream, begins with; `kind` is `chat.completion` or that of a chunk."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"version-{version}",
    }


def spoken(content: str, attempts: Sequence[Attempt], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The assistant's message: its text, and the calls that parsed."""
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if attempts else "")}
    if attempts:
        message["tool_calls"] = [called(attempt, tools) for attempt in attempts]
    return message


def called(attempt: Attempt, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """An entry of `tool_calls`."""
    given = typed(attempt.arguments, attempt.name, tools or []) if attempt.spelled else attempt.arguments
    arguments = json.dumps(given, ensure_ascii=False)
    return {
        "id": attempt.id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": attempt.name, "arguments": arguments},
    }


def finish(engine: str, attempts: Sequence[Attempt]) -> str:
    """`finish_reason`; `engine` is the engine's word for it."""
    return "tool_calls" if attempts and engine == "stop" else engine


def usage(prompt: int, sampled: int, cached: int) -> dict[str, Any]:
    """Token counts; `cached` of the prompt's were not computed again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def error(sentence: str, status: int, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": sentence, "type": kind, "param": None, "code": code or status}}


def sse(payload: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
