"""`stretto bench delta`: our codec beside others, on pairs of versions one real optimizer step apart.

    pairs (nano and SmolLM2 at three learning rates, or two folders) ──▶ chunks, as the publisher makes them
        ──▶ each coder: encode, decode off to the side, apply in place, compare bits ──▶ rows, checks

Bounds are entropies of what was coded, chunk by chunk: of the steps in ulps if all elements are treated alike (order
0), and given the old value's exponent. A chunk's own counts are used, so a coder that has to send parameters, or to
learn them, can only come near. One core is measured in its own processor time, so that neighbours do not count; two
in wall-clock time. Repeats are interleaved, medians are shown. The floor of encoding is reading both versions, that of
decoding the old one: "scan" compares the two arrays and does nothing else.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from stretto.bench import smollm2
from stretto.bench.delta_coders import OURS, Coder, coders
from stretto.bench.steps import Pair, real_steps
from stretto.config import ModelConfig
from stretto.weights import codec
from stretto.weights.chain import TensorInfo
from stretto.weights.codec_report import bound_given_exponent, bound_order0
from stretto.weights.frames import group, join
from stretto.weights.tensorfile import default_tag, unpack

LEARNING_RATES = (1e-6, 3e-6, 1e-5)
REPEATS = 3
TIMED_CHUNKS = 4
"""Speed is measured on so many chunks, evenly chosen, and size on all."""

WIDTH = 134

LARGE = 32e6
"""Bytes of a pair from which its speeds count in the checks. The nano model fits a cache, and a call costs its own."""

XOR, GAP16 = "XOR, zstd-1", "gap16 + value, zstd-1"

Chunk = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One coder on one pair. GB/s are of the full tensor; decoding includes applying; two cores count in wall-clock."""

    pair: str
    coder: str
    changed: float
    bytes: int
    ratio_to_full: float
    ratio_to_order0: float
    ratio_to_conditional: float
    encode_gbps: float
    decode_gbps: float
    encode_gbps_two: float
    decode_gbps_two: float
    encode_speedup_two: float  # both in wall-clock time
    decode_speedup_two: float
    apply_over_memcpy: float
    pause_share: float  # of decoding and applying, what serving waits for


def delta(old: Path | None, new: Path | None, json_file: Path | None, console: Console) -> bool:
    """Measure, print, write; whether every bit came back. Raises ValueError for folders that cannot be compared."""
    if (old is None) != (new is None):
        raise ValueError("give both --old and --new, or neither")
    rows: list[Row] = []
    scans: dict[str, float] = {}
    for pair in [_given(old, new)] if old and new else _made(console):
        found, scan = measure(pair)
        rows += found
        scans[pair.name] = scan
        console.print(_table(pair.name, found, scan), width=max(WIDTH, console.width), crop=False)
    checks = summarize(rows)
    for name, value in checks.items():
        console.print(f"{name}: {value if isinstance(value, bool) else format(value, '.3g')}")
    if json_file is not None:
        data = {"benchmark": "delta", "rows": [asdict(row) for row in rows], "scan_gbps": scans, "checks": checks}
        json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return True


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The worst of each measure over all pairs; of speed, over those large enough to show more than fixed costs."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.pair, {})[row.coder] = row
    pairs = list(found.values())
    large = [pair for pair in pairs if pair[OURS].bytes * pair[OURS].ratio_to_full >= LARGE] or pairs
    others = [[row for name, row in pair.items() if not name.startswith(OURS)] for pair in pairs]
    return {
        "ratio_to_conditional_bound_max": max(pair[OURS].ratio_to_conditional for pair in pairs),
        "smaller_than_gap16_zstd_min": min(pair[GAP16].bytes / pair[OURS].bytes for pair in pairs),
        "smaller_than_every_other_row": all(
            pair[OURS].bytes < row.bytes for pair, rest in zip(pairs, others, strict=True) for row in rest
        ),
        "encode_vs_xor_zstd": min(pair[OURS].encode_gbps / pair[XOR].encode_gbps for pair in large),
        "decode_vs_xor_zstd": min(pair[OURS].decode_gbps / pair[XOR].decode_gbps for pair in large),
        "encode_speedup_two": min(pair[OURS].encode_speedup_two for pair in large),
        "decode_speedup_two": min(pair[OURS].decode_speedup_two for pair in large),
        "apply_over_memcpy": max(pair[OURS].apply_over_memcpy for pair in large),
    }


def measure(pair: Pair) -> tuple[list[Row], float]:
    """All coders on one pair, and GB/s of comparing the two versions. Raises RuntimeError if a coder errs."""
    chunks = _chunks(pair)
    full = sum(new.nbytes for _, new in chunks)
    changed = sum(int(np.count_nonzero(old != new)) for old, new in chunks) / sum(new.size for _, new in chunks)
    if not changed:
        raise ValueError(f"the two versions of {pair.name} are the same: there is nothing to measure")
    order0 = sum(bound_order0(*chunk) for chunk in chunks)
    conditional = sum(bound_given_exponent(*chunk) for chunk in chunks)
    sizes: dict[str, int] = {}
    for coder in coders():
        sizes[coder.name] = sum(_checked(coder, *chunk) for chunk in chunks)
    timed = [chunks[i] for i in np.unique(np.linspace(0, len(chunks) - 1, TIMED_CHUNKS).astype(int))]
    times = _times(timed)
    weight = sum(new.nbytes for _, new in timed) / 1e9
    rows = []
    for coder in coders():
        at = {what: statistics.median(times[coder.name, what]) for what in _WHAT}
        memcpy = statistics.median(times["memcpy", "apply"])
        rows.append(
            Row(
                pair=pair.name,
                coder=coder.name,
                changed=changed,
                bytes=sizes[coder.name],
                ratio_to_full=full / sizes[coder.name],
                ratio_to_order0=sizes[coder.name] / order0,
                ratio_to_conditional=sizes[coder.name] / conditional,
                encode_gbps=weight / at["encode"],
                decode_gbps=weight / (at["decode"] + at["apply"]),
                encode_gbps_two=weight / at["encode two"],
                decode_gbps_two=weight / at["decode two"],
                encode_speedup_two=at["encode wall"] / at["encode two"],
                decode_speedup_two=at["decode wall"] / at["decode two"],
                apply_over_memcpy=at["apply"] / memcpy,
                pause_share=at["apply"] / (at["decode"] + at["apply"]),
            )
        )
    return rows, weight / statistics.median(times["scan", "encode"])


_WHAT = ("encode", "decode", "apply", "encode wall", "decode wall", "encode two", "decode two")


def _times(chunks: list[Chunk]) -> dict[tuple[str, str], list[float]]:
    """Seconds by (coder, what), one for each repeat; also of a memcpy of what changed and of a comparison."""
    times: dict[tuple[str, str], list[float]] = {}
    targets = [old.copy() for old, _ in chunks]
    changed = [(to, new) for to, (old, new) in zip(targets, chunks, strict=True) if not np.array_equal(old, new)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(REPEATS):
            for coder in coders():
                for what, seconds in _round(coder, chunks, targets, pool).items():
                    times.setdefault((coder.name, what), []).append(seconds)
            seconds, _ = _timed(time.thread_time, lambda: [np.copyto(to, new) for to, new in changed])
            times.setdefault(("memcpy", "apply"), []).append(seconds)
            seconds, _ = _timed(time.thread_time, lambda: [np.array_equal(old, new) for old, new in chunks])
            times.setdefault(("scan", "encode"), []).append(seconds)
    return times


def _round(coder: Coder, chunks: list[Chunk], targets: list[np.ndarray], pool: ThreadPoolExecutor) -> dict[str, float]:
    olds, news = [old for old, _ in chunks], [new for _, new in chunks]
    encode, data = _timed(time.thread_time, lambda: [coder.encode(*chunk) for chunk in chunks])
    decode, changes = _timed(
        time.thread_time, lambda: [coder.decode(old, part) for old, part in zip(olds, data, strict=True)]
    )
    _reset(targets, olds)
    apply, _ = _timed(
        time.thread_time, lambda: [coder.apply(to, change) for to, change in zip(targets, changes, strict=True)]
    )
    encode_wall, _ = _timed(time.perf_counter, lambda: [coder.encode(*chunk) for chunk in chunks])
    _reset(targets, olds)
    decode_wall, _ = _timed(
        time.perf_counter,
        lambda: [coder.apply(to, coder.decode(old, part)) for old, part, to in zip(olds, data, targets, strict=True)],
    )
    encode_two, _ = _timed(time.perf_counter, lambda: list(pool.map(coder.encode, olds, news)))
    _reset(targets, olds)
    decode_two, _ = _timed(
        time.perf_counter,
        lambda: list(pool.map(lambda old, part, to: coder.apply(to, coder.decode(old, part)), olds, data, targets)),
    )
    return dict(zip(_WHAT, (encode, decode, apply, encode_wall, decode_wall, encode_two, decode_two), strict=True))


def _reset(targets: list[np.ndarray], olds: list[np.ndarray]) -> None:
    for target, old in zip(targets, olds, strict=True):
        np.copyto(target, old)


def _timed(clock: Callable[[], float], work: Callable[[], Any]) -> tuple[float, Any]:
    started = clock()
    result = work()
    return clock() - started, result


def _checked(coder: Coder, old: np.ndarray, new: np.ndarray) -> int:
    """Size of the delta, after it was seen to work."""
    data = coder.encode(old, new)
    target = old.copy()
    coder.apply(target, coder.decode(old, data))
    if not np.array_equal(target, new):
        raise RuntimeError(f"{coder.name} does not give back the bits it was given")
    return coder.size(data)


def _chunks(pair: Pair) -> list[Chunk]:
    """Small tensors together, large ones cut, as publisher and codec do it."""
    infos = [TensorInfo(n, default_tag(a), a.dtype.itemsize * 8, a.shape) for n, a in sorted(pair.new.items())]
    size = 1 << codec.CHUNK_BITS
    chunks = []
    for first, last in group(infos):
        old, new = (join([side[info.name] for info in infos[first:last]]) for side in (pair.old, pair.new))
        chunks += [(old[at : at + size], new[at : at + size]) for at in range(0, new.size, size)]
    return [chunk for chunk in chunks if chunk[0].size]


def _made(console: Console) -> list[Pair]:
    pairs = real_steps(ModelConfig().folder, "nano", LEARNING_RATES)
    try:
        pairs += real_steps(smollm2.folder(), "SmolLM2", LEARNING_RATES)
    except smollm2.NotInstalled as error:
        console.print(f"SmolLM2 is left out: {error}")
    return pairs


def _given(old: Path, new: Path) -> Pair:
    sides = [_load(folder) for folder in (old, new)]
    before, after = sides
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            raise ValueError(f"only {old if name in before else new} has tensor {name}: give two versions of one model")
        if before[name].shape != after[name].shape or before[name].dtype != after[name].dtype:
            raise ValueError(
                f"tensor {name} is {before[name].dtype} {list(before[name].shape)} in {old} and "
                f"{after[name].dtype} {list(after[name].shape)} in {new}: give two versions of one model"
            )
    return Pair(f"{old.name} to {new.name}", before, after)


def _load(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"{folder} is not a folder with safetensors files in it")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        try:
            found, tags = unpack(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        for name, array in found.items():
            if array.dtype.itemsize not in (1, 2, 4):
                raise ValueError(f"tensor {name} in {file} is {tags[name]}: deltas are of 8, 16 and 32-bit values")
            tensors[name] = array
    if not any(array.size for array in tensors.values()):
        raise ValueError(f"{folder} holds no values")
    return tensors


def _table(title: str, rows: list[Row], scan: float) -> Table:
    first = rows[0]
    table = Table(title=f"{title}: {first.changed:.2%} changed; comparing alone runs at {scan:.1f} GB/s")
    table.add_column("coder", no_wrap=True)
    names = (
        "bytes",
        "full / it",
        "/ order 0",
        "/ given exp.",
        "enc GB/s",
        "dec GB/s",
        "enc ×2",
        "dec ×2",
        "apply / memcpy",
        "pause",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.coder,
            f"{row.bytes:,}",
            f"{row.ratio_to_full:.1f}×",
            f"{row.ratio_to_order0:.2f}",
            f"{row.ratio_to_conditional:.2f}",
            f"{row.encode_gbps:.2f}",
            f"{row.decode_gbps:.2f}",
            f"{row.encode_speedup_two:.2f}",
            f"{row.decode_speedup_two:.2f}",
            f"{row.apply_over_memcpy:.2f}",
            f"{row.pause_share:.0%}",
        )
    return table
