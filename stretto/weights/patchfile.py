"""What changed between two versions, decoded, as a file for the engines of a cluster: one decodes, all scatter.

    follower:  patches of each tensor ──▶ `save` ──▶ cache/<chain>-v000007-from-….patch ──▶ `load` by each engine

A safetensors file with, per tensor that changed, `<n>/at/<name>` (uint32, ascending, into the flattened tensor) and
`<n>/to/<name>` (the new values), or `<n>/all/<name>` where most of it is new. `n` is the order
in which they are written. Who applies it checks what comes out: the file itself is not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.weights.tensorfile import save as save_tensors
from stretto.weights.tensorfile import unpack

DENSE = 3
"""A tensor of which more than 1/DENSE changed is written whole: a position costs two bf16 values."""


@dataclass(frozen=True)
class Change:
    """New values (unsigned integers of the tensor's width) of one tensor: at `positions`, or all of them if None."""

    name: str
    positions: np.ndarray | None
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def write(self, array: np.ndarray) -> None:
        """Into a contiguous tensor, in place. ValueError when it does not fit."""
        flat = array.reshape(-1)
        if self.positions is None:
            flat[:] = self.values.reshape(-1)
        else:
            flat[self.positions] = self.values


def save(path: Path, changes: Sequence[Change], tags: Mapping[str, str]) -> None:
    """Write the file; `tags` are the tensors' dtypes. OSError when it cannot be written."""
    tensors: dict[str, np.ndarray] = {}
    kinds: dict[str, str] = {}
    for number, change in enumerate(changes):
        way = "all" if change.positions is None else "to"
        key = f"{number}/{way}/{change.name}"
        tensors[key], kinds[key] = change.values, tags[change.name]
        if change.positions is not None:
            key = f"{number}/at/{change.name}"
            tensors[key], kinds[key] = change.positions, "U32"
    save_tensors(path, tensors, kinds)


def load(path: Path, sizes: Mapping[str, int]) -> list[Change]:
    """The changes, in order. `sizes` are the elements of each tensor there is; ValueError names one that is not, or
    that the changes do not fit; OSError when the file cannot be read."""
    tensors, _ = unpack(path.read_bytes())
    changes = []
    for key in sorted((key for key in tensors if "/at/" not in key), key=lambda key: int(key.partition("/")[0])):
        number, way, name = key.split("/", 2)
        positions, values = tensors.get(f"{number}/at/{name}"), tensors[key].reshape(-1)
        size = sizes.get(name)
        if size is None:
            raise ValueError(f"{path} has changes of tensor {name}, which this network has not")
        if way == "all":
            fits = positions is None and values.size == size
        else:
            fits = (
                positions is not None
                and positions.dtype == np.uint32
                and positions.shape == values.shape
                and (not values.size or int(positions.max()) < size)
            )
        if not fits:
            raise ValueError(f"{path}: the changes of tensor {name} do not fit its {size} elements")
        changes.append(Change(name, positions, values))
    return changes
