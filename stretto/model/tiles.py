"""A small matrix product held in registers, for compiled loops that need many of them.

A call of a BLAS costs as much as a product of 16 x 16 x 32 does. The innermost block is `ROWS` sums of `COLUMNS`
floats, to which each step adds one row of the right matrix times `ROWS` elements of the left one.

Matrices lie anywhere in flat float32 arrays: `at` is where one begins, `row` how far apart its rows are. The left one
has a `step` between its columns too, so that it may be read transposed. Rows of the others are contiguous.
"""

from __future__ import annotations

from stretto.model.kernels import compiled
from stretto.model.simd import LANES, add, fma, load, spread, store, zero

ROWS, COLUMNS = 4, LANES
"""Of a block. With 8 floats in a register it takes 8 of the 16 registers for its sums."""


@compiled()
def _block(a, a_at, a_row, a_step, b, b_at, b_row, steps):
    s0, s1, s2, s3 = zero(), zero(), zero(), zero()
    for k in range(steps):
        right, at = load(b, b_at + k * b_row), a_at + k * a_step
        s0 = fma(spread(a, at), right, s0)
        s1 = fma(spread(a, at + a_row), right, s1)
        s2 = fma(spread(a, at + 2 * a_row), right, s2)
        s3 = fma(spread(a, at + 3 * a_row), right, s3)
    return s0, s1, s2, s3


@compiled()
def multiply(c, c_at, c_row, a, a_at, a_row, a_step, b, b_at, b_row, rows, columns, steps):
    """C = A B. `rows` and `columns` are multiples of `ROWS` and `COLUMNS`."""
    for n in range(0, columns, COLUMNS):
        for m in range(0, rows, ROWS):
            s0, s1, s2, s3 = _block(a, a_at + m * a_row, a_row, a_step, b, b_at + n, b_row, steps)
            at = c_at + m * c_row + n
            store(c, at, s0)
            store(c, at + c_row, s1)
            store(c, at + 2 * c_row, s2)
            store(c, at + 3 * c_row, s3)


@compiled()
def add_product(c, c_at, c_row, a, a_at, a_row, a_step, b, b_at, b_row, rows, columns, steps):
    """C += A B."""
    for n in range(0, columns, COLUMNS):
        for m in range(0, rows, ROWS):
            s0, s1, s2, s3 = _block(a, a_at + m * a_row, a_row, a_step, b, b_at + n, b_row, steps)
            at = c_at + m * c_row + n
            store(c, at, add(load(c, at), s0))
            store(c, at + c_row, add(load(c, at + c_row), s1))
            store(c, at + 2 * c_row, add(load(c, at + 2 * c_row), s2))
            store(c, at + 3 * c_row, add(load(c, at + 3 * c_row), s3))
