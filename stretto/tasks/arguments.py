"""Random arguments for a task's function, from the specification in its `tests/oracle.json`.

    [{"kind": "ints", "min_length": 0, "max_length": 5, "low": -3, "high": 9}, {"kind": "int", "low": 0, "high": 9}]

Kinds are `int`, `ints`, `bool` and `text`. Drawn anew for each grading, outside any box.
"""

from __future__ import annotations

import random
from typing import Any


def draw_arguments(specifications: list[dict[str, Any]], rng: random.Random) -> tuple[Any, ...]:
    """One call's arguments. Raises ValueError naming a kind that is not known."""
    return tuple(_draw(specification, rng) for specification in specifications)


def _draw(spec: dict[str, Any], rng: random.Random) -> Any:
    kind = spec.get("kind")
    if kind == "int":
        return rng.randint(spec["low"], spec["high"])
    if kind == "ints":
        return [
            rng.randint(spec["low"], spec["high"]) for _ in range(rng.randint(spec["min_length"], spec["max_length"]))
        ]
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "text":
        return "".join(rng.choice(spec["alphabet"]) for _ in range(rng.randint(spec["min_length"], spec["max_length"])))
    raise ValueError(f"unknown argument kind {kind!r} in oracle.json: use int, ints, bool or text")
