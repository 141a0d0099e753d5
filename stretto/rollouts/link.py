"""A worker's line to the orchestrator: every message is repeated until it is answered, up to a deadline.

Lease requests are counted, so that a repeated one is answered alike, and heartbeats say which of them was answered last
(`handover.py`).
"""

from __future__ import annotations

import asyncio
import time

import aiohttp
import msgspec

from stretto.records import Lease, Receipt

NO_LEASES = msgspec.msgpack.encode([])
RECEIPTS = 256
"""At most so many go in one request."""


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
        self._waiting: list[tuple[Receipt, asyncio.Future[bool]]] = []  # and whether its rollout is known
        self._sender: asyncio.Task[None] | None = None
        self._life = time.time_ns()
        self._answered = 0  # lease requests

    async def lease(self, slots: int) -> list[Lease]:
        """At most `slots` leases; may be empty (the orchestrator long-polls for about a second). One at a time."""
        number = self._answered + 1
        body = {"worker": self.worker, "slots": slots, "life": self._life, "number": number}
        leases = self._leases.decode(await self._post("/lease", msgspec.json.encode(body)) or NO_LEASES)
        self._answered = number
        return leases

    async def receipt(self, receipt: Receipt) -> bool:
        """Hand in a receipt. False: the orchestrator does not know the rollout, and it is dropped.

        One request at a time: receipts that come meanwhile go together in the next, so that the busier the
        orchestrator is, the fewer requests it gets.
        """
        known: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((receipt, known))
        if self._sender is None:
            self._sender = asyncio.create_task(self._hand_in())
        return await known

    async def _hand_in(self) -> None:
        """Send until nothing waits. What goes wrong goes to those who wait."""
        batch: list[tuple[Receipt, asyncio.Future[bool]]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:RECEIPTS], self._waiting[RECEIPTS:]
                body = msgspec.msgpack.encode([receipt for receipt, _ in batch])
                unknown = msgspec.json.decode(await self._post("/receipts", body) or b"{}").get("unknown", [])
                for receipt, known in batch:
                    if not known.done():  # else its rollout was given up meanwhile
                        known.set_result(receipt.rollout not in unknown)
        except Exception as error:
            waiting, self._waiting = batch + self._waiting, []
            for _, known in waiting:
                if not known.done():
                    known.set_exception(error)
        finally:
            self._sender = None

    async def heartbeat(self, held: list[str]) -> list[str]:
        """Say that we live and which rollouts we are at; others leased to this name go to somebody else. Returns those
        nobody waits for any more."""
        body = {"worker": self.worker, "rollouts": held, "life": self._life, "number": self._answered}
        answer = await self._post("/heartbeat", msgspec.json.encode(body), unknown_is_fine=True)
        return msgspec.json.decode(answer).get("drop", []) if answer else []

    async def move(self, rollout: str, engine: str) -> str | None:
        """The URL of an engine to go on at, as `engine` failed; waits until there is one. None: nobody waits for the
        rollout any more."""
        again = False
        while True:
            body = {"worker": self.worker, "rollout": rollout, "engine": engine, "again": again}
            answer = await self._post("/move", msgspec.json.encode(body), unknown_is_fine=True)
            if answer is None:
                return None
            if url := msgspec.json.decode(answer)["engine"]:
                return url
            again = True

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
