"""`stretto bench delta`: our codec beside others, on pairs of versions one real optimizer step apart.

    pairs (nano and SmolLM2 at three learning rates, or two folders) ──▶ chunks, as the publisher makes them
        ──▶ each coder: encode, decode off to the side, apply in place, compare bits ──▶ rows, checks

Bounds are entropies of what was coded, chunk by chunk: of the steps in ulps if all elements are treated alike (order
0), and given the old value's exponent. A chunk's own counts are used, so a coder that has to send parameters, or to
learn them, can only come near. Times are medians, on one core in processor time (`delta_times.py`). The floor of
encoding is reading both versions: "scan" compares the two arrays and does nothing else.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from stretto.bench.delta_checks import Row, check
from stretto.bench.delta_coders import OURS, XOR, Coder, coders
from stretto.bench.delta_pairs import Chunk, chunks, given, made
from stretto.bench.delta_times import Times, speedup, times
from stretto.bench.steps import Pair
from stretto.weights.codec_report import bound_given_exponent, bound_order0

TIMED_CHUNKS = 4
"""Speed is measured on so many chunks, evenly chosen of those that changed, and size on all."""

WIDTH = 140


def delta(old: Path | None, new: Path | None, json_file: Path | None, console: Console) -> bool:
    """Measure, print, write; whether nothing that was measured misses its limit. Raises ValueError for folders that
    cannot be compared, RuntimeError if a coder does not give back the bits."""
    if (old is None) != (new is None):
        raise ValueError("give both --old and --new, or neither")
    rows: list[Row] = []
    scans: dict[str, float] = {}
    hashes: list[float] = []
    for pair in [given(old, new)] if old and new else made(console):
        found, scan, two = measure(pair)
        rows += found
        scans[pair.name] = scan
        hashes += [] if two is None else [two]
        console.print(_table(pair.name, found, scan), width=max(WIDTH, console.width), crop=False)
    checks = check(rows, min(hashes, default=None))
    for name, verdict in checks.items():
        console.print(_line(name, verdict), crop=False, overflow="ignore", no_wrap=True)
    if json_file is not None:
        tree = {"benchmark": "delta", "rows": [asdict(row) for row in rows], "scan_gbps": scans}
        tree |= {"two_threads_hash": min(hashes, default=None), "checks": checks}
        json_file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return all(verdict["ok"] is not False for verdict in checks.values())


def measure(pair: Pair) -> tuple[list[Row], float, float | None]:
    """All coders on one pair; GB/s of comparing the two versions; how much faster two threads hash than one, if there
    is work for two."""
    parts = chunks(pair)
    order0 = sum(bound_order0(*chunk) for chunk in parts)
    conditional = sum(bound_given_exponent(*chunk) for chunk in parts)
    changed = sum(int(np.count_nonzero(old != new)) for old, new in parts) / sum(new.size for _, new in parts)
    sizes = {coder.name: sum(_checked(coder, *chunk) for chunk in parts) for coder in coders()}
    moved = [chunk for chunk in parts if not np.array_equal(*chunk)]
    timed = [moved[i] for i in np.unique(np.linspace(0, len(moved) - 1, TIMED_CHUNKS).astype(int))]
    found = times(coders(), timed, (OURS, XOR))
    common = {"full": sum(new.nbytes for _, new in parts), "order0": order0, "conditional": conditional}
    rows = [_row(pair.name, name, changed, size, common, timed, found) for name, size in sizes.items()]
    scan = sum(new.nbytes for _, new in timed) / 1e9 / statistics.median(found["scan", "encode"])
    return rows, scan, speedup(found, "hash", "encode") if len(timed) > 1 else None


def _row(
    pair: str, coder: str, changed: float, size: int, common: dict[str, float], timed: Sequence[Chunk], found: Times
) -> Row:
    at = {what: statistics.median(found[coder, what]) for what in ("encode", "decode", "apply")}
    both = at["decode"] + at["apply"]
    weight = sum(new.nbytes for _, new in timed) / 1e9
    return Row(
        pair=pair,
        coder=coder,
        changed=changed,
        bytes=size,
        full_bytes=int(common["full"]),
        ratio_to_full=common["full"] / size,
        ratio_to_order0=size / common["order0"] if common["order0"] else None,
        ratio_to_conditional=size / common["conditional"] if common["conditional"] else None,
        encode_gbps=weight / at["encode"],
        decode_gbps=weight / both,
        encode_gbps_two=weight / min(found[coder, "encode two"]),
        decode_gbps_two=weight / min(found[coder, "decode two"]),
        encode_speedup_two=speedup(found, coder, "encode") if len(timed) > 1 else None,
        decode_speedup_two=speedup(found, coder, "decode") if len(timed) > 1 else None,
        apply_over_memcpy=at["apply"] / statistics.median(found["memcpy", "apply"]),
        pause_share=at["apply"] / both,
        encode_over_scan=at["encode"] / statistics.median(found["scan", "encode"]),
    )


def _checked(coder: Coder, old: np.ndarray, new: np.ndarray) -> int:
    """Size of the delta, after it was seen to work."""
    data = coder.encode(old, new)
    target = old.copy()
    coder.apply(target, coder.decode(old, data))
    if not np.array_equal(target, new):
        raise RuntimeError(f"{coder.name} does not give back the bits it was given")
    return coder.size(data)


def _line(name: str, verdict: dict[str, Any]) -> str:
    if verdict["ok"] is None:
        return f"{name}: not measured: {verdict['why']}"
    holds = "holds" if verdict["ok"] else "[red]MISSED[/red]"
    return f"{name}: {verdict['value']:.3g} (limit {verdict['limit']:g}) {holds}"


_COLUMNS = (
    "bytes",
    "full / it",
    "/ order 0",
    "/ given exp.",
    "enc GB/s",
    "dec GB/s",
    "enc, 2 cores",
    "dec, 2 cores",
    "enc / scan",
    "apply / memcpy",
    "pause",
)


def _table(title: str, rows: list[Row], scan: float) -> Table:
    table = Table(
        title=f"{title}: {rows[0].changed:.2%} changed; comparing alone runs at {scan:.1f} GB/s", padding=(0, 0)
    )
    table.add_column("coder", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        bounds = (row.ratio_to_order0, row.ratio_to_conditional)
        table.add_row(
            row.coder,
            f"{row.bytes:,}",
            f"{row.ratio_to_full:.1f}×",
            *("-" if bound is None else f"{bound:.2f}" for bound in bounds),
            f"{row.encode_gbps:.2f}",
            f"{row.decode_gbps:.2f}",
            _two(row.encode_gbps_two, row.encode_speedup_two),
            _two(row.decode_gbps_two, row.decode_speedup_two),
            f"{row.encode_over_scan:.1f}",
            f"{row.apply_over_memcpy:.2f}",
            f"{row.pause_share:.0%}",
        )
    return table


def _two(gbps: float, speedup: float | None) -> str:
    return "-" if speedup is None else f"{gbps:.2f} ({speedup:.2f}×)"
