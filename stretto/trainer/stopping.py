"""SIGTERM and SIGINT as a request: the trainer stops at the next place where nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):
    """Raised where the trainer may stop, after it was asked to."""


class StopRequest:
    """Example: `stop.check()` between micro-batches; `with stop.at_once(): wait_for_batch()`."""

    def __init__(self) -> None:
        self.requested = False
        self._at_once = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals inside; only a process's main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        if self.requested:
            raise Stopped

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A signal interrupts what runs inside, which must change nothing."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._at_once:
            raise Stopped
