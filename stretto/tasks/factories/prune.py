"""Tests taken out of a file by name, so that the agent does not hold what it is graded by."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable


def without(text: str, ids: Iterable[str]) -> str:
    """The file's text without the tests whose pytest ids are given, parameters or not; the rest is as it was.

    A test that the file only inherits or makes at run time is not found, and stays.
    """
    names = {re.sub(r"\[.*", "", id, flags=re.DOTALL).partition("::")[2] for id in ids}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return text
    lines = text.splitlines(keepends=True)
    _cut(tree.body, "", names, lines)
    return "".join(lines)


def _cut(body: list[ast.stmt], prefix: str, names: set[str], lines: list[str]) -> None:
    here = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    gone = [node for node in here if prefix + node.name in names]
    for node in gone:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        assert node.end_lineno is not None
        for number in range(first - 1, node.end_lineno):
            lines[number] = ""
    if len(gone) == len(body):
        lines[gone[0].lineno - 1] = " " * gone[0].col_offset + "pass\n" if prefix else ""
    for node in body:
        if isinstance(node, ast.ClassDef):
            _cut(node.body, f"{prefix}{node.name}::", names, lines)
