"""Values that crossed from a box, and when two of them are equal.

The bytes come from a process that policy code controlled, so decoding trusts nothing: sizes and depth are bounded,
and anything malformed is a ValueError. Only None, bool, int, float, str, bytes, list, tuple and dict exist here; there
is no object whose `__eq__` could be asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.grading.driver import MAX_DEPTH, encode

Value = None | bool | int | float | str | bytes | list["Value"] | tuple["Value", ...] | dict[bytes, "Value"]
"""A dict has its keys as `driver.encode` writes them: exact in type, and hashed safely whatever they are."""


@dataclass(frozen=True)
class Returned:
    """A call returned `value` and left its arguments as `arguments`."""

    value: Value
    arguments: Value


@dataclass(frozen=True)
class Raised:
    """A call raised an exception whose type has this name."""

    name: str


@dataclass(frozen=True)
class Foreign:
    """A call returned (or put into its arguments) something that is not a primitive."""

    kind: str


Report = Returned | Raised | Foreign


def same(expected: Value, got: Value, tolerance: float = 0.0) -> bool:
    """Equal type and equal value, all the way down: `True` is not 1, 1 is not 1.0, nan is nan, a tuple is no list. The
    order of a dict does not count. `tolerance`, relative and absolute, is for floats only."""
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(same(*pair, tolerance) for pair in zip(expected, got, strict=True))
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(same(part, got[key], tolerance) for key, part in expected.items())
    if isinstance(expected, float) and isinstance(got, float):
        if math.isnan(expected) or math.isnan(got):
            return math.isnan(expected) and math.isnan(got)
        return expected == got or math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
    return expected == got


def agrees(expected: Report, got: Report, tolerance: float = 0.0) -> bool:
    """Same value and same effect on the arguments, or an exception of the same name."""
    if isinstance(expected, Returned) and isinstance(got, Returned):
        right = same(expected.value, got.value, tolerance)
        return right and same(expected.arguments, got.arguments, tolerance)
    return isinstance(expected, Raised) and expected == got


def plainly(value: Value) -> object:
    """The value as Python has it, for people to read."""
    if isinstance(value, dict):
        return {plainly(Reader(key).value()): plainly(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [plainly(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def decode_reports(data: bytes, calls: int) -> list[Report]:
    """The reports of up to `calls` calls, up to the first that is incomplete or malformed."""
    reports: list[Report] = []
    reader = Reader(data)
    while len(reports) < calls and reader.at < len(data):
        try:
            reports.append(reader.report())
        except (ValueError, OverflowError):
            break
    return reports


class Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def report(self) -> Report:
        kind = self.take(1)
        if kind == b"v":
            return Returned(self.value(), self.value())
        text = self.value()
        if kind not in (b"e", b"x") or not isinstance(text, str):
            raise ValueError("not a report")
        return Raised(text) if kind == b"e" else Foreign(text)

    def value(self, depth: int = 0) -> Value:
        """One value written by `driver.encode`; raises ValueError, or OverflowError for a float out of range."""
        if depth > MAX_DEPTH:
            raise ValueError("value too deep")
        kind = self.take(1)
        if kind == b"n":
            return None
        if kind == b"b":
            return (b"0", b"1").index(self.take(1)) == 1
        if kind == b"i":
            return int(self.until(b";"), 16)
        if kind == b"f":
            return float.fromhex(self.until(b";"))
        size = int(self.until(b":"))
        if kind == b"s":
            return self.take(size).decode("utf-8", "surrogatepass")
        if kind == b"y":
            return self.take(size)
        if kind == b"d" and size <= len(self.data) - self.at:
            return self.pairs(size, depth)
        if kind not in (b"l", b"t") or size > len(self.data) - self.at:  # each part takes a byte at least
            raise ValueError("not a value")
        parts = [self.value(depth + 1) for _ in range(size)]
        return parts if kind == b"l" else tuple(parts)

    def pairs(self, size: int, depth: int) -> dict[bytes, Value]:
        found: dict[bytes, Value] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if isinstance(key, list | dict):
                raise ValueError("a key that no dict can have")
            found[encode(key)] = self.value(depth + 1)
        return found

    def take(self, size: int) -> bytes:
        part = self.data[self.at : self.at + size]
        if size < 0 or len(part) < size:
            raise ValueError("data ends inside a value")
        self.at += size
        return part

    def until(self, mark: bytes) -> str:
        end = self.data.index(mark, self.at)  # ValueError when absent
        text = self.data[self.at : end].decode("ascii")
        self.at = end + 1
        return text
