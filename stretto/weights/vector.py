"""What numba has no words for, as LLVM instructions that every processor has: vectors, and integers of few bits. LLVM
makes of them whatever the machine does best. None of them checks an index: that there is room, the caller knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from stretto.weights.numberline import FIELDS

LANES = 64
"""Elements compared at once, and weighed at once."""

BLOCK = 8
"""Weights that are summed together."""

AHEAD = 32
"""Sums that are compared at once."""

HEAVIEST = 20
"""log2 of the largest weight."""

_BYTE, _HALF, _WORD, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _arrays(*arguments: Any) -> bool:
    return all(isinstance(a, types.Array) and a.layout == "C" for a in arguments)


class _Code:
    """The instructions of one intrinsic, whose arguments are arrays of unsigned integers, and int64."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.context, self.build, self.kinds, self.arguments = context, builder, signature.args, arguments

    def place(self, which: int, at: Any) -> Any:
        data = self.context.make_array(self.kinds[which])(self.context, self.build, self.arguments[which]).data
        return cgutils.gep(self.build, data, at)

    def load(self, which: int, at: Any, lanes: int) -> Any:
        dtype = self.kinds[which].dtype
        vector = ir.VectorType(self.context.get_value_type(dtype), lanes)
        loaded = self.build.load(self.build.bitcast(self.place(which, at), vector.as_pointer()))
        loaded.align = dtype.bitwidth // 8
        return loaded

    def store(self, value: Any, which: int, at: Any) -> None:
        place = self.build.bitcast(self.place(which, at), value.type.as_pointer())
        self.build.store(value, place).align = self.kinds[which].dtype.bitwidth // 8

    def splat(self, value: Any, kind: Any, lanes: int) -> Any:
        """A number known now or later, in each lane."""
        if isinstance(value, int):
            return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)
        none = ir.Constant(ir.VectorType(kind, lanes), ir.Undefined)
        value = self.build.trunc(value, kind) if value.type.width > kind.width else value
        first = self.build.insert_element(none, value, ir.Constant(_WORD, 0))
        return self.pick(first, none, [0] * lanes)

    def pick(self, first: Any, second: Any, lanes: list[int]) -> Any:
        return self.build.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))

    def weights(self, which: int, at: Any, lanes: int) -> Any:
        """2^t of so many bytes t."""
        shifts = self.build.zext(self.load(which, at, lanes), ir.VectorType(_WORD, lanes))
        return self.build.shl(self.splat(1, _WORD, lanes), shifts)

    def running(self, vector: Any) -> Any:
        """Sums of the first 1, 2, .. numbers."""
        lanes, step, zero = vector.type.count, 1, self.splat(0, _WORD, vector.type.count)
        while step < lanes:
            order = [lanes + lane if lane < step else lane - step for lane in range(lanes)]
            vector, step = self.build.add(vector, self.pick(vector, zero, order)), 2 * step
        return vector

    def halves(self, vector: Any) -> Any:
        """Sums of neighbours."""
        even, odd = (list(range(start, vector.type.count, 2)) for start in (0, 1))
        return self.build.add(self.pick(vector, vector, even), self.pick(vector, vector, odd))

    def sum(self, vector: Any) -> Any:
        name = f"llvm.vector.reduce.add.v{vector.type.count}i32"
        function = cgutils.get_or_insert_function(self.build.module, ir.FunctionType(_WORD, [vector.type]), name)
        return self.build.zext(self.build.call(function, [vector]), _LONG)

    def count(self, flags: Any) -> Any:
        return self.build.zext(self.build.ctpop(self.build.bitcast(flags, ir.IntType(flags.type.count))), _LONG)

    def turned(self, bits: Any) -> Any:
        """Sign and magnitude to two's complement, or back: see `numberline.ordered`."""
        kind = bits.type
        sign = self.build.ashr(bits, ir.Constant(kind, kind.width - 1))
        return self.build.xor(bits, self.build.lshr(sign, ir.Constant(kind, 1)))

    def number(self, which: int, at: Any) -> Any:
        return self.turned(self.build.load(self.place(which, at)))


def _instructions(result: Any, *kinds: Any) -> Callable[[Callable[[_Code], Any]], Callable[..., Any]]:
    """Makes a function for numba of one that writes its instructions. Arguments are arrays (None) or of these kinds."""

    def made(generate: Callable[[_Code], Any]) -> Callable[..., Any]:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = generate(_Code(context, builder, signature, arguments))
            return context.get_dummy_value() if value is None else value

        def typed(_: Any, *arguments: Any) -> Any:
            pairs = list(zip(arguments, kinds, strict=True))
            if not all(_arrays(argument) for argument, kind in pairs if kind is None):
                return None
            return result(*(argument if kind is None else kind for argument, kind in pairs)), build

        names = ["typing", *(f"argument{which}" for which in range(len(kinds)))]
        plain = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__name__, typed.__doc__ = generate.__name__, generate.__doc__
        vars(typed)["__signature__"] = inspect.Signature(plain)
        return intrinsic(typed)

    return made


@_instructions(types.uint64, None, None, types.int64)
def differs(code: _Code) -> Any:
    """(old, new, at) Bit i: do elements `at` + i differ? LANES of them."""
    sides = [code.load(which, code.arguments[2], LANES) for which in (0, 1)]
    return code.build.bitcast(code.build.icmp_unsigned("!=", *sides), _LONG)


@_instructions(types.void, None, types.int64, types.int64, types.int64, None, types.int64)
def slope(code: _Code) -> None:
    """(old, at, flat, foot, out, place) Of LANES elements from `at` on, into the bytes `out` from `place` on: HEAVIEST
    where the exponent is less than `flat`, else `foot` less the exponent, within 0 and HEAVIEST. Both fit a byte."""
    build, kind = code.build, code.context.get_value_type(code.kinds[0].dtype)
    shift, mask = FIELDS[kind.width // 8]
    bits = build.lshr(code.load(0, code.arguments[1], LANES), code.splat(shift, kind, LANES))
    bits = build.trunc(bits, ir.VectorType(_BYTE, LANES)) if kind.width > 8 else bits
    bits = bits if mask == 255 else build.and_(bits, code.splat(mask, _BYTE, LANES))
    name = f"llvm.usub.sat.v{LANES}i8"
    function = cgutils.get_or_insert_function(build.module, ir.FunctionType(bits.type, [bits.type] * 2), name)
    most = code.splat(HEAVIEST, _BYTE, LANES)
    t = build.call(function, [code.splat(code.arguments[3], _BYTE, LANES), bits])
    t = build.select(build.icmp_unsigned("<", t, most), t, most)
    t = build.select(build.icmp_unsigned("<", bits, code.splat(code.arguments[2], _BYTE, LANES)), most, t)
    code.store(t, 4, code.arguments[5])


@_instructions(types.uint32, None, types.int64, types.uint32, None, types.int64)
def accumulate(code: _Code) -> Any:
    """(shifts, at, total, out, place) `total` and the weights 2^t from `at` on, up to the end of each BLOCK of LANES:
    into `out` from `place` on. Returns the last."""
    build, lanes = code.build, LANES // 4
    four = build.bitcast(code.load(0, code.arguments[1], LANES), ir.VectorType(_WORD, lanes))
    one, byte = code.splat(1, _WORD, lanes), code.splat(255, _WORD, lanes)
    blocks = code.splat(0, _WORD, lanes)
    for which in range(4):  # of each four bytes
        shifts = build.and_(build.lshr(four, code.splat(8 * which, _WORD, lanes)), byte)
        blocks = build.add(blocks, build.shl(one, shifts))
    while blocks.type.count > LANES // BLOCK:
        blocks = code.halves(blocks)
    sums = code.running(blocks)
    code.store(build.add(sums, code.splat(code.arguments[2], _WORD, LANES // BLOCK)), 3, code.arguments[4])
    return build.add(code.arguments[2], build.extract_element(sums, ir.Constant(_WORD, LANES // BLOCK - 1)))


@_instructions(types.int64, None, types.int64, types.int64)
def weight(code: _Code) -> Any:
    """(shifts, at, count) Sum of the first `count` of the BLOCK weights 2^t from `at` on."""
    kind = ir.VectorType(_WORD, BLOCK)
    counted = code.build.icmp_unsigned(
        "<", ir.Constant(kind, list(range(BLOCK))), code.splat(code.arguments[2], _WORD, BLOCK)
    )
    weights = code.weights(0, code.arguments[1], BLOCK)
    return code.sum(code.build.select(counted, weights, code.splat(0, _WORD, BLOCK)))


def _passed(code: _Code) -> tuple[Any, Any]:
    """BLOCK weights, and which of the sums up to there are at most the third argument."""
    weights = code.weights(0, code.arguments[1], BLOCK)
    limit = code.splat(code.arguments[2], _WORD, BLOCK)
    return weights, code.build.icmp_unsigned("<=", code.running(weights), limit)


@_instructions(types.int64, None, types.int64, types.int64)
def within(code: _Code) -> Any:
    """(shifts, at, most) How many of the BLOCK weights 2^t from `at` on have a sum of at most `most`: not all."""
    return code.count(_passed(code)[1])


@_instructions(types.int64, None, types.int64, types.int64)
def sum_within(code: _Code) -> Any:
    """The sum of those that `within` counts. LLVM does only once what both need."""
    weights, passed = _passed(code)
    return code.sum(code.build.select(passed, weights, code.splat(0, _WORD, BLOCK)))


@_instructions(types.int64, None, types.int64, types.int64)
def reached(code: _Code) -> Any:
    """(sums, at, most) How many of AHEAD numbers (uint32) from `at` on are at most `most`."""
    limit = code.splat(code.arguments[2], _WORD, AHEAD)
    return code.count(code.build.icmp_unsigned("<=", code.load(0, code.arguments[1], AHEAD), limit))


@_instructions(types.void, None, types.int64)
def fetch(code: _Code) -> None:
    """(array, at) Bring what is there closer; it may be beyond the end."""
    place = code.build.bitcast(code.place(0, code.arguments[1]), _BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, _WORD, _WORD, _WORD])
    function = cgutils.get_or_insert_function(code.build.module, kind, "llvm.prefetch.p0")
    code.build.call(function, [place, *(ir.Constant(_WORD, value) for value in (0, 2, 1))])  # to read, near, data


@_instructions(types.int64, None, types.int64)
def exponent(code: _Code) -> Any:
    """(array, at) The exponent of an element."""
    shift, mask = FIELDS[code.kinds[0].dtype.bitwidth // 8]
    bits = code.build.load(code.place(0, code.arguments[1]))
    bits = code.build.and_(code.build.lshr(bits, ir.Constant(bits.type, shift)), ir.Constant(bits.type, mask))
    return code.build.zext(bits, _LONG)


@_instructions(types.int64, None, types.int64)
def number(code: _Code) -> Any:
    """(array, at) An element as a number in numeric order: see `numberline.py`."""
    return code.build.sext(code.number(0, code.arguments[1]), _LONG)


@_instructions(types.int64, None, None, types.int64)
def step(code: _Code) -> Any:
    """(old, new, at) How far an element moved, around the end of the number line if that is shorter."""
    new, old = (code.number(which, code.arguments[2]) for which in (1, 0))
    return code.build.sext(code.build.sub(new, old), _LONG)


@_instructions(types.void, None, types.int64, types.int64)
def set_number(code: _Code) -> None:
    """(array, at, number) Undoes `number`; of a number outside, the low bits."""
    kind = code.context.get_value_type(code.kinds[0].dtype)
    value = code.arguments[2] if kind.width == 64 else code.build.trunc(code.arguments[2], kind)
    code.build.store(code.turned(value), code.place(0, code.arguments[1]))


@_instructions(types.int64, None, types.int64)
def get(code: _Code) -> Any:
    """(array, at) As int64, without asking whether the index is negative."""
    bits = code.build.load(code.place(0, code.arguments[1]))
    return bits if bits.type.width == 64 else code.build.zext(bits, _LONG)


@_instructions(types.void, None, types.int64, types.int64)
def put(code: _Code) -> None:
    """(array, at, value) Its low bits, without asking whether the index is negative."""
    kind = code.context.get_value_type(code.kinds[0].dtype)
    value = code.arguments[2] if kind.width == 64 else code.build.trunc(code.arguments[2], kind)
    code.build.store(value, code.place(0, code.arguments[1]))


@_instructions(types.int64, types.uint64)
def trailing_zeros(code: _Code) -> Any:
    """64 if it is zero."""
    return code.build.cttz(code.arguments[0], ir.IntType(1)(0))


@_instructions(types.int64, types.uint64)
def ones(code: _Code) -> Any:
    """How many bits are set."""
    return code.build.ctpop(code.arguments[0])
