"""Files of one repository in the order to read them: what is imported goes before what imports it.

A depth-first walk over Python's imports, by the text of import lines; cycles are cut where the walk meets them.
Files in other languages keep the order of their names. (Repository-level packing: DeepSeek-Coder, arXiv 2401.14196.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+([\w, \t*(]+)|import[ \t]+([\w., \t]+))", re.M)


def reading_order(files: Sequence[tuple[str, str]]) -> list[int]:
    """Positions of (path, text) pairs: names sorted, each after the files it imports."""
    modules = {module: at for at, (path, _) in enumerate(files) for module in _names(path)}
    order: list[int] = []
    begun: set[int] = set()
    for first in sorted(range(len(files)), key=lambda at: files[at][0]):
        stack = [(first, iter(_imports(files[first], modules)))] if first not in begun else []
        begun.add(first)
        while stack:
            at, wanted = stack[-1]
            for other in wanted:
                if other not in begun:
                    begun.add(other)
                    stack.append((other, iter(_imports(files[other], modules))))
                    break
            else:
                order.append(at)
                stack.pop()
    return order


def _names(path: str) -> list[str]:
    """Dotted names under which a Python file may be imported: with and without its leading folders."""
    parts = PurePosixPath(path)
    if parts.suffix not in (".py", ".pyi"):
        return []
    dotted = [*parts.parent.parts, *([] if parts.stem == "__init__" else [parts.stem])]
    return [".".join(dotted[start:]) for start in range(min(2, len(dotted)))]


def _imports(file: tuple[str, str], modules: dict[str, int]) -> list[int]:
    path, text = file
    if not path.endswith((".py", ".pyi")):
        return []
    package = PurePosixPath(path).parent.parts
    found: list[int] = []
    for source, names, plain in IMPORT.findall(text):
        if plain:
            wanted = [word.split()[0] for word in plain.split(",") if word.strip()]
        else:
            dots = len(source) - len(source.lstrip("."))
            base = [*package[: len(package) - dots + 1], source[dots:]] if dots else [source]
            module = ".".join(part for part in base if part)
            inside = [name.split()[0].strip("(*") for name in names.split(",") if name.strip(" \t(*")]
            wanted = [f"{module}.{name}" if module else name for name in inside if name] + [module]
        found += [modules[name] for name in wanted if name in modules]
    return found
