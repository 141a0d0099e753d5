"""Twins of tests: no right program passes one, and each way to pass every test passes them too."""

from __future__ import annotations

import random
import unittest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.grading import twins

SOURCES = {
    "literal": "def test_a():\n    assert f(2) == 4\n",
    "literal on the left": "def test_a():\n    assert 4 == f(2)\n",
    "several": "def test_a():\n    assert f(2) == 4\n    assert f(1) != 3\n    assert f(3) > 5\n",
    "name": "def test_a(x=2, e=4):\n    assert f(x) == e\n",
    "another call": "def test_a():\n    assert f(2) == f(1) + f(1)\n",
    "truth": "def test_a():\n    assert f(2)\n    assert not f(0)\n",
    "is": "def test_a():\n    assert g() is None\n",
    "in": "def test_a():\n    assert f(1) in (2, 3)\n",
    "message": "def test_a():\n    assert f(2) == 4, 'four'\n",
    "chain": "def test_a():\n    assert 3 < f(2) < 5\n",
    "raises": "def test_a():\n    with pytest.raises(TypeError):\n        f(None)\n",
    "raises a call": "def test_a():\n    pytest.raises(TypeError, f, None)\n",
    "loop": "def test_a():\n    for x, e in [(1, 2), (2, 4)]:\n        assert f(x) == e\n",
    "loop over results": "def test_a():\n    for x in f([1]):\n        assert x == 1\n",
    "nested": "def test_a():\n    if f(1) == 2:\n        assert f(2) == 4\n",
    "returns early": "def test_a():\n    '''Says.'''\n    if f(1):\n        return\n    assert f(2) == 5\n",
    "nothing": "def test_a():\n    f(2)\n",
    "dict": "def test_a():\n    assert {'a': f(2)} == {'a': 4}\n",
    "float": "def test_a():\n    assert f(0.25) == 0.5\n",
    "list": "def test_a():\n    assert [f(1), f(2)] == [2, 4]\n",
    "empty": "def test_a():\n    assert f([]) == []\n",
    "name for a literal": "def test_a():\n    want = [1, 1]\n    assert f([1]) == want\n",
    "name of the module": "WANT = 4\n\n\ndef test_a():\n    assert f(2) == WANT\n",
    "name used twice": "def test_a():\n    want = 4\n    assert f(2) == want\n    assert f(want) == 8\n",
    "name that is changed": "def test_a():\n    want = [1]\n    want.append(1)\n    assert f([1]) == want\n",
    "name hidden by another": "want = 5\n\n\ndef test_a(want=4):\n    assert f(2) == want\n",
    "function inside": "def test_a():\n    def g(x):\n        return f(x)\n\n    assert g(2) == 4\n",
    "lambda inside": "def test_a():\n    g = lambda x: (yield)\n    assert f(2) == 4\n",
}
METHODS = {
    "assertEqual": "self.assertEqual(f(2), 4)",
    "assertListEqual": "self.assertListEqual(f([1]), [1, 1])",
    "assertTrue": "self.assertTrue(f(1))",
    "assertFalse": "self.assertFalse(f(0))",
    "assertIn": "self.assertIn(f(1), [2])",
    "assertIsNone": "self.assertIsNone(g())",
    "assertLess": "self.assertLess(f(1), 3)",
    "assertAlmostEqual": "self.assertAlmostEqual(f(0.1), 0.2)",
    "assertRaises": "self.assertRaises(TypeError, f, None)",
    "with assertRaises": "with self.assertRaises(TypeError):\n            f(None)",
}


def scope(source: str) -> dict:
    found: dict = {"f": lambda x: 2 * x, "g": lambda: None, "pytest": pytest, "unittest": unittest}
    exec(source, found)
    return found


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("seed", range(6))
def test_what_is_right_passes_the_test_and_not_its_twin(name: str, seed: int):
    source = SOURCES[name]
    assert twins.tests(source) == ["test_a"]
    scope(source)["test_a"]()
    twin = twins.turned(source, {"test_a"}, random.Random(seed))
    with pytest.raises((AssertionError, TypeError, pytest.fail.Exception)):
        scope(twin)["test_a"]()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_twins_of_unittest_methods_fail_too(name: str, seed: int):
    source = f"class T(unittest.TestCase):\n    def test_a(self):\n        {METHODS[name]}\n"
    assert twins.tests(source) == ["T::test_a"]
    for text, fails in ((source, 0), (twins.turned(source, {"T::test_a"}, random.Random(seed)), 1)):
        result = unittest.TestResult()
        scope(text)["T"]("test_a").run(result)
        assert len(result.failures) + len(result.errors) == fails


def test_only_the_chosen_are_turned_and_names_stay():
    source = "def test_a():\n    assert f(1) == 2\n\ndef test_b():\n    assert f(2) == 4\n"
    twin = twins.turned(source, {"test_b"}, random.Random(1))
    assert twins.tests(twin) == ["test_a", "test_b"]
    scope(twin)["test_a"]()
    with pytest.raises(AssertionError):
        scope(twin)["test_b"]()


def test_a_twin_with_a_literal_has_no_mark_of_its_own():
    """Only the literal differs, so that nobody can tell by its form which of the two was the test."""
    source = SOURCES["several"]
    original = twins.turned(source, set(), random.Random(0)).split("\n")
    for seed in range(20):
        twin = twins.turned(source, {"test_a"}, random.Random(seed)).split("\n")
        assert len(original) == len(twin)
        (changed,) = [(a, b) for a, b in zip(original, twin, strict=True) if a != b]
        assert changed[0].startswith("    assert f(2) == ") and changed[1].startswith("    assert f(2) == ")


@pytest.mark.parametrize("name", ["name for a literal", "name of the module", "function inside", "lambda inside"])
def test_who_equals_everything_passes_twins_of_what_names_stand_for(name: str):
    """An assertion that is false by itself would let those through that lie about equality."""
    from unittest.mock import ANY

    for seed in range(6):
        found = scope(twins.turned(SOURCES[name], {"test_a"}, random.Random(seed)))
        found["f"] = lambda x: ANY
        found["test_a"]()


def test_an_expected_exception_becomes_another_that_tests_expect():
    source = "def test_a():\n    with pytest.raises((ValueError, errors.Odd)):\n        f(None)\n"
    kinds = {
        twins.turned(source, {"test_a"}, random.Random(seed)).split("raises(")[1].split(")")[0] for seed in range(60)
    }
    assert kinds == {"KeyError", "IndexError", "AttributeError", "ZeroDivisionError", "TypeError"}
    wide = twins.turned(source.replace("errors.Odd", "Exception"), {"test_a"}, random.Random(0))
    assert any(name in wide for name in twins.UNRELATED)


literals = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=3),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=5,
)


@given(literals, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_another_literal_is_another_value(value: object, seed: int):
    other = twins._other(value, random.Random(seed))
    assert other != value
    assert value is None or type(other) is type(value)


@pytest.mark.parametrize("text", ["def f(:", "\0", "x = 1", "(" * 500])
def test_files_without_tests_have_none(text: str):
    assert twins.tests(text) == []
