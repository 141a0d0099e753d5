"""What is wrong just now, said once: in the log, and as an event for whoever watches the run."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.watch.metrics import Metrics

REPEAT_SECONDS = 30.0
"""The same complaint is made again after this time."""
PATIENCE_SECONDS = 30.0
"""Trainer and engines may take this long to start before anyone is told that they are missing."""

_DURATION = re.compile(r"\d+(\.\d+)?\s?(ns|µs|ms|s)\b")
"""What makes two errors of a store look different that are one."""

log = logging.getLogger(__name__)


class Complaints:
    """Sentences, each about something; a new one about the same thing replaces it."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        self._started = time.monotonic()
        self._said: dict[str, tuple[str, float]] = {}

    def say(self, about: str, sentence: str, patient: bool = False) -> None:
        """Once, and again only after a while. `patient`: not at all while everything is still starting."""
        if patient and time.monotonic() - self._started < PATIENCE_SECONDS:
            return
        last, at = self._said.get(about, ("", 0.0))
        same = _DURATION.sub("", sentence)
        if same == last and time.monotonic() - at < REPEAT_SECONDS:
            return
        self._said[about] = (same, time.monotonic())
        log.warning(sentence)
        if self._metrics is not None:
            self._metrics.log("event", text=sentence)

    def settled(self, about: str) -> None:
        self._said.pop(about, None)
