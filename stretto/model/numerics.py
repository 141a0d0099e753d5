"""How exactly trainer and engine agree, and what each side's network does for it.

    fast      each side as it likes: the trainer computes in float32, whatever the engine does
    ordered   both round activations at the same places, and add the experts of a token in the same order
    exact     both compute each row in an order that depends on nothing else in the batch: equal to the bit

`rounding` is what bf16 hardware with float32 accumulation does: results are stored as bf16, sums inside are float32.
On a CPU the arithmetic stays float32 on values that bf16 can hold, because native bf16 is slow there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Level(StrEnum):
    """The setting `model.numerics`."""

    FAST = "fast"
    ORDERED = "ordered"
    EXACT = "exact"


@dataclass(frozen=True)
class Numerics:
    """What a network does beside float32 arithmetic."""

    rounding: bool = False  # activations are rounded to bf16 where bf16 hardware would store them
    exact: bool = False  # a row's result does not depend on the rows computed with it
    fused: bool = False  # compiled loops in place of torch's, products and attention included: faster on one thread

    def compiled(self, x: Tensor) -> bool:
        """Whether `kernels` work on `x`. On other devices networks that round hold bf16 tensors, and torch rounds."""
        return (self.rounding or self.exact or self.fused) and x.dtype == torch.float32 and x.device.type == "cpu"

    def tiled(self, x: Tensor) -> bool:
        """Whether products of `x` are compiled too: nothing is rounded, and their order is free."""
        return self.fused and not self.rounding and not self.exact and self.compiled(x)


PLAIN = Numerics()
"""float32, in whatever order is fastest."""


def engine_numerics(level: Level | str, engine_dtype: str) -> Numerics:
    """Of the network that samples. `engine_dtype` is `engine.dtype`: float32 or bfloat16."""
    return Numerics(rounding=_rounds(engine_dtype), exact=Level(level) is Level.EXACT)


def trainer_numerics(level: Level | str, engine_dtype: str) -> Numerics:
    """Of the network that learns: as the engine's, but for `fast`, where it computes in plain float32."""
    return PLAIN if Level(level) is Level.FAST else engine_numerics(level, engine_dtype)


def _rounds(engine_dtype: str) -> bool:
    if engine_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"engine.dtype is {engine_dtype!r}; it is float32 or bfloat16")
    return engine_dtype == "bfloat16"
