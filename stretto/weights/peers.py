"""Those a follower talks to over HTTP: its engines, and the orchestrator. Whoever does not answer is named."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from stretto.records import EngineStatus, WeightsOrder, WeightsTaken, encode

UPDATE_SECONDS = 300.0
"""An engine must load and swap within this time, after it has drained."""
ANSWER_SECONDS = 5.0
"""Any other request must be answered within this time."""

log = logging.getLogger(__name__)


class Silent(RuntimeError):
    """Someone did not answer, or not with what was asked for; the sentence names them. Asked again soon."""


class Unreachable(Silent):
    """Nobody listens there."""


class Refused(Silent):
    """An engine said no to a version. Asked again later, or when there is another version."""


class Mistrusted(Refused):
    """An engine found that what it was given is not what was announced."""


class NoPatch(Silent):
    """An engine can't use a patch: it serves other weights than the patch starts from, or takes whole files only."""


class Peers:
    """Requests with deadlines. `orchestrator` None: engines are served, and nobody is told."""

    def __init__(self, session: aiohttp.ClientSession, orchestrator: str | None) -> None:
        self._session = session
        self._orchestrator = orchestrator.rstrip("/") if orchestrator else None

    async def health(self, engine: str) -> tuple[int | None, str | None]:
        """Version and fingerprint that the engine says it serves."""
        async with self._request("GET", engine, "/health", ANSWER_SECONDS) as (status, answer):
            if status != 200:
                raise Silent(f"engine {engine} answered /health with {status}: {_reason(answer)}")
            return answer.get("version"), answer.get("fingerprint")

    async def update(self, engine: str, order: WeightsOrder) -> WeightsTaken:
        body, headers = msgspec.json.encode(order), {"Content-Type": "application/json"}
        seconds = UPDATE_SECONDS + order.drain_seconds
        async with self._request("POST", engine, "/update_weights", seconds, data=body, headers=headers) as found:
            status, answer = found
            reason = f"engine {engine} refused version {order.version}"
            if status == 200:
                return msgspec.convert(answer, WeightsTaken)
            if status == 412:
                raise NoPatch(f"{reason} as a patch: {_reason(answer)}")
            if status == 409:
                raise Mistrusted(f"{reason}: {_reason(answer)}")
            raise Refused(f"{reason} with {status}: {_reason(answer)}")

    async def register(self, status: EngineStatus) -> None:
        if self._orchestrator is None:
            return
        async with self._request("POST", self._orchestrator, "/engine", ANSWER_SECONDS, data=encode(status)) as found:
            code, answer = found
            if code != 200:
                raise Silent(
                    f"orchestrator {self._orchestrator} refused engine {status.url} at version {status.version} "
                    f"with {code}: {_reason(answer)}"
                )

    async def leave(self, engine: str) -> None:
        if self._orchestrator is not None:
            async with self._request("DELETE", self._orchestrator, "/engine", ANSWER_SECONDS, params={"url": engine}):
                log.info("engine %s left", engine)

    @asynccontextmanager
    async def _request(
        self, method: str, base: str, path: str, seconds: float, **body: Any
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Status and JSON object (empty if the answer is something else). Silent if there is no answer."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, base + path, timeout=timeout, **body) as response:
                try:
                    answer = await response.json(content_type=None)
                except ValueError:
                    answer = {"error": (await response.text(errors="replace"))[:300]}
                result = response.status, answer if isinstance(answer, dict) else {}
        except TimeoutError:
            raise Silent(f"{base} did not answer {method} {path} within {seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"{base} cannot be reached for {method} {path}: {error}") from None
        except aiohttp.ClientError as error:
            raise Silent(f"{base} broke off {method} {path}: {error}") from None
        yield result


def _reason(answer: dict[str, Any]) -> str:
    return str(answer.get("error") or answer or "no reason given")
