"""Sixteen float32 as one value, for compiled loops that a compiler does not put into vector registers by itself.

    acc = zero()
    for j in range(0, n, LANES):
        acc = fma(load(x_N, j), load(y_N, j), acc)
    total = add_lanes(acc)

Numba makes vector code of plain loops only where it can show that it may, and it leaves short rows to scalar code. LLVM
itself knows vectors of any width and takes them apart for a processor whose registers are narrower, so this is as
portable as any compiled code. Arrays are one-dimensional, float32 (weights may be bf16) and contiguous; nothing checks
bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_LANES = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: types.Type) -> None:
        super().__init__(dmm, fe_type, _FLOATS)


def _splat(builder: Any, value: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(vector, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


def _all(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [ir.Constant(_FLOAT, value)] * LANES)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [ir.Constant(_INT, value)] * LANES)


def _called(builder: Any, name: str, result: ir.Type, arguments: list[Any], fastmath: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments, fastmath=fastmath)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, at: Any, kind: ir.Type = _FLOATS) -> Any:
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


@intrinsic
def _zero(context):
    return _LANES(), lambda context, builder, signature, arguments: _all(0.0)


@intrinsic
def _fill(context, x):
    return _LANES(types.float32), lambda context, builder, signature, arguments: _splat(builder, arguments[0])


@intrinsic
def _spread(context, x_N, at):
    def emit(context, builder, signature, arguments):
        array, at = arguments
        data = context.make_array(signature.args[0])(context, builder, value=array).data
        return _splat(builder, builder.load(builder.gep(data, [at])))

    return _LANES(x_N, types.intp), emit


@intrinsic
def _load(context, x_N, at):
    def emit(context, builder, signature, arguments):
        loaded = builder.load(_pointer(context, builder, signature.args[0], *arguments))
        loaded.align = 4
        return loaded

    def widen(context, builder, signature, arguments):
        loaded = builder.load(_pointer(context, builder, signature.args[0], *arguments, kind=_HALVES))
        loaded.align = 2
        return builder.bitcast(builder.shl(builder.zext(loaded, _INTS), _ints(16)), _FLOATS)

    return _LANES(x_N, types.intp), widen if x_N.dtype == types.uint16 else emit


@intrinsic
def _store(context, x_N, at, value):
    def emit(context, builder, signature, arguments):
        array, at, value = arguments
        builder.store(value, _pointer(context, builder, signature.args[0], array, at)).align = 4
        return context.get_dummy_value()

    return types.void(x_N, types.intp, _LANES), emit


@intrinsic
def _fma(context, a, b, c):
    def emit(context, builder, signature, arguments):
        return _called(builder, "llvm.fma.v16f32", _FLOATS, list(arguments))

    return _LANES(_LANES, _LANES, _LANES), emit


@intrinsic
def _mul(context, a, b):
    return _LANES(_LANES, _LANES), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic
def _add(context, a, b):
    return _LANES(_LANES, _LANES), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def _sub(context, a, b):
    return _LANES(_LANES, _LANES), lambda context, builder, signature, arguments: builder.fsub(*arguments)


@intrinsic
def _div(context, a, b):
    return _LANES(_LANES, _LANES), lambda context, builder, signature, arguments: builder.fdiv(*arguments)


@intrinsic
def _larger(context, a, b):
    def emit(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return _LANES(_LANES, _LANES), emit


@intrinsic
def _first(context, value, count):
    def emit(context, builder, signature, arguments):
        value, count = arguments
        number = ir.Constant(_INTS, [ir.Constant(_INT, lane) for lane in range(LANES)])
        limit = builder.bitcast(_splat(builder, builder.bitcast(builder.trunc(count, _INT), _FLOAT)), _INTS)
        return builder.select(builder.icmp_signed("<", number, limit), value, _all(float("-inf")))

    return _LANES(_LANES, types.intp), emit


@intrinsic
def _add_lanes(context, value):
    def emit(context, builder, signature, arguments):
        given = [ir.Constant(_FLOAT, 0.0), *arguments]
        return _called(builder, "llvm.vector.reduce.fadd.v16f32", _FLOAT, given, ("reassoc",))

    return types.float32(_LANES), emit


@intrinsic
def _max_lanes(context, value):
    def emit(context, builder, signature, arguments):
        return _called(builder, "llvm.vector.reduce.fmax.v16f32", _FLOAT, list(arguments))

    return types.float32(_LANES), emit


@intrinsic
def _sums(context, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15):
    def emit(context, builder, signature, arguments):
        # each round adds the halves of parts of two vectors into one vector: sixteen, eight, four, two, one
        vectors, part = list(arguments), LANES
        while len(vectors) > 1:
            half, pairs = part // 2, len(vectors) // 2
            starts = [at + of for at in range(0, LANES, part) for of in (0, LANES)]  # a's part, then b's
            lows = [start + i for start in starts for i in range(half)]
            masks = [ir.Constant(_INTS, lanes) for lanes in (lows, [lane + half for lane in lows])]
            vectors = [
                builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks))
                for a, b in zip(vectors[:pairs], vectors[pairs:], strict=True)
            ]
            part = half
        return vectors[0]

    return _LANES(*[_LANES] * LANES), emit


@intrinsic
def _exp(context, x):
    def emit(context, builder, signature, arguments):
        (x,) = arguments
        low, high = _all(-87.0), _all(88.0)
        tiny = builder.fcmp_ordered("<", x, low)
        held = builder.select(builder.fcmp_ordered(">", x, high), high, builder.select(tiny, low, x))

        def fma(a, b, c):
            return _called(builder, "llvm.fma.v16f32", _FLOATS, [a, b, c])

        magic = _all(12582912.0)  # adding 1.5 * 2^23 rounds to an integer
        shifted = fma(held, _all(1.4426950216293335), magic)
        n = builder.fsub(shifted, magic)
        r = fma(n, _all(-0.693359375), held)
        r = fma(n, _all(2.1219444170128554e-4), r)
        p = _all(1.9875691214110702e-4)
        for factor in (
            1.398199936375022e-3,
            8.333452045917511e-3,
            4.166579619050026e-2,
            0.16666665673255920,
            0.5,
        ):
            p = fma(p, r, _all(factor))
        p = fma(p, builder.fmul(r, r), builder.fadd(r, _all(1.0)))
        bits = builder.shl(builder.add(builder.bitcast(shifted, _INTS), _ints(127)), _ints(23))
        return builder.select(tiny, _all(0.0), builder.fmul(p, builder.bitcast(bits, _FLOATS)))

    return _LANES(_LANES), emit


# named for a type checker, which cannot see through numba's decorator
zero: Any = _zero
fill: Any = _fill
"""One number in all lanes; it must be a float32."""
spread: Any = _spread
"""One element of an array in all lanes."""
load: Any = _load
"""Of float32, or of uint16 that are the upper halves of float32: bf16."""
store: Any = _store
fma: Any = _fma
"""a * b + c, rounded once."""
mul: Any = _mul
add: Any = _add
sub: Any = _sub
div: Any = _div
larger: Any = _larger
"""The larger of each pair; b where either is nan."""
first: Any = _first
"""Only the first so many lanes; the others become -inf."""
add_lanes: Any = _add_lanes
max_lanes: Any = _max_lanes
sums: Any = _sums
"""The sums of sixteen vectors, one to a lane."""
exp: Any = _exp
"""e ** x within two units in the last place, as in `model.kernels`, but 0 below -87."""
