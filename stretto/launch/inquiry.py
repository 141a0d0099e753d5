"""The orchestrator's status, kept up to date by asking again and again; whoever looks never waits for it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from stretto.launch.client import Orchestrator, Unanswered

ASK_SECONDS = 0.25
FRESH_SECONDS = 2.0
"""An answer says how things are now for so long."""


class Inquiry:
    """`status` is the last answer, {} before the first."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(1, "status")
        self._asking: Future[dict[str, Any]] | None = None
        self._asked = self._answered = float("-inf")

    def poll(self, orchestrator: Orchestrator) -> None:
        """Take the answer if there is one, and ask again when it is time. Call it often."""
        now = time.monotonic()
        if self._asking is not None and self._asking.done():
            with suppress(Unanswered):  # then it is asked again; `vigil.py` finds out whether it hangs
                self.status, self._answered = self._asking.result(), now
            self._asking = None
        if self._asking is None and now - self._asked > ASK_SECONDS:
            self._asked = now
            self._asking = self._pool.submit(orchestrator.status)

    @property
    def fresh(self) -> dict[str, Any] | None:
        """The last answer, if it still holds."""
        return self.status if time.monotonic() - self._answered < FRESH_SECONDS else None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
