"""Bugs as people make them: nineteen operators, each an edit of one place in the body of a function.

An operator looks at one node and says what could stand there instead. Nothing outside of function bodies is touched:
a mutant can then be tried by exchanging the code of a live function (`suite_driver.py`), which takes milliseconds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from stretto.tasks.factories.edits import Edit, Source, body_of

Operator = Callable[[Source, ast.AST], Iterator[Edit]]

_COMPARE: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("+", "//"),
    ast.Div: ("*", "//"),
    ast.FloorDiv: ("/", "*"),
    ast.Mod: ("//",),
    ast.Pow: ("*",),
    ast.LShift: (">>",),
    ast.RShift: ("<<",),
    ast.BitAnd: ("|",),
    ast.BitOr: ("&",),
}
_SIBLINGS = {
    a: b
    for pair in (
        "min max",
        "any all",
        "lower upper",
        "startswith endswith",
        "lstrip rstrip",
        "find rfind",
        "index rindex",
        "split rsplit",
        "partition rpartition",
        "floor ceil",
        "ljust rjust",
        "keys values",
        "union intersection",
        "append appendleft",
        "popleft pop",
    )
    for a, b in (pair.split(), pair.split()[::-1])
}
_ERRORS = {"KeyError": "IndexError", "IndexError": "KeyError", "ValueError": "TypeError", "TypeError": "ValueError"}
_ERRORS |= {"AttributeError": "TypeError", "StopIteration": "RuntimeError"}


def edits(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Edit]:
    """Every edit that an operator proposes inside a function's body, in the order of the file."""
    found = {
        edit
        for statement in body_of(function)
        for node in ast.walk(statement)
        for operator in OPERATORS.values()
        for edit in operator(source, node)
    }
    return sorted(found)


def _between(source: Source, left: ast.expr, right: ast.expr, token: str, operator: str) -> Iterator[Edit]:
    """What stands between two operands becomes `token`; left alone where brackets or comments stand there."""
    start, end = source.span(left)[1], source.span(right)[0]
    gap = source.data[start:end].decode()
    if not set(gap) & set("()[]{}#\\\n"):
        yield Edit(start, end, f" {token} ", operator)


def compare(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for token in _COMPARE[type(node.ops[0])]:
            yield from _between(source, node.left, node.comparators[0], token, "compare")


def arithmetic(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and not _is_text(node.left):
        for token in _ARITHMETIC.get(type(node.op), ()):
            yield from _between(source, node.left, node.right, token, "arithmetic")


def augmented(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.AugAssign):
        for token in _ARITHMETIC.get(type(node.op), ())[:1]:
            yield from _between(source, node.target, node.value, f"{token}=", "augmented")


def connective(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        token = "or" if isinstance(node.op, ast.And) else "and"
        yield from _between(source, node.values[0], node.values[1], token, "connective")


def drop_condition(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        for value in (node.values[0], node.values[-1]):
            yield source.replace(node, f"({source.text(value)})", "drop_condition")


def negate(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.Constant):
        yield source.replace(node.test, f"not ({source.text(node.test)})", "negate")


def drop_not(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.replace(node, f"({source.text(node.operand)})", "drop_not")


def drop_minus(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield source.replace(node, source.text(node.operand), "drop_minus")


def number(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield source.replace(node, str(value) if value >= 0 else f"({value})", "number")


def truth(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield source.replace(node, str(not node.value), "truth")


def bounds(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                for sign in "+-":
                    yield source.replace(bound, f"{source.text(bound)} {sign} 1", "bounds")


def swap_arguments(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and len(node.args) == 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        first, second = node.args
        (start, _), (_, end) = source.span(first), source.span(second)
        if b"#" not in source.data[start:end] and source.text(first) != source.text(second):
            yield Edit(start, end, f"{source.text(second)}, {source.text(first)}", "swap_arguments")


def drop_keyword(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and node.keywords and (node.args or len(node.keywords) > 1):
        before = [*node.args, *(keyword.value for keyword in node.keywords[:-1])]
        last = node.keywords[-1]
        start = max(source.span(value)[1] for value in before)
        gap = source.data[start : source.span(last.value)[0]]
        if last.arg is not None and not set(gap) & set(b"()[]{}#"):
            yield Edit(start, source.span(last.value)[1], "", "drop_keyword")


def sibling(source: Source, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    called = node.func
    if isinstance(called, ast.Name) and called.id in ("min", "max", "any", "all"):
        yield source.replace(called, _SIBLINGS[called.id], "sibling")
    elif isinstance(called, ast.Attribute) and called.attr in _SIBLINGS:
        _, end = source.span(called)
        yield Edit(end - len(called.attr), end, _SIBLINGS[called.attr], "sibling")


def drop_statement(source: Source, node: ast.AST) -> Iterator[Edit]:
    dropped = isinstance(node, ast.AugAssign | ast.Delete) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    dropped = dropped or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript))
    if dropped and isinstance(node, ast.stmt):
        yield source.replace(node, "pass", "drop_statement")


def jump(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Break | ast.Continue):
        yield source.replace(node, "continue" if isinstance(node, ast.Break) else "break", "jump")


def swap_arms(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.IfExp):
        body, test, other = (source.text(part) for part in (node.body, node.test, node.orelse))
        yield source.replace(node, f"{other} if {test} else {body}", "swap_arms")


def wrong_error(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id in _ERRORS:
        yield source.replace(node.type, _ERRORS[node.type.id], "wrong_error")


def drop_return(source: Source, node: ast.AST) -> Iterator[Edit]:
    """An early return inside of a branch is forgotten."""
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Return) and not node.orelse:
        yield source.replace(node.body[0], "pass", "drop_return")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


OPERATORS: dict[str, Operator] = {
    operator.__name__: operator
    for operator in (
        compare,
        arithmetic,
        augmented,
        connective,
        drop_condition,
        negate,
        drop_not,
        drop_minus,
        number,
        truth,
        bounds,
        swap_arguments,
        drop_keyword,
        sibling,
        drop_statement,
        jump,
        swap_arms,
        wrong_error,
        drop_return,
    )
}
