"""Seconds of each coder of `stretto bench delta`: one core in its own processor time, so that neighbours do not count,
and two against one in wall-clock time. Repeats are interleaved.

How much faster two cores are depends on whether there are two: "hash" is sha256 by one thread and by two, which shares
nothing, and shows what the machine had to give.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from stretto.bench.delta_coders import Coder
from stretto.bench.delta_pairs import Chunk

REPEATS = 3
"""Of every coder."""

MORE = 9
"""Of those that the checks are about, as far as they take."""

SECONDS = 0.5
"""For all repeats of a small pair there is this much time, so that it gets more of them."""

Times = dict[tuple[str, str], list[float]]
"""By coder and what it did: encode, decode, apply; encode wall, decode wall, encode two, decode two."""


def times(coders: Sequence[Coder], chunks: Sequence[Chunk], often: Sequence[str]) -> Times:
    """Also of ("memcpy", "apply") of what changed, ("scan", "encode"), which compares old and new, and ("hash", "encode
    wall") and ("hash", "encode two"). `often` names the coders that get more repeats."""
    found: Times = {}
    targets = [old.copy() for old, _ in chunks]
    changed = [(to, new) for to, (old, new) in zip(targets, chunks, strict=True) if not np.array_equal(old, new)]
    news = [new.data.cast("B") for _, new in chunks]
    started, repeat = time.monotonic(), 0
    with ThreadPoolExecutor(2) as pool:
        while repeat < MORE or (time.monotonic() - started < SECONDS and repeat < 10 * MORE):
            for coder in coders:
                if repeat < REPEATS or coder.name in often:
                    for what, seconds in _round(coder, chunks, targets, pool).items():
                        found.setdefault((coder.name, what), []).append(seconds)
            plain = {
                ("memcpy", "apply"): (time.thread_time, lambda: [np.copyto(to, new) for to, new in changed]),
                ("scan", "encode"): (time.thread_time, lambda: [np.array_equal(old, new) for old, new in chunks]),
                ("hash", "encode wall"): (time.perf_counter, lambda: [hashlib.sha256(new) for new in news]),
                ("hash", "encode two"): (time.perf_counter, lambda: list(pool.map(hashlib.sha256, news))),
            }
            for name, (clock, work) in plain.items():
                found.setdefault(name, []).append(_timed(clock, work)[0])
            repeat += 1
    return found


def speedup(found: Times, coder: str, what: str) -> float:
    """Two threads over one. Of the fastest repeats: what else runs can only slow one down."""
    return min(found[coder, f"{what} wall"]) / min(found[coder, f"{what} two"])


def _round(
    coder: Coder, chunks: Sequence[Chunk], targets: list[np.ndarray], pool: ThreadPoolExecutor
) -> dict[str, float]:
    olds, news = [old for old, _ in chunks], [new for _, new in chunks]
    seconds = {}
    # The coder before had the caches: an untimed chunk each, so that none pays for its neighbour.
    coder.decode(olds[0], coder.encode(*chunks[0]))
    seconds["encode"], data = _timed(time.thread_time, lambda: [coder.encode(*chunk) for chunk in chunks])
    seconds["decode"], changes = _timed(
        time.thread_time, lambda: [coder.decode(old, part) for old, part in zip(olds, data, strict=True)]
    )
    _reset(targets, olds)
    seconds["apply"], _ = _timed(
        time.thread_time, lambda: [coder.apply(to, change) for to, change in zip(targets, changes, strict=True)]
    )

    def both(old: np.ndarray, part: Any, to: np.ndarray) -> None:
        coder.apply(to, coder.decode(old, part))

    seconds["encode wall"], _ = _timed(time.perf_counter, lambda: [coder.encode(*chunk) for chunk in chunks])
    _reset(targets, olds)
    seconds["decode wall"], _ = _timed(time.perf_counter, lambda: list(map(both, olds, data, targets)))
    seconds["encode two"], _ = _timed(time.perf_counter, lambda: list(pool.map(coder.encode, olds, news)))
    _reset(targets, olds)
    seconds["decode two"], _ = _timed(time.perf_counter, lambda: list(pool.map(both, olds, data, targets)))
    return seconds


def _reset(targets: list[np.ndarray], olds: list[np.ndarray]) -> None:
    for target, old in zip(targets, olds, strict=True):
        np.copyto(target, old)


def _timed(clock: Callable[[], float], work: Callable[[], Any]) -> tuple[float, Any]:
    started = clock()
    result = work()
    return clock() - started, result
