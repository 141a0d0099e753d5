"""A worker's line to the orchestrator: every message is repeated until it is answered, up to a deadline."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import msgspec

from stretto.records import Lease, Receipt, encode

NO_LEASES = msgspec.msgpack.encode([])


class OrchestratorGone(RuntimeError):
    """The orchestrator has not answered for too long; the sentence names it."""


class OrchestratorRefused(RuntimeError):
    """The orchestrator answered that our message is wrong; the sentence says why."""


class Link:
    """Messages of one worker. All methods raise OrchestratorGone after `patience` seconds without an answer."""

    def __init__(self, url: str, worker: str, session: aiohttp.ClientSession, patience: float = 60.0):
        self.url = url.rstrip("/")
        self.worker = worker
        self.patience = patience
        self._session = session
        self._leases = msgspec.msgpack.Decoder(list[Lease])

    async def lease(self, slots: int) -> list[Lease]:
        """At most `slots` leases; may be empty (the orchestrator long-polls for about a second)."""
        body = msgspec.json.encode({"worker": self.worker, "slots": slots})
        return self._leases.decode(await self._post("/lease", body) or NO_LEASES)

    async def receipt(self, receipt: Receipt) -> bool:
        """Hand in a receipt. False: the orchestrator does not know the rollout (any more), and it is dropped."""
        return await self._post("/receipt", encode(receipt), unknown_is_fine=True) is not None

    async def heartbeat(self, held: list[str]) -> None:
        """Say that we live and which rollouts we are at; others leased to this name go to somebody else."""
        body = msgspec.json.encode({"worker": self.worker, "rollouts": held})
        await self._post("/heartbeat", body, unknown_is_fine=True)

    async def _post(self, path: str, body: bytes, unknown_is_fine: bool = False) -> bytes | None:
        """The answer's body, or None for a 404 where that is fine."""
        deadline = time.monotonic() + self.patience
        pause = 0.05
        kind = "application/json" if body[:1] == b"{" else "application/msgpack"
        while True:
            try:
                timeout = aiohttp.ClientTimeout(total=10.0)
                headers = {"Content-Type": kind}
                async with self._session.post(self.url + path, data=body, headers=headers, timeout=timeout) as answer:
                    data = await answer.read()
                    if answer.status < 400:
                        return data
                    if answer.status == 404 and unknown_is_fine:
                        return None
                    problem = f"{answer.status}: {data.decode(errors='replace').strip()[:300]}"
                    if answer.status < 500:
                        raise OrchestratorRefused(f"the orchestrator at {self.url} refused {path} with {problem}")
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise OrchestratorGone(
                    f"the orchestrator at {self.url} has not answered {path} for {self.patience:g} s ({problem})"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
