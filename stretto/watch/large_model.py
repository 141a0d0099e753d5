"""What a version would cost at the learning rates of large models, with the same codec and this run's weights.

The share of bf16 values that a step changes is set by the learning rate: the nano model's is hundreds of times a large
model's. The steps here are simulated (`weights/codec_report.py` says how), so this is an estimate, and labelled so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.weights.codec_report import measure, synthetic_step
from stretto.weights.tensorfile import unpack

RATES = (1e-5, 1e-6)
MOST_BYTES = 256 * 2**20
"""Larger checkpoints are not measured: it would hold up the report."""


def large_model_rate(run: Path) -> list[dict[str, Any]]:
    """A row per learning rate, from the newest checkpoint; empty when there is none."""
    found = sorted(run.glob("checkpoints/v*/model.safetensors"))
    if not found or found[-1].stat().st_size > MOST_BYTES:
        return []
    tensors, _ = unpack(found[-1].read_bytes())
    rows = []
    for lr in RATES:
        row = measure(*synthetic_step(tensors, lr=lr, seed=0))[0]
        rows.append({"lr": lr, "changed": row.changed, "bytes": row.bytes_delta, "ratio": row.ratio})
    return rows
