"""Numba, with a cache on disk that notices changes. Numba itself looks at the file of a function, but compiles into it
what it calls in other files: after a change there, old code would go on. So each function gets a digest of all these
files, as a variable of its closure, which numba's cache takes into account.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import xxhash
from numba import njit

_FILES = ("compiled.py", "numberline.py", "vector.py", "rice_*.py")


def _digest() -> str:
    here = Path(__file__).parent
    files = sorted(file for pattern in _FILES for file in here.glob(pattern))
    return xxhash.xxh3_128_hexdigest(b"".join(file.read_bytes() for file in files))


_DIGEST = CellType(_digest())


def compiled(function: FunctionType) -> Callable[..., Any]:
    """Without checks of indices, and with the interpreter lock released."""
    code = function.__code__.replace(co_freevars=(*function.__code__.co_freevars, "digest"))
    known = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, (_DIGEST,))
    known.__qualname__, known.__doc__ = function.__qualname__, function.__doc__
    return njit(nogil=True, cache=True, boundscheck=False)(known)
