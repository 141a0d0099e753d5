"""The function templates of the quickstart's bug-repair tasks.

A template is a one-line specification and a body with slots. `{w}` is a list parameter, `{p}` `{q}` integer parameters,
`{t}` a threshold (a constant or a further parameter), `{d}` a constant, `{a}` `{x}` `{i}` local names. `{cmp}`, `{op}`,
`{m}` and `{s}` are operators drawn per task.

Some specifications are ambiguous on purpose: "over" may mean `>` or `>=`, "combined with" any of `+ - *`. The
specification does not say which was drawn, the visible tests do; so running them pays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OVER, UNDER, CUT, EQUAL, UNLIKE = (">", ">="), ("<", "<="), ("<", "<=", ">", ">="), ("==",), ("!=",)
ANY_OP = ("+", "-", "*")

CONDITIONS = {"over": OVER, "under": UNDER, "cut at": CUT, "equal to": EQUAL, "unlike": UNLIKE}


@dataclass(frozen=True)
class Template:
    """`choices` maps an operator slot to what may be drawn; more than one option makes the task ambiguous."""

    name: str
    spec: str
    body: str
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)


_LOOP = "{a} = 0\nfor {x} in {w}:\n    if {x} {cmp} {t}:\n        {a} += "

_FAMILIES = {
    "total": ("sum the items {cond} {t}", _LOOP + "{x}\nreturn {a}"),
    "count": ("count the items {cond} {t}", _LOOP + "1\nreturn {a}"),
    "keep": (
        "keep the items {cond} {t}",
        "{a} = []\nfor {x} in {w}:\n    if {x} {cmp} {t}:\n        {a}.append({x})\nreturn {a}",
    ),
    "any": (
        "whether any item is {cond} {t}",
        "for {x} in {w}:\n    if {x} {cmp} {t}:\n        return True\nreturn False",
    ),
    "every": (
        "whether every item is {cond} {t}",
        "for {x} in {w}:\n    if not {x} {cmp} {t}:\n        return False\nreturn True",
    ),
    "replace": (
        "replace items {cond} {t} with {d}",
        "{a} = []\nfor {x} in {w}:\n    if {x} {cmp} {t}:\n        {x} = {d}\n    {a}.append({x})\nreturn {a}",
    ),
    "bonus": ("bonus {d} for {q} when {p} is {cond} {t}", "if {p} {cmp} {t}:\n    {q} += {d}\nreturn {q}"),
    "discount": ("discount {d} for {q} when {p} is {cond} {t}", "if {p} {cmp} {t}:\n    {q} -= {d}\nreturn {q}"),
    "adjust": ("adjust {q} by {d} when {p} is {cond} {t}", "if {p} {cmp} {t}:\n    {q} = {q} {op} {d}\nreturn {q}"),
}

_SUM = "{a} = 0\nfor {x} in {w}:\n    {a} += "
_MAP = "{a} = []\nfor {x} in {w}:\n    {a}.append("
_BEST = "{a} = {w}[0]\nfor {x} in {w}:\n    if {x} {cmp} {a}:\n        {a} = {x}\nreturn {a}"

_SINGLES = [
    Template("limit", "limit {p} to {t}", "if {p} > {t}:\n    {p} = {t}\nreturn {p}"),
    Template("raise", "raise {p} to {t}", "if {p} < {t}:\n    {p} = {t}\nreturn {p}"),
    Template("product", "multiply the items", "{a} = 1\nfor {x} in {w}:\n    {a} *= {x}\nreturn {a}"),
    Template("sum", "sum the items", _SUM + "{x}\nreturn {a}"),
    Template("sum-with", "sum the items with {d}", "{a} = {d}\nfor {x} in {w}:\n    {a} += {x}\nreturn {a}"),
    Template("sum-less", "sum the items less {d}", _SUM + "{x}\nreturn {a} - {d}"),
    Template("largest", "the largest item", _BEST, {"cmp": (">",)}),
    Template("smallest", "the smallest item", _BEST, {"cmp": ("<",)}),
    Template("extreme", "the extreme item", _BEST, {"cmp": (">", "<")}),
    Template(
        "first-index",
        "the first index of {t}",
        "for {i} in range(len({w})):\n    if {w}[{i}] == {t}:\n        return {i}\nreturn -1",
    ),
    Template(
        "last-index",
        "the last index of {t}",
        "{a} = -1\nfor {i} in range(len({w})):\n    if {w}[{i}] == {t}:\n        {a} = {i}\nreturn {a}",
    ),
    Template("scale", "scale the items by {d}", _MAP + "{x} * {d})\nreturn {a}"),
    Template("shift", "shift the items by {d}", _MAP + "{x} + {d})\nreturn {a}"),
    Template("lower", "lower the items by {t}", _MAP + "{x} - {t})\nreturn {a}"),
    Template("map", "map the items with {d}", _MAP + "{x} {op} {d})\nreturn {a}", {"op": ANY_OP}),
    Template("map-by", "map the items with {p}", _MAP + "{x} {op} {p})\nreturn {a}", {"op": ANY_OP}),
    Template(
        "multiples",
        "keep the multiples of {m}",
        "{a} = []\nfor {x} in {w}:\n    if {x} % {m} == 0:\n        {a}.append({x})\nreturn {a}",
    ),
    Template(
        "others",
        "keep the items not multiples of {m}",
        "{a} = []\nfor {x} in {w}:\n    if {x} % {m} != 0:\n        {a}.append({x})\nreturn {a}",
    ),
    Template(
        "sum-multiples",
        "sum the multiples of {m}",
        "{a} = 0\nfor {x} in {w}:\n    if {x} % {m} == 0:\n        {a} += {x}\nreturn {a}",
    ),
    Template(
        "sum-others",
        "sum the items not multiples of {m}",
        "{a} = 0\nfor {x} in {w}:\n    if {x} % {m} != 0:\n        {a} += {x}\nreturn {a}",
    ),
    Template(
        "count-multiples",
        "count the multiples of {m}",
        "{a} = 0\nfor {x} in {w}:\n    if {x} % {m} == 0:\n        {a} += 1\nreturn {a}",
    ),
    Template(
        "triangle",
        "sum the numbers up to {n}",
        "{a} = 0\nfor {i} in range({n} + 1):\n    {a} += {i}\nreturn {a}",
    ),
    Template("combine", "combine {p} with {q}", "return {p} {op} {q}", {"op": ANY_OP}),
    Template(
        "combine-then", "combine {p} with {q} then add {d}", "{a} = {p} {op} {q}\nreturn {a} + {d}", {"op": ANY_OP}
    ),
    Template("fee", "the fee {d} on {p} times {q}", "{a} = {p} * {q}\nreturn {a} + {d}"),
    Template(
        "fee-then", "the fee {d} on {p} combined with {q}", "{a} = {p} {op} {q}\n{a} += {d}\nreturn {a}", {"op": ANY_OP}
    ),
    Template("difference", "the difference of {p} and {q}", "{a} = {s}\nreturn {a}", {"s": ("{p} - {q}", "{q} - {p}")}),
    Template("gap", "the gap of {p} and {q}", "{a} = {p} - {q}\nif {a} < 0:\n    {a} = -{a}\nreturn {a}"),
    Template("larger", "the larger of {p} and {q}", "if {p} > {q}:\n    return {p}\nreturn {q}"),
    Template("smaller", "the smaller of {p} and {q}", "if {p} < {q}:\n    return {p}\nreturn {q}"),
    Template("pick", "pick {p} or {q}", "if {p} {cmp} {q}:\n    return {p}\nreturn {q}", {"cmp": (">", "<")}),
    Template("sign", "the sign of {p}", "if {p} > 0:\n    return 1\nif {p} < 0:\n    return -1\nreturn 0"),
    Template("inside", "whether {p} is inside {t} and {u}", "return {p} >= {t} and {p} <= {u}"),
    Template("outside", "whether {p} is outside {t} and {u}", "return {p} < {t} or {p} > {u}"),
    Template(
        "running",
        "the running sums",
        "{a} = []\n{b} = 0\nfor {x} in {w}:\n    {b} += {x}\n    {a}.append({b})\nreturn {a}",
    ),
    Template(
        "ordered",
        "whether the items are ordered",
        "for {i} in range(len({w}) - 1):\n    if {w}[{i}] {cmp} {w}[{i} + 1]:\n        return False\nreturn True",
        {"cmp": (">", "<")},
    ),
    Template(
        "weighted",
        "sum the items by index",
        "{a} = 0\nfor {i} in range(len({w})):\n    {a} += {w}[{i}] * {i}\nreturn {a}",
    ),
    Template("squares", "sum the squares", _SUM + "{x} * {x}\nreturn {a}"),
    Template("mean", "the mean of the items", "{a} = 0\nfor {x} in {w}:\n    {a} += {x}\nreturn {a} // len({w})"),
    Template("perimeter", "the perimeter of {p} and {q}", "{a} = {p} + {q}\nreturn {a} * 2"),
    Template("ends", "the ends of the items", "{a} = {w}[0]\n{b} = {w}[-1]\nreturn {a} {op} {b}", {"op": ANY_OP}),
    Template(
        "repeat", "repeat {t} as many as {n} times", "{a} = []\nfor {i} in range({n}):\n    {a}.append({t})\nreturn {a}"
    ),
    Template(
        "evens", "sum every second item", "{a} = 0\nfor {i} in range(0, len({w}), 2):\n    {a} += {w}[{i}]\nreturn {a}"
    ),
]


def _family(kind: str, condition: str) -> Template:
    spec, body = _FAMILIES[kind]
    choices = {"cmp": CONDITIONS[condition]}
    if kind == "adjust":
        choices["op"] = ANY_OP
    return Template(f"{kind}-{condition.split()[0]}", spec.replace("{cond}", condition), body, choices)


TEMPLATES = [_family(kind, condition) for kind in _FAMILIES for condition in CONDITIONS] + _SINGLES
"""All templates, 88 of them."""

NEW = frozenset(
    "total-cut count-under keep-over any-under every-over replace-cut bonus-under discount-over adjust-cut smaller "
    "fee-then sum-multiples".split()
)
"""Names of the templates that are never trained on: new combinations of words that training does contain."""
