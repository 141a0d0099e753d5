"""Edits of a source file by position, so that what is not touched keeps its comments and its layout."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Edit:
    """Bytes `[start, end)` of the file become `text`."""

    start: int
    end: int
    text: str
    operator: str = ""


class Source:
    """A parsed file and where its nodes lie. Raises SyntaxError or ValueError for what is not Python."""

    def __init__(self, data: bytes):
        self.data = data
        self.tree = ast.parse(data)
        self._starts = [0]
        for line in data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Byte offsets of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def replace(self, node: ast.expr | ast.stmt, text: str, operator: str = "") -> Edit:
        return Edit(*self.span(node), text, operator)

    def line(self, number: int) -> int:
        """Offset of the first byte of a line, counted from 1."""
        return self._starts[min(number, len(self._starts)) - 1]


def apply(data: bytes, edits: Iterable[Edit]) -> bytes:
    """The file with all edits made. Raises ValueError when two of them overlap."""
    end = len(data)
    for edit in sorted(edits, reverse=True):
        if edit.end > end:
            raise ValueError("two edits overlap")
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
        end = edit.start
    return data


def functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Outermost functions and methods with their qualified names, in the order of the file."""
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []

    def visit(body: Iterable[ast.AST], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((prefix + node.name, node))
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                visit(ast.iter_child_nodes(node), prefix)
            elif isinstance(node, ast.ExceptHandler):
                visit(node.body, prefix)

    visit(tree.body, "")
    return found


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Where its code object says it begins: at the first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def body_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.stmt]:
    """Its statements without the docstring."""
    first = node.body[0]
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str
    )
    return node.body[1:] if documented else node.body


def with_body(source: Source, node: ast.FunctionDef | ast.AsyncFunctionDef, statement: str) -> Edit:
    """The edit that leaves a function nothing to do but `statement`, which may have several lines."""
    body = body_of(node) or node.body
    start, _ = source.span(body[0])
    _, end = source.span(body[-1])
    return Edit(start, end, statement.replace("\n", "\n" + " " * body[0].col_offset))
