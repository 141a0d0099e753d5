"""One matrix product, as the numerics of its network want it.

A row of a product depends on how many rows there are: libraries have kernels of their own for few of them, which add in
another order. Multiples of eight get the same kernel whatever their number, so `exact` pads rows to that; `selftest`
measures it on the machine at hand.

Shapes: `N` rows, `A` width in, `B` width out.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stretto.model import grouped, kernels
from stretto.model.numerics import Numerics

ROWS = 8
"""Rows of an exact product are padded to a multiple of this."""


def padding(rows: int) -> int:
    """How many rows are missing to the next multiple of `ROWS`."""
    return -rows % ROWS


def product(x_NA: Tensor, weight_BA: Tensor, bias_B: Tensor | None, exact: bool) -> Tensor:
    """x @ weight^T + bias; with `exact` each row is what it would be in any other company."""
    rows = len(x_NA)
    if not exact or not (missing := padding(rows)):
        return F.linear(x_NA, weight_BA, bias_B)
    return F.linear(F.pad(x_NA, (0, 0, 0, missing)), weight_BA, bias_B)[:rows]


class Linear(nn.Linear):
    """`nn.Linear` on rows, its result rounded where the network rounds."""

    def __init__(self, width_in: int, width_out: int, numerics: Numerics, bias: bool = False) -> None:
        super().__init__(width_in, width_out, bias=bias)
        self.numerics = numerics

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is None and self.numerics.tiled(input) and grouped.fits(*self.weight.shape):
            return grouped.Product.apply(input, self.weight)
        y_NB = product(input, self.weight, self.bias, self.numerics.exact)
        if self.numerics.rounding and self.numerics.compiled(y_NB):
            kernels.round_(y_NB)
        return y_NB
