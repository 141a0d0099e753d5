"""Source that a policy wrote, parsed once."""

from __future__ import annotations

import ast
import functools

MAX_SOURCE = 1 << 18
"""Bytes of a source file that is read, beyond what the task has of it."""
MAX_SOURCES = 1 << 20
"""Bytes that are read of one submission: reading more would hold up all others."""


@functools.lru_cache(maxsize=16)
def parsed(data: bytes) -> ast.Module:
    """The syntax tree; an empty one for what is no Python, or nests deeper than a tree can be built."""
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])
