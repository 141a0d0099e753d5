"""A small model that trains by chance: named bf16 tensors, and steps of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

Tensors = dict[str, np.ndarray]


def make_model(seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    shapes = {f"layers.{i}.experts.{e}.up.weight": (16, 24) for i in range(2) for e in range(3)}
    shapes |= {"embed.weight": (50, 16), "norm.weight": (16,), "scale": (), "nothing": (0, 4)}
    return {name: rng.integers(0x3C00, 0x3F80, shape, dtype=np.uint16) for name, shape in shapes.items()}


def next_model(tensors: Tensors, seed: int, share: float = 0.05) -> Tensors:
    """Some values one ulp up or down, a few somewhere else."""
    rng = np.random.default_rng(seed)
    moved = {}
    for name, old in tensors.items():
        step = np.where(rng.random(old.shape) < share, rng.choice([-1, 1], old.shape), 0)
        moved[name] = np.asarray((old.astype(np.int64) + step).clip(0, 0x7F7F), np.uint16)
    return moved


@pytest.fixture
def model() -> Tensors:
    return make_model()


@pytest.fixture
def step() -> Callable[..., Tensors]:
    return next_model
