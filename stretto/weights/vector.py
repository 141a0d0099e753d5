"""Two things numba has no words for, as LLVM instructions that every processor has: compare 64 elements at once, and
count trailing zeros. LLVM makes of them whatever the machine does best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64
"""Elements compared at once."""


def _differs(typing: Any, old: Any, new: Any, at: Any) -> Any:
    """Bit i of the uint64: do elements `at` + i of two contiguous arrays of unsigned integers differ? There must be
    LANES elements from `at` on, which is not checked."""
    if not (isinstance(old, types.Array) and old.dtype == new.dtype and old.layout == new.layout == "C"):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = context.get_value_type(old.dtype)
        vector = ir.VectorType(element, LANES)
        sides = []
        for kind, argument in zip(signature.args[:2], arguments[:2]):
            data = context.make_array(kind)(context, builder, argument).data
            place = cgutils.gep(builder, data, arguments[2])
            block = builder.load(builder.bitcast(place, vector.as_pointer()))
            block.align = old.dtype.bitwidth // 8
            sides.append(block)
        return builder.bitcast(builder.icmp_unsigned("!=", *sides), ir.IntType(LANES))

    return types.uint64(old, new, types.intp), generate


differs: Callable[..., Any] = intrinsic(_differs)


def _trailing_zeros(typing: Any, bits: Any) -> Any:
    """Of a uint64 that is not zero, as int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


trailing_zeros: Callable[..., Any] = intrinsic(_trailing_zeros)
