"""Bugs that public frameworks shipped: each that concerns tokens, engine, replay,
weights, the asynchronous flow or the ledger has a test named after it.

`ENG-5` (log-probs of a truncated distribution) is held by every test whose name has `ENG_5_` in it: `pytest -k ENG_5_`.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOMS = {"ENG": 16, "RPL": 9, "WGT": 12, "ASY": 15, "LED": 6, "SBX": 12, "HCK": 16, "MID": 5}
TESTS = Path(__file__).parent


@functools.cache
def held() -> dict[str, list[str]]:
    """Pitfall -> tests named after it, as pytest would collect them."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for room, number in re.findall(rf"_({'|'.join(ROOMS)})_(\d+)(?=_)", node.name):
                    found.setdefault(f"{room}-{number}", []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


@pytest.mark.parametrize(
    "pitfall", [f"{room}-{number + 1}" for room, count in ROOMS.items() for number in range(count)]
)
def test_each_pitfall_has_a_test_of_its_name(pitfall: str) -> None:
    tests = held().get(pitfall)
    assert tests, f"no test is named after {pitfall}: call it test_{pitfall.replace('-', '_')}_..."


def test_no_test_is_named_after_a_pitfall_that_is_not_there() -> None:
    known = {f"{room}-{number + 1}" for room, count in ROOMS.items() for number in range(count)}
    assert set(held()) <= known
