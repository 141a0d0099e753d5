"""A pool of boxes as the factories use it, and a small package with tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stretto.sandbox.pool import BoxPool
from stretto.tasks.factories.suite import BOXES

SOURCE = '''\
"""Prices."""


def total(prices, discount=0):
    """The sum, less a discount in percent; never below nothing."""
    result = 0
    for price in prices:
        if price < 0:
            raise ValueError("a price is negative")
        result += price
    if discount > 50:
        discount = 50
    return max(result - result * discount // 100, 0)


def cheapest(prices, count=1):
    ranked = sorted(prices)
    return ranked[:count] if count > 0 else []


def unused(a, b):
    return a + b
'''
TESTS = """\
import itertools
import pytest
from shop import prices


def test_total():
    assert prices.total([1, 2, 3]) == 6


def test_discount():
    assert prices.total([100, 100], 10) == 180
    assert prices.total([100], 90) == 50


def test_negative():
    with pytest.raises(ValueError):
        prices.total([-1])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_cheapest(count):
    assert prices.cheapest([3, 1, 2], count) == [1, 2, 3][:count]


def test_that_fails():
    assert prices.total([1]) == 2
"""


@pytest.fixture
async def pool() -> AsyncIterator[BoxPool]:
    pool = BoxPool(BOXES)
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A package with tests, and with answer keys of every kind lying about."""
    root = tmp_path / "shop-1.0"
    files = {
        "pyproject.toml": '[project]\nname = "shop"\nversion = "1.0"\nlicense = "MIT"\n',
        "shop/__init__.py": "",
        "shop/prices.py": SOURCE,
        "tests/__init__.py": "",
        "tests/test_prices.py": TESTS,
        "build/lib/shop/prices.py": SOURCE,
        "shop/__pycache__/prices.cpython-311.pyc": "old",
        "shop.egg-info/PKG-INFO": "Name: shop\n",
        ".mypy_cache/3.11/shop/prices.data.json": "{}",
        "venv/pyvenv.cfg": "",
        "venv/lib/shop/prices.py": SOURCE,
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root
