"""How a worker talks to an engine: token ids in, token ids out, over HTTP."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec

from stretto.records import GenerateRequest, GenerateResponse, decode, encode

HEALTH_SECONDS = 10.0
"""Time an engine has to answer anything but /generate."""


class EngineError(RuntimeError):
    """The engine did not do it; the sentence names its URL and the reason. `status` is the HTTP status, 0 if none
    came."""

    def __init__(self, sentence: str, status: int = 0):
        super().__init__(sentence)
        self.status = status


class EngineClient:
    """One engine. Cheap to make; `session` carries the connections."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.url = url.rstrip("/")
        self._session = session

    async def generate(self, request: GenerateRequest, timeout: float) -> GenerateResponse:
        """One turn within `timeout` seconds. Cancelling the call takes the request out of the engine."""
        data = await self._call("POST", "/generate", timeout, data=encode(request))
        try:
            return decode(data, GenerateResponse)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url} answered /generate with something else than a response: {error}") from None

    async def health(self) -> dict[str, Any]:
        return json.loads(await self._call("GET", "/health", HEALTH_SECONDS))

    async def release(self, session: str) -> None:
        """The session is over; its KV slot may go to others."""
        await self._call("POST", "/release", HEALTH_SECONDS, json={"session": session})

    async def _call(self, method: str, path: str, timeout: float, **body: Any) -> bytes:
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, self.url + path, timeout=limit, **body) as answer:
                data = await answer.read()
        except TimeoutError:
            raise EngineError(f"{self.url} did not answer {path} within {timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.url} can't be reached for {path}: {error}") from None
        if answer.status != 200:
            raise EngineError(f"{self.url} refused {path} ({answer.status}): {_sentence(data)}", answer.status)
        return data


def _sentence(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace") or "no reason given"
