"""Runs test_solution.py: prints how many asserts passed, or the first that failed."""

import ast
import sys
from pathlib import Path

sys.path.insert(0, ".")
scope = {"__name__": "visible"}
passed = 0
for node in ast.parse(Path("test_solution.py").read_text()).body:
    what = ast.unparse(node)
    try:
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            what = ast.unparse(node.test.left)
            got, expected = (eval(ast.unparse(side), scope) for side in (node.test.left, node.test.comparators[0]))
            if got != expected:
                print(f"FAILED {what}: got {got!r}, expected {expected!r}"[:300])
                break
            passed += 1
        else:
            exec(what, scope)
    except Exception as error:
        print(f"FAILED {what}: {type(error).__name__}"[:300])
        break
else:
    print(f"{passed} passed")
