"""Source that a policy wrote, parsed once."""

from __future__ import annotations

import ast
import functools

MAX_SOURCE = 1 << 18
"""Bytes of a source file that is read."""


@functools.lru_cache(maxsize=32)
def parsed(data: bytes) -> ast.Module:
    """The syntax tree; an empty one for what is no Python, or nests deeper than a tree can be built."""
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])
