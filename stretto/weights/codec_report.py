"""How small deltas are: measured on two versions, beside what information theory allows.

    rows = measure(old, new)               of a run's own versions
    rows = measure(*synthetic_step(masters, lr=1e-6, seed=0))     of the same weights at a large model's learning rate

The share of bf16 values that change in a step is set by the learning rate: an fp32 master drifts inside its bf16 cell
and crosses a boundary with probability |step| / ulp. At 1e-6 about 1 % do; at the nano model's 6e-4 more than half.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stretto.weights import codec
from stretto.weights.chain import TensorInfo
from stretto.weights.frames import group, join
from stretto.weights.numberline import exponents, steps
from stretto.weights.tensorfile import default_tag

UNIT_UPDATE = 0.229
"""Standard deviation of Adam's m / sqrt(v), beta1 = 0.9, when gradients are noise: sqrt((1 - beta1) / (1 + beta1))."""


@dataclass(frozen=True)
class Row:
    """One kind of tensors (names that differ in numbers only), or all of them."""

    name: str
    elements: int
    changed: float  # share of elements
    bytes_full: int
    bytes_delta: int  # coded by themselves; "all" is coded as the publisher does it
    bytes_order0: float  # bound of any code that treats elements alike: entropy of the steps in ulps
    bytes_given_exponent: float  # bound of any code that also uses the old value's exponent

    @property
    def ratio(self) -> float:
        return self.bytes_full / max(1, self.bytes_delta)


def measure(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> list[Row]:
    """One row per kind of tensor, largest first, after the row "all". The two must have the same names and shapes."""
    if old.keys() != new.keys():
        raise ValueError(f"only one of the versions has tensor {sorted(old.keys() ^ new.keys())[0]}")
    kinds: dict[str, list[str]] = {}
    for name in sorted(new):
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    rows = [_row(kind, old, new, names) for kind, names in kinds.items()]
    return [_row("all", old, new, sorted(new)), *sorted(rows, key=lambda row: -row.bytes_full)]


def synthetic_step(
    masters: Mapping[str, np.ndarray], lr: float, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two versions, bf16 as uint16, that one optimizer step at `lr` could have made: not a training step.

    `masters` are fp32 weights (or uint16 holding bf16, which then get a place inside their bf16 cell as training gives
    them after a few steps). The step is `lr` times noise of the size of Adam's unit update. Real gradients are not
    noise, and in a mixture of experts many weights get none: measure real versions where there are any.
    """
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for name, array in masters.items():
        master = array.astype(np.float32) if array.dtype != np.uint16 else inside_cell(array, rng)
        step = (lr * UNIT_UPDATE) * rng.standard_normal(master.shape, dtype=np.float32)
        old[name], new[name] = to_bf16(master), to_bf16(master - step)
    return old, new


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits as uint16, to nearest, ties to even. Finite values only."""
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16).reshape(values.shape)


def table(rows: list[Row]) -> str:
    """For the terminal."""
    lines = [f"{'tensors':44} {'changed':>8} {'full':>12} {'delta':>11} {'ratio':>7} {'order-0':>8} {'exponent':>8}"]
    for row in rows:
        bounds = [row.bytes_full / max(1.0, bound) for bound in (row.bytes_order0, row.bytes_given_exponent)]
        lines.append(
            f"{row.name[-44:]:44} {row.changed:8.2%} {row.bytes_full:12,} {row.bytes_delta:11,} "
            f"{row.ratio:6.1f}x {bounds[0]:7.1f}x {bounds[1]:7.1f}x"
        )
    return "\n".join(lines)


def _row(kind: str, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], names: list[str]) -> Row:
    infos = [TensorInfo(n, default_tag(new[n]), new[n].dtype.itemsize * 8, new[n].shape) for n in names]
    coded, changed, order0, conditional = 0, 0, 0.0, 0.0
    for first, last in group(infos):
        old_N, new_N = (join([side[name] for name in names[first:last]]) for side in (old, new))
        coded += len(codec.encode(old_N, new_N))
        changed += int(np.count_nonzero(old_N != new_N))
        order0 += bound_order0(old_N, new_N)
        conditional += bound_given_exponent(old_N, new_N)
    elements = sum(new[name].size for name in names)
    full = sum(new[name].nbytes for name in names)
    return Row(kind, elements, changed / max(1, elements), full, coded, order0, conditional)


def bound_order0(old: np.ndarray, new: np.ndarray) -> float:
    """Bytes: entropy of the steps in ulps, unchanged elements included, if all elements are treated alike."""
    steps_N = steps(old, new)
    return _entropy_bytes(steps_N[steps_N != 0], steps_N.size)


def bound_given_exponent(old: np.ndarray, new: np.ndarray) -> float:
    """Bytes: entropy of the steps in ulps, unchanged elements included, given the old value's exponent."""
    steps_N, exponents_N = steps(old, new), exponents(old)
    of_changed = exponents_N[steps_N != 0]
    steps_N = steps_N[steps_N != 0]
    elements = np.bincount(exponents_N, minlength=256)
    return sum(_entropy_bytes(steps_N[of_changed == value], int(elements[value])) for value in np.unique(of_changed))


def _entropy_bytes(changed: np.ndarray, elements: int) -> float:
    """Of the values of those that changed, among so many."""
    counts = np.append(np.unique(changed, return_counts=True)[1], elements - changed.size)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / elements)).sum() / 8)


def inside_cell(bf16: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """fp32 values that round to `bf16`, anywhere in the cell."""
    low = rng.integers(-0x7FFF, 0x8000, bf16.shape)
    magnitude = (((bf16 & 0x7FFF).astype(np.int64) << 16) + low).clip(0, None)
    sign = (bf16 & 0x8000).astype(np.int64) << 16
    return (magnitude | sign).astype(np.uint32).view(np.float32)
