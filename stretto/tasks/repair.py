"""Bug-repair tasks: one small Python function, one line of it mutated, a specification and two visible tests.

A task is drawn from a template (`templates.py`), random names and constants, and a mutation of one token. It is kept
when the mutant really differs on several random calls. The visible tests are a failing call and one more, chosen to
tell the most alternative mutants apart. Deterministic by seed; split by the hash of the fixed program, so that no
held-out instance occurs in training, and by template.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.config import TasksConfig
from stretto.records import Task
from stretto.tasks import folder
from stretto.tasks.arguments import draw_arguments
from stretto.tasks.templates import NEW, TEMPLATES, Template

NAMES = (
    "a b c d e g h k m n p q r s t u v w x y z acc out res cur val num data xs seq nums left right low high "
    "step base size count top best key"
).split()
FUNCTIONS = "solve check compute apply work run".split()

SPLITS = ("train", "dev", "heldout", "new_templates")

_TOKEN = re.compile(r"\w+|//|[<>=!+\-*%]=|[^\w\s]")
_COMPARE = ("<", "<=", ">", ">=", "==", "!=")
_ARITHMETIC = ("+", "-", "*")
_AUGMENTED = ("+=", "-=", "*=")
_KEYWORDS = frozenset("def for in if not and or return range len append True False".split())  # never a variable


@dataclass(frozen=True)
class Repair:
    """A task with its answer, for the demonstrator and for tests. `line` counts from 1 in `solution.py`."""

    task: Task
    template: str
    fixed: tuple[str, ...]
    broken: tuple[str, ...]
    line: int
    readings: tuple[str, ...]  # other readings of the specification, as versions of that line; empty if unambiguous
    calls: tuple[tuple[Any, ...], ...]

    @property
    def fix(self) -> str:
        return self.fixed[self.line - 1]


def generate(split: str, seed: int) -> Iterator[Repair]:
    """An endless stream of distinct tasks of one split."""
    if split not in SPLITS:
        raise ValueError(f"no split named {split!r}; there are {', '.join(SPLITS)}")
    rng = random.Random(f"repair/{split}/{seed}")
    templates = [t for t in TEMPLATES if (t.name in NEW) == (split == "new_templates")]
    seen: set[str] = set()
    while True:
        repair = _draw(rng.choice(templates), split, rng)
        if repair is not None and repair.task.id not in seen:
            seen.add(repair.task.id)
            yield repair


def another(repair: Repair, rng: random.Random) -> Repair:
    """A training task of the same template, with names, constants and a bug of its own."""
    template = next(t for t in TEMPLATES if t.name == repair.template)
    while True:
        other = _draw(template, "train", rng)
        if other is not None and other.task.id != repair.task.id:
            return other


def write_splits(config: TasksConfig, root: Path, seed: int) -> None:
    """Write the tasks of a run as Harbor folders below `root/<split>`."""
    for split, count in (("train", config.train), ("heldout", config.heldout), ("new_templates", config.new_templates)):
        for repair in itertools.islice(generate(split, seed), count):
            folder.write(repair.task, root / split)


def mutants(lines: tuple[str, ...], number: int, rng: random.Random) -> list[str]:
    """Other versions of line `number` (from 1), each with one token changed, in random order."""
    line = lines[number - 1]
    scope = sorted({word for text in lines for word in re.findall(r"[a-z]\w*", text)} - _KEYWORDS - set(FUNCTIONS))
    found = []
    for match in _TOKEN.finditer(line):
        for other in _alternatives(line, match, scope):
            found.append(line[: match.start()] + other + line[match.end() :])
    rng.shuffle(found)
    return found


def call(lines: tuple[str, ...], arguments: tuple[Any, ...]) -> Any:
    """What the program answers; ("raised", type) stands for an exception. For our own generated programs only."""
    function = compile_program(lines)
    return evaluate(function, arguments)


def compile_program(lines: tuple[str, ...]) -> Callable[..., Any] | None:
    scope: dict[str, Any] = {"__builtins__": {"range": range, "len": len}}
    try:
        exec("\n".join(lines), scope)
    except SyntaxError:
        return None
    return next(value for key, value in scope.items() if key != "__builtins__")


def evaluate(function: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> Any:
    if function is None:
        return ("raised", "SyntaxError")
    try:
        return function(*(list(a) if isinstance(a, list) else a for a in arguments))
    except (
        TypeError,
        ValueError,
        IndexError,
        ZeroDivisionError,
        NameError,
        UnboundLocalError,
        AttributeError,
    ) as error:
        return ("raised", type(error).__name__)


def _alternatives(line: str, match: re.Match[str], scope: list[str]) -> list[str]:
    token, before, after = match.group(), line[: match.start()], line[match.end() :]
    if token in _COMPARE:
        return [other for other in _COMPARE if other != token]
    if token in _AUGMENTED:
        return [other for other in _AUGMENTED if other != token]
    if token in _ARITHMETIC and before.endswith(" "):
        return [other for other in _ARITHMETIC if other != token]
    if token.isdigit():
        value = int(token)
        return [str(value + step) for step in (-1, 1, 2) if value + step >= 0]
    if token in ("and", "or"):
        return ["or" if token == "and" else "and"]
    if token in ("True", "False"):
        return ["False" if token == "True" else "True"]
    grows = after.startswith((".append", " +=", " -=", " *="))  # another receiver could grow the list it loops over
    if token in scope and not grows and not line.lstrip().startswith(("for ", "def ")):
        return [other for other in scope if other != token]
    return []


def _draw(template: Template, split: str, rng: random.Random) -> Repair | None:
    fixed, spec, arguments, choices = _instantiate(template, rng)
    key = hashlib.sha256(f"{spec}\n{fixed}".encode()).hexdigest()
    bucket = {0: "heldout", 1: "dev"}.get(int(key[:8], 16) % 10, "train")
    if split != "new_templates" and bucket != split:
        return None
    ambiguous_lines = [n for n, text in enumerate(fixed, 1) if _readings(text, choices)]
    candidates = [n for n in range(2, len(fixed) + 1) if mutants(fixed, n, rng)]
    if ambiguous_lines and rng.random() < 0.5:
        candidates = ambiguous_lines
    number = rng.choice(candidates)
    options = mutants(fixed, number, rng)
    operators = [text for text in options if re.sub(r"\w+", "", text) != re.sub(r"\w+", "", fixed[number - 1])]
    if operators and rng.random() < 0.65:
        options = operators
    calls = [draw_arguments(arguments, rng) for _ in range(12)]
    expected = [evaluate(compile_program(fixed), c) for c in calls]
    for option in options[:4]:
        broken = (*fixed[: number - 1], option, *fixed[number:])
        failing = _failing(broken, calls, expected)
        if len(failing) >= 3 and not any(isinstance(e, tuple) for e in expected):
            rivals = [(*fixed[: number - 1], other, *fixed[number:]) for other in options if other != option][:9]
            visible = _telling(failing, [_failing(r, calls, expected) for r in rivals], len(calls))
            shown = tuple(calls[index] for index in visible)
            values = [expected[index] for index in visible]
            readings = _readings(fixed[number - 1], choices)
            task = _task(template, split, key, spec, fixed, broken, arguments, shown, values, bool(readings), number)
            return Repair(task, template.name, fixed, broken, number, readings, shown)
    return None


def _readings(line: str, choices: list[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
    return tuple(
        line.replace(f" {drawn}", f" {option}")
        for drawn, options in choices
        if f" {drawn} " in f"{line} "
        for option in options
        if option != drawn
    )


def _instantiate(
    template: Template, rng: random.Random
) -> tuple[tuple[str, ...], str, list[dict[str, Any]], list[tuple[str, tuple[str, ...]]]]:
    """A fixed program, its specification, how to draw arguments, and for each choice what was drawn from what."""
    text, spec = template.body, template.spec
    chosen = []
    for slot, options in template.choices.items():
        option = rng.choice(options)
        text = text.replace(f"{{{slot}}}", option)
        chosen.append((option, options))
    slots = sorted(set(re.findall(r"{(\w)}", text + spec)))
    names: dict[str, str] = dict(zip(slots, rng.sample(NAMES, len(slots)), strict=True))
    around = rng.randint(2, 60)
    parameters = [slot for slot in "wpqn" if slot in slots]
    threshold_is_parameter = "t" in slots and rng.random() < 0.5
    if threshold_is_parameter:
        around = 5
        parameters.append("t")
    elif "t" in slots:
        names["t"] = str(around)
    if "u" in slots:
        if threshold_is_parameter:
            parameters.append("u")
        else:
            names["u"] = str(around + rng.randint(2, 5))
    if "d" in slots:
        names["d"] = str(rng.randint(2, 30))
    if "m" in slots:
        names["m"] = str(rng.randint(2, 5))
    names = {slot: name for slot, name in names.items() if slot in slots}
    body = text.format(**names)
    header = f"def {rng.choice(FUNCTIONS)}({', '.join(names[p] for p in parameters)}):"
    lines = (header, *(f"    {line}" for line in body.split("\n")))
    integer = {"kind": "int", "low": max(around - 4, -3), "high": around + 4}
    kinds = {
        "w": {"kind": "ints", "min_length": 0, "max_length": 5, "low": max(around - 4, -3), "high": around + 4},
        "n": {"kind": "int", "low": 0, "high": 6},
    }
    if any(part in template.body for part in ("[0]", "// len", "[-1]")):
        kinds["w"]["min_length"] = 1
    if template.name in ("product", "squares", "weighted"):
        kinds["w"].update(low=-3, high=7)
    if template.name == "sign":
        integer = {"kind": "int", "low": -3, "high": 3}
    choices = [(o.format(**names), tuple(option.format(**names) for option in options)) for o, options in chosen]
    return lines, spec.format(**names), [kinds.get(p, integer) for p in parameters], choices


def _failing(program: tuple[str, ...], calls: list[tuple[Any, ...]], expected: list[Any]) -> list[int]:
    function = compile_program(program)
    return [
        index
        for index, (arguments, value) in enumerate(zip(calls, expected, strict=True))
        if not _same(evaluate(function, arguments), value)
    ]


def _same(got: Any, value: Any) -> bool:
    return type(got) is type(value) and got == value


def _telling(failing: list[int], rivals: list[list[int]], calls: int) -> list[int]:
    """Two calls: the failing one that also exposes most rivals, then the one that exposes most of the rest."""
    first = max(failing, key=lambda index: sum(index in rival for rival in rivals))
    rest = [rival for rival in rivals if first not in rival]
    second = max((i for i in range(calls) if i != first), key=lambda index: sum(index in rival for rival in rest))
    return [first, second]


def _task(
    template: Template,
    split: str,
    key: str,
    spec: str,
    fixed: tuple[str, ...],
    broken: tuple[str, ...],
    arguments: list[dict[str, Any]],
    shown: tuple[tuple[Any, ...], ...],
    values: list[Any],
    ambiguous: bool,
    line: int,
) -> Task:
    function = fixed[0].split("(")[0].removeprefix("def ")
    asserts = [
        f"{function}({', '.join(map(repr, call))}) == {value!r}" for call, value in zip(shown, values, strict=True)
    ]
    oracle = {"module": "solution", "function": function, "arguments": arguments}
    tests = "\n".join([f"from solution import {function}", "", *(f"assert {text}" for text in asserts), ""])
    return Task(
        id=f"{template.name}/{hashlib.sha256(f'{key}{broken}'.encode()).hexdigest()[:10]}",
        split=split,
        instruction="\n".join([f"Fix {function} in solution.py: {spec}", *asserts]),
        files={"solution.py": "\n".join(broken) + "\n", "test_solution.py": tests},
        grading={"solution/solution.py": "\n".join(fixed) + "\n", "tests/oracle.json": json.dumps(oracle)},
        metadata={"template": template.name, "ambiguous": ambiguous, "line": line},
    )
