"""What `stretto bench delta` measures on: two versions of a model, and the chunks a publisher would make of them.

Made here (nano and SmolLM2 at three learning rates, each one real optimizer step), or two folders of safetensors files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from stretto.bench import smollm2
from stretto.bench.steps import Pair, real_steps
from stretto.config import ModelConfig
from stretto.weights import codec
from stretto.weights.chain import TensorInfo
from stretto.weights.frames import group, join
from stretto.weights.tensorfile import default_tag, unpack

LEARNING_RATES = (1e-6, 3e-6, 1e-5)

Chunk = tuple[np.ndarray, np.ndarray]


def made(console: Console) -> Iterator[Pair]:
    yield from real_steps(ModelConfig().folder, "nano", LEARNING_RATES)
    try:
        folder = smollm2.folder()
    except smollm2.NotInstalled as error:
        console.print(f"SmolLM2 is left out: {error}")
        return
    yield from real_steps(folder, "SmolLM2", LEARNING_RATES)


def given(old: Path, new: Path) -> Pair:
    """Raises ValueError for folders that are not two versions of one model."""
    before, after = (_load(folder) for folder in (old, new))
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            raise ValueError(f"only {old if name in before else new} has tensor {name}: give two versions of one model")
        if before[name][0].shape != after[name][0].shape or before[name][1] != after[name][1]:
            raise ValueError(
                f"tensor {name} is {before[name][1]} {list(before[name][0].shape)} in {old} and "
                f"{after[name][1]} {list(after[name][0].shape)} in {new}: give two versions of one model"
            )
    sides = [{name: array for name, (array, _) in side.items()} for side in (before, after)]
    title = f"{old.name} to {new.name}" if old.name != new.name else f"{old} to {new}"
    if all(np.array_equal(sides[0][name], sides[1][name]) for name in sides[0]):
        raise ValueError(f"the two versions of {title} are the same: there is nothing to measure")
    return Pair(title, *sides)


def chunks(pair: Pair) -> list[Chunk]:
    """Small tensors together, large ones cut, as publisher and codec do it."""
    infos = [TensorInfo(n, default_tag(a), a.dtype.itemsize * 8, a.shape) for n, a in sorted(pair.new.items())]
    size = 1 << codec.CHUNK_BITS
    found = []
    for first, last in group(infos):
        old, new = (join([side[info.name] for info in infos[first:last]]) for side in (pair.old, pair.new))
        found += [(old[at : at + size], new[at : at + size]) for at in range(0, new.size, size)]
    return [chunk for chunk in found if chunk[0].size]


def _load(folder: Path) -> dict[str, tuple[np.ndarray, str]]:
    """Bits, as unsigned integers, and what the file says they are."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"{folder} is not a folder with safetensors files in it")
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for file in files:
        try:
            found, tags = unpack(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        for name, array in found.items():
            if array.dtype.itemsize not in (1, 2, 4):
                raise ValueError(f"tensor {name} in {file} is {tags[name]}: deltas are of 8, 16 and 32-bit values")
            if name in tensors:
                raise ValueError(f"tensor {name} is in {file} and in another file of {folder}: leave one of them there")
            tensors[name] = array.view(f"<u{array.dtype.itemsize}"), tags[name]
    if not any(array.size for array, _ in tensors.values()):
        raise ValueError(f"{folder} holds no values")
    return tensors
