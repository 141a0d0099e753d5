"""An alarm for an event loop that stands still, and what it stands in.

A loop that is held up answers nobody: leases lapse, engines seem silent. It cannot say so itself while it lasts, so a
thread looks every so often when the loop last turned, and names the line that its thread is in.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

LAG_SECONDS = 5.0


class Watchdog:
    """Watches the running loop of the thread that makes it. `alarm` gets a sentence, once per stand-still, from another
    thread."""

    def __init__(self, alarm: Callable[[str], None], limit: float = LAG_SECONDS) -> None:
        self._alarm, self._limit = alarm, limit
        self._loop, self._watched = asyncio.get_running_loop(), threading.get_ident()
        self._turned = time.monotonic()
        self._ended = threading.Event()
        self._turn()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _turn(self) -> None:
        self._turned = time.monotonic()
        if not self._ended.is_set():
            self._loop.call_later(self._limit / 10, self._turn)

    def _watch(self) -> None:
        said = 0.0  # the turn after which it stood still, when that was said
        while not self._ended.wait(self._limit / 5):
            turned = self._turned
            if time.monotonic() - turned > self._limit and turned != said:
                said = turned
                self._alarm(f"the event loop has stood still for {self._limit:g} s, in {self._where()}")

    def _where(self) -> str:
        frame = sys._current_frames().get(self._watched)
        stack = traceback.extract_stack(frame) if frame is not None else []
        ours = [entry for entry in stack if "/stretto/" in entry.filename] or list(stack)
        return f"{ours[-1].name} ({ours[-1].filename}:{ours[-1].lineno})" if ours else "an unknown place"
