"""`metrics.jsonl`: one JSON line per thing that happened, written by every process of a run into one file.

A line goes out as a single `O_APPEND` write, so that lines of different processes never mix. Readers follow the
file while it grows: a last line without its newline is left for the next read, and a broken line, or one that lacks
what its kind must have, is skipped.

    step, mismatch, publish   trainer        one optimizer step; engine against trainer; a version on its way
    swap                      follower       a version that an engine serves now, and what it cost
    rollout, eval, queue      orchestrator   a receipt; an evaluation's result; versions and what is in flight
    busy                      anyone         [start, end) with what was done, or the share of it that was busy
    shares                    launcher       of one step: busy share of each process, queue lengths, ages of its tokens
    event                     anyone         one sentence for people
    service, stage            launcher       a process was started; what the run does from here on
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Metrics:
    """Appends lines for one process. Safe to use from several threads; values may be numpy or torch scalars."""

    def __init__(self, path: Path | str, process: str, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.process = process
        self._clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # cut off by a full disk or a power cut
            os.write(self._file, b"\n")

    def log(self, kind: str, **values: Any) -> None:
        """Append `{"time", "process", "kind", **values}`; floats that JSON cannot hold (nan, inf) become null."""
        line = {"time": round(self._clock(), 4), "process": self.process, "kind": kind, **plain(values)}
        os.write(self._file, json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tail:
    """Reads a growing `metrics.jsonl` bit by bit: each `read()` returns the complete lines that came since."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._offset = 0
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        return [line for line in map(_line, complete) if line is not None]


def read(path: Path | str) -> list[dict[str, Any]]:
    """All complete lines of a file; empty when there is none."""
    return Tail(path).read()


def plain(value: Any) -> Any:
    """The value as JSON types: numpy and torch scalars and arrays become numbers and lists, nan and inf None."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)  # a StrEnum as its text
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


_NUMBER = (int, float)
_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "step": {"version": int},
    "mismatch": {"version": int},
    "publish": {"version": int, "form": str, "bytes": _NUMBER, "bytes_full": _NUMBER},
    "swap": {"cluster": str, "version": int, "pause_s": _NUMBER},
    "rollout": {"outcome": str},
    "eval": {"name": str, "solved": list, "attempts": int},
    "busy": {"start": _NUMBER, "end": _NUMBER},
    "service": {"name": str},
    "stage": {"name": str},
}
"""What readers rely on, by kind. Everything else may be absent."""


def _line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("time"), _NUMBER) or not isinstance(line.get("kind"), str):
        return None
    line.setdefault("process", "")
    needed = _NEEDED.get(line["kind"], {})
    return line if all(isinstance(line.get(name), kind) for name, kind in needed.items()) else None
