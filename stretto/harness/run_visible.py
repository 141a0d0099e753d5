"""Runs inside the box: the visible tests, one `assert call == value` at a time, and prints the first failure.

Its output is a hint for the policy, nothing more: the grade comes from hidden calls compared outside the box.
It uses `_ast` instead of `ast`, whose import would cost more than the tests.
"""

import _ast
import sys

path = sys.stdin.read()
sys.path.insert(0, ".")
with open(path, encoding="utf-8") as file:
    source = file.read()
tree = compile(source, path, "exec", _ast.PyCF_ONLY_AST)
assert isinstance(tree, _ast.Module)
scope: dict = {"__name__": "visible"}
passed = 0
what = path


def text(node) -> str:
    return source.splitlines()[node.lineno - 1][node.col_offset : node.end_col_offset]


def value(node):
    return eval(compile(_ast.Expression(node), path, "eval"), scope)


for node in tree.body:
    test = node.test if isinstance(node, _ast.Assert) else None
    try:
        if isinstance(test, _ast.Compare) and isinstance(test.ops[0], _ast.Eq):
            what = text(test.left)
            got, expected = value(test.left), value(test.comparators[0])
            if got != expected:
                print(f"FAILED {what}: got {got!r}, expected {expected!r}"[:300])
                break
            passed += 1
        else:
            exec(compile(_ast.Module([node], []), path, "exec"), scope)
    except BaseException as error:  # whatever the policy's code raises is the result
        print(f"FAILED {what}: {type(error).__name__}"[:300])
        break
else:
    print(f"{passed} passed")
