"""Products of few rows with weights, as compiled loops: of one vector, and of the rows of each expert.

Arrays are as in `compiled`. A sum runs over `LANES` partial sums, in an order that depends on the width alone.
"""

from __future__ import annotations

import numpy as np

from stretto.model.kernels import compiled
from stretto.model.simd import LANES, add_lanes, fma, load, store, sums, zero


@compiled()
def times(weights, start, rows, width, x, at, out, to):
    """`rows` rows of weights, which begin at `start`, times the vector that begins at `at`."""
    whole = rows // LANES * LANES
    for b in range(0, whole, LANES):
        s0, s1, s2, s3, s4, s5, s6, s7 = zero(), zero(), zero(), zero(), zero(), zero(), zero(), zero()
        s8, s9, s10, s11, s12, s13, s14, s15 = zero(), zero(), zero(), zero(), zero(), zero(), zero(), zero()
        for i in range(0, width, LANES):
            lanes, y = load(x, at + i), start + b * width + i
            s0, s1 = fma(lanes, load(weights, y), s0), fma(lanes, load(weights, y + width), s1)
            s2, s3 = fma(lanes, load(weights, y + 2 * width), s2), fma(lanes, load(weights, y + 3 * width), s3)
            s4, s5 = fma(lanes, load(weights, y + 4 * width), s4), fma(lanes, load(weights, y + 5 * width), s5)
            s6, s7 = fma(lanes, load(weights, y + 6 * width), s6), fma(lanes, load(weights, y + 7 * width), s7)
            s8, s9 = fma(lanes, load(weights, y + 8 * width), s8), fma(lanes, load(weights, y + 9 * width), s9)
            s10, s11 = fma(lanes, load(weights, y + 10 * width), s10), fma(lanes, load(weights, y + 11 * width), s11)
            s12, s13 = fma(lanes, load(weights, y + 12 * width), s12), fma(lanes, load(weights, y + 13 * width), s13)
            s14, s15 = fma(lanes, load(weights, y + 14 * width), s14), fma(lanes, load(weights, y + 15 * width), s15)
        store(out, to + b, sums(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15))
    for r in range(whole, rows):
        total = zero()
        for i in range(0, width, LANES):
            total = fma(load(x, at + i), load(weights, start + r * width + i), total)
        out[to + r] = add_lanes(total)


@compiled()
def products(x, width, weights, height, sizes_E, out):
    """The product of each expert's rows of x, `width` wide, with its `height` rows of weights; both multiples of
    `LANES`. Four rows of each at a time, whose sixteen sums are then the lanes of one vector; fewer than four rows one
    by one. A product comes out the same either way, to the bit."""
    tile = np.empty(LANES, np.float32)
    start = 0
    for e in range(len(sizes_E)):
        end = start + sizes_E[e]
        if end - start < 4:
            for r in range(start, end):
                times(weights, e * height * width, height, width, x, r * width, out, r * height)
            start = end
            continue
        for b in range(0, height, 4):
            w = (e * height + b) * width
            for r in range(start, end, 4):  # rows beyond the end are the last one again, and not written
                x0, x1, x2, x3 = r, min(r + 1, end - 1), min(r + 2, end - 1), min(r + 3, end - 1)
                s0, s1, s2, s3, s4, s5, s6, s7 = zero(), zero(), zero(), zero(), zero(), zero(), zero(), zero()
                s8, s9, s10, s11, s12, s13, s14, s15 = zero(), zero(), zero(), zero(), zero(), zero(), zero(), zero()
                for i in range(0, width, LANES):
                    w0, w1 = load(weights, w + i), load(weights, w + width + i)
                    w2, w3 = load(weights, w + 2 * width + i), load(weights, w + 3 * width + i)
                    lanes = load(x, x0 * width + i)
                    s0, s1, s2, s3 = fma(lanes, w0, s0), fma(lanes, w1, s1), fma(lanes, w2, s2), fma(lanes, w3, s3)
                    lanes = load(x, x1 * width + i)
                    s4, s5, s6, s7 = fma(lanes, w0, s4), fma(lanes, w1, s5), fma(lanes, w2, s6), fma(lanes, w3, s7)
                    lanes = load(x, x2 * width + i)
                    s8, s9, s10, s11 = fma(lanes, w0, s8), fma(lanes, w1, s9), fma(lanes, w2, s10), fma(lanes, w3, s11)
                    lanes = load(x, x3 * width + i)
                    s12, s13, s14, s15 = (
                        fma(lanes, w0, s12),
                        fma(lanes, w1, s13),
                        fma(lanes, w2, s14),
                        fma(lanes, w3, s15),
                    )
                store(tile, 0, sums(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15))
                for k in range(min(4, end - r)):
                    for c in range(4):
                        out[(r + k) * height + b + c] = tile[4 * k + c]
        start = end
