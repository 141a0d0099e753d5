"""Products with small weights, of one matrix or of all experts in one compiled loop: y = x W^T, and both slopes.

A mixture of small experts makes many small products, and a BLAS spends much of each on its beginning. Here the weights
of an expert are laid out once in panels of `COLUMNS` columns, and blocks of rows go past them (`tiles.py`), as in
Goto's "Anatomy of high-performance matrix multiplication" (2008), without more levels than small matrices need. One
thread, float32.

Shapes: x [N, A], W [E, B, A], y [N, B]; the rows of an expert lie together, `sizes` [E] sums to N.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.model.kernels import compiled, own_memory
from stretto.model.simd import LANES, load, store
from stretto.model.tiles import COLUMNS, ROWS, add_product, multiply

BLOCK = 64
"""Rows that stay near while the panels go by."""
LARGEST = 1 << 20
"""Weights of a matrix that stays in the cache; beyond it a BLAS, which divides it further, is as fast or faster."""
STRIP = 64
"""Columns of dy that are copied together for the slope of a weight."""


@compiled()
def _copy(x, at, row, rows, width, out, to, out_row):
    """`rows` rows of `width` floats, `row` and `out_row` apart."""
    for _ in range(rows):
        for i in range(0, width, LANES):
            store(out, to + i, load(x, at + i))
        at, to = at + row, to + out_row


@compiled()
def _panels(x, at, rows, width, out):
    """Panels of a matrix [rows, width]: each `COLUMNS` of its columns in one piece."""
    for n in range(0, width, COLUMNS):
        _copy(x, at + n, width, rows, COLUMNS, out, n * rows, COLUMNS)


@compiled()
def _turned_panels(weight_BA, out_XC):
    """Panels of the transpose of a matrix."""
    width = weight_BA.shape[1]
    for n in range(0, len(weight_BA), COLUMNS):
        for a in range(width):
            for j in range(COLUMNS):
                out_XC[n // COLUMNS * width + a, j] = weight_BA[n + j, a]


@compiled()
def _past(x, x_row, y, y_row, start, count, panels):
    """y = x times the panels, for `count` rows from `start`; a multiple of `ROWS`."""
    for block in range(start, start + count, BLOCK):
        rows = min(BLOCK, start + count - block)
        for n in range(0, y_row, COLUMNS):
            at = block * x_row
            multiply(y, block * y_row + n, y_row, x, at, x_row, 1, panels, n * x_row, COLUMNS, rows, COLUMNS, x_row)


@compiled()
def _products(x_NA, weight_EBA, sizes_E, transposed, y_NB):
    width, height = x_NA.shape[1], y_NB.shape[1]
    panels_XC = np.empty((width * height // COLUMNS, COLUMNS), np.float32)
    few_RA, few_RB = np.zeros((ROWS, width), np.float32), np.empty((ROWS, height), np.float32)
    x, y, panels, weight = x_NA.reshape(-1), y_NB.reshape(-1), panels_XC.reshape(-1), weight_EBA.reshape(-1)
    start = 0
    for e in range(len(sizes_E)):
        if sizes_E[e] == 0:
            continue
        if transposed:
            _turned_panels(weight_EBA[e], panels_XC)
        else:
            _panels(weight, e * width * height, width, height, panels)
        left = sizes_E[e] % ROWS
        whole = sizes_E[e] - left
        _past(x, width, y, height, start, whole, panels)
        if left:
            at = start + whole
            few_RA[:left] = x_NA[at : at + left]
            _past(few_RA.reshape(-1), width, few_RB.reshape(-1), height, 0, ROWS, panels)
            y_NB[at : at + left] = few_RB[:left]
        start += sizes_E[e]


@compiled()
def _weight_slopes(x_NA, dy_NB, sizes_E, dweight_EBA):
    width, height = x_NA.shape[1], dy_NB.shape[1]
    panels, near = np.empty(width * BLOCK, np.float32), np.empty(BLOCK * STRIP, np.float32)
    x, dy, slopes = x_NA.reshape(-1), dy_NB.reshape(-1), dweight_EBA.reshape(-1)
    start = 0
    for e in range(len(sizes_E)):
        dweight_EBA[e] = 0
        for block in range(start, start + sizes_E[e], BLOCK):
            rows = min(BLOCK, start + sizes_E[e] - block)
            _panels(x, block * width, rows, width, panels)
            for strip in range(0, height, STRIP):
                many = min(STRIP, height - strip)
                _copy(dy, block * height + strip, height, rows, many, near, 0, STRIP)
                for n in range(0, width, COLUMNS):
                    to = (e * height + strip) * width + n
                    add_product(slopes, to, width, near, 0, 1, STRIP, panels, n * rows, COLUMNS, many, COLUMNS, rows)
        start += sizes_E[e]


def fits(height: int, width: int) -> bool:
    """Whether these loops are for weights [height, width]."""
    return height % COLUMNS == width % COLUMNS == 0 and height * width <= LARGEST


def products(x_NA: Tensor, weight_EBA: Tensor, sizes: list[int]) -> Tensor:
    """y [N, B]."""
    y_NB = x_NA.new_empty(len(x_NA), weight_EBA.shape[1])
    _products(own_memory(x_NA.contiguous()), own_memory(weight_EBA), np.array(sizes, np.int64), True, own_memory(y_NB))
    return y_NB


def slopes(x_NA: Tensor, weight_EBA: Tensor, sizes: list[int], dy_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of W."""
    dx_NA, dweight_EBA, dy_NB = torch.empty_like(x_NA), torch.empty_like(weight_EBA), dy_NB.contiguous()
    counts = np.array(sizes, np.int64)
    _products(own_memory(dy_NB), own_memory(weight_EBA), counts, False, own_memory(dx_NA))
    _weight_slopes(own_memory(x_NA), own_memory(dy_NB), counts, own_memory(dweight_EBA))
    return dx_NA, dweight_EBA


class Product(torch.autograd.Function):
    """`Product.apply(x_NA, weight_BA)`: x W^T."""

    @staticmethod
    def forward(ctx: Any, x_NA: Tensor, weight_BA: Tensor) -> Tensor:
        x_NA = x_NA.contiguous()
        ctx.save_for_backward(x_NA, weight_BA)
        return products(x_NA, weight_BA.unsqueeze(0), [len(x_NA)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_NA, weight_BA = ctx.saved_tensors
        dx_NA, dweight_1BA = slopes(x_NA, weight_BA.unsqueeze(0), [len(x_NA)], grads[0])
        return dx_NA, dweight_1BA[0]
