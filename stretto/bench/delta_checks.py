"""What `stretto bench delta` promises, and whether it holds: the worst of each measure over all pairs.

A measure is None, with the reason, where nothing can be said: of a pair so small that a call's fixed cost or a table is
all there is, or of two cores when the machine had no two to give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.bench.delta_coders import GAP16, OURS, XOR

LIMITS = {
    "ratio_to_conditional_bound_max": 1.25,
    "smaller_than_gap16_zstd_min": 2.5,
    "smaller_than_every_other_row": 1.0,
    "encode_vs_xor_zstd": 1.5,
    "decode_vs_xor_zstd": 1.0,
    "encode_speedup_two": 1.6,
    "decode_speedup_two": 1.6,
    "apply_over_memcpy": 1.0,
}
"""Those in AT_MOST are at most that, the others at least."""

AT_MOST = ("ratio_to_conditional_bound_max", "apply_over_memcpy")

SOME_BYTES = 2_000
"""Bytes of a pair's bound from which sizes are compared: below, they are those of headers."""

MUCH = 2_000_000
"""Bytes of a pair from which speeds are compared: below, a call takes as long as its work."""

TWO_CORES = 1.8
"""How much faster two threads have to hash than one, for the speed of two threads to say anything."""


@dataclass(frozen=True)
class Row:
    """One coder on one pair. GB/s are of the full tensor; decoding includes applying; two cores count in wall-clock."""

    pair: str
    coder: str
    changed: float
    bytes: int
    full_bytes: int
    ratio_to_full: float
    ratio_to_order0: float | None  # None: the bound is nothing
    ratio_to_conditional: float | None
    encode_gbps: float
    decode_gbps: float
    encode_gbps_two: float
    decode_gbps_two: float
    encode_speedup_two: float | None  # over one, both in wall-clock time; None: there is only one chunk
    decode_speedup_two: float | None
    apply_over_memcpy: float
    pause_share: float  # of decoding and applying, what serving waits for
    encode_over_scan: float  # time, over that of comparing old and new


def check(rows: Sequence[Row], two_cores: float | None) -> dict[str, dict[str, Any]]:
    """By name: value, limit, ok, and if there is no value, why. `two_cores`: how much faster two threads hashed."""
    pairs: dict[str, dict[str, Row]] = {}
    for row in rows:
        pairs.setdefault(row.pair, {})[row.coder] = row
    enough = [pair for pair in pairs.values() if _bound(pair[OURS]) >= SOME_BYTES]
    large = [pair for pair in pairs.values() if pair[OURS].full_bytes >= MUCH]
    several = [pair for pair in large if pair[OURS].encode_speedup_two is not None]
    small = f"no pair is of {MUCH:,} bytes: so small ones show what a call costs, not what its work does"
    tiny = f"the bound is below {SOME_BYTES:,} bytes: what is sent is mostly headers"
    alone = "one chunk is one core's work" if large else small
    if several and (two_cores is None or two_cores < TWO_CORES):
        alone, several = f"two threads hashed only {two_cores or 1:.2f} times as fast as one: no two cores are free", []
    found: dict[str, tuple[list[dict[str, Row]], str, Callable[[dict[str, Row]], float]]] = {
        "ratio_to_conditional_bound_max": (enough, tiny, lambda pair: pair[OURS].ratio_to_conditional or 0.0),
        "smaller_than_gap16_zstd_min": (enough, tiny, lambda pair: pair[GAP16].bytes / pair[OURS].bytes),
        "smaller_than_every_other_row": (enough, tiny, _smallest_other),
        "encode_vs_xor_zstd": (large, small, lambda pair: pair[OURS].encode_gbps / pair[XOR].encode_gbps),
        "decode_vs_xor_zstd": (large, small, lambda pair: pair[OURS].decode_gbps / pair[XOR].decode_gbps),
        "encode_speedup_two": (several, alone, lambda pair: pair[OURS].encode_speedup_two or 0.0),
        "decode_speedup_two": (several, alone, lambda pair: pair[OURS].decode_speedup_two or 0.0),
        "apply_over_memcpy": (large, small, lambda pair: pair[OURS].apply_over_memcpy),
    }
    return {name: _verdict(name, *parts) for name, parts in found.items()}


def _verdict(
    name: str, pairs: list[dict[str, Row]], why: str, measure: Callable[[dict[str, Row]], float]
) -> dict[str, Any]:
    if not pairs:
        return {"value": None, "limit": LIMITS[name], "ok": None, "why": why}
    worst = (max if name in AT_MOST else min)(measure(pair) for pair in pairs)
    ok = worst <= LIMITS[name] if name in AT_MOST else worst >= LIMITS[name]
    return {"value": round(worst, 4), "limit": LIMITS[name], "ok": bool(ok)}


def _bound(row: Row) -> float:
    return row.bytes / row.ratio_to_conditional if row.ratio_to_conditional else 0.0


def _smallest_other(pair: dict[str, Row]) -> float:
    """The smallest of the other ways, over ours."""
    return min(row.bytes for name, row in pair.items() if not name.startswith(OURS)) / pair[OURS].bytes
