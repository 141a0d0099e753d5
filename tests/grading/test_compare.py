"""Only primitives cross, exactly; two of them are equal when type and value are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.grading.compare import Foreign, Raised, Returned, Value, agrees, decode_reports, same
from stretto.grading.driver import MAX_DEPTH, NotPrimitive, encode

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text(st.characters(categories=["Cs"]))
)
values = st.recursive(
    leaves, lambda parts: st.one_of(st.lists(parts, max_size=4), st.lists(parts, max_size=4).map(tuple)), max_leaves=12
)


def reported(value: object) -> bytes:
    return b"v" + encode(value) + encode([])


@given(values)
def test_values_come_back_exactly(value: Value):
    (report,) = decode_reports(reported(value), 1)
    assert isinstance(report, Returned) and same(value, report.value)


@given(values, values)
def test_same_is_symmetric_and_finer_than_equality(one: Value, two: Value):
    assert same(one, one) and same(one, two) == same(two, one)
    if same(one, two) and "nan" not in repr(one):
        assert one == two


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (True, 1),
        (False, 0),
        (1, 1.0),
        (0, None),
        ("1", 1),
        ([1], (1,)),
        ([1, [True]], [1, [1]]),
        ([1], [1, 1]),
        ("", []),
    ],
)
def test_values_that_python_takes_for_equal_or_like_are_not_the_same(one: Value, two: Value):
    assert not same(one, two) and not same(two, one)


def test_nan_is_nan_and_nothing_else():
    assert (
        same([math.nan], [math.nan]) and not same(math.nan, 1.0) and same(0.0, -0.0) and not same(math.inf, -math.inf)
    )


class Chameleon(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    "value",
    [
        Chameleon(1),
        {1},
        {Chameleon(1): 1},
        bytearray(b"x"),
        object(),
        [1, Chameleon(1)],
        1j,
        type("S", (str,), {})("x"),
    ],
)
def test_anything_else_is_refused(value: object):
    with pytest.raises(NotPrimitive):
        encode(value)


def test_endless_and_deep_values_are_refused():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(NotPrimitive):
        encode(endless)
    deep: Value = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    (report,) = decode_reports(reported(deep), 1)
    assert isinstance(report, Returned) and same(deep, report.value)


@given(st.binary(max_size=200), st.integers(0, 5))
def test_garbage_is_no_report_and_no_crash(data: bytes, calls: int):
    assert len(decode_reports(data, calls)) <= calls


@pytest.mark.parametrize(
    "data",
    [
        b"vl99999999999:",
        b"v" + b"l1:" * 10_000 + b"n",
        b"vs-5:abc",
        b"vi0x;",
        b"vf0x1p999999;n",
        b"vb2",
        b"q",
        b"e" + encode(3),
        b"vi" + b"9" * 100,
    ],
)
def test_hostile_reports_end_the_reading(data: bytes):
    assert decode_reports(data, 3) == []
    good = reported(5)
    assert decode_reports(good + data + good, 3) == [Returned(5, [])]


def test_reports_agree_by_value_effect_and_exception():
    assert agrees(Returned(1, [[1]]), Returned(1, [[1]]))
    assert not agrees(Returned(1, [[1]]), Returned(1, [[2]]))
    assert not agrees(Returned(1, []), Returned(True, []))
    assert agrees(Raised("ValueError"), Raised("ValueError")) and not agrees(Raised("ValueError"), Raised("KeyError"))
    assert not agrees(Returned(1, []), Raised("ValueError")) and not agrees(Foreign("set"), Foreign("set"))
