"""pass@1 by execution: the model writes the body of one function, in one greedy go, and its tests decide.

    a task whose file has one unwritten function ─▶ instruction, file down to the body ─▶ greedy ─▶ cut at the dedent
                                                                     grading/, in sandbox boxes ◀─ file with the body

Tasks are task folders (`stretto tasks make codeio --out DIR` makes 2,750 such functions). A function is unwritten when
its body, docstring aside, is `pass`, `...` or `raise NotImplementedError`. There are no tools and no second try. The
graders are those of training: nothing that the model wrote runs outside a box, and hidden inputs are never shown.
"""

from __future__ import annotations

import ast
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.grader import Grader
from stretto.grading.submission import base_tree
from stretto.midtrain.complete import greedy
from stretto.midtrain.tokens.marks import Encoder
from stretto.model import checkpoint
from stretto.model.transformer import Transformer
from stretto.records import Outcome, Task
from stretto.sandbox import check
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder
from stretto.watch.statistics import wilson

TOKENS = 320
"""Tokens that the model may write."""


@dataclass(frozen=True)
class Hole:
    """One unwritten function. The body goes between `before` and `after`, indented by `indent` or more."""

    task: Task
    path: str
    before: str
    after: str
    indent: int

    @property
    def prompt(self) -> str:
        instruction = self.task.instruction.replace('"""', "'''").replace("\\", "\\\\")
        return f'"""{instruction}\n"""\n\n{self.before}'


@dataclass(frozen=True)
class Passed:
    """`unmeasured` tasks failed through no fault of the model, and are in no share; `left_out` have no hole."""

    pass_at_1: float
    ci95: tuple[float, float]
    tasks: int
    unmeasured: int
    left_out: int
    outcomes: dict[str, int]


def show(model: Path, place: Path, as_json: bool, console: Console) -> int:
    """`stretto eval MODEL --execution DIR`: measure and print. Raises ValueError when no task fits."""
    found = folder.read_all(place)
    holes = [hole for task in found if (hole := hole_of(task)) is not None]
    if not holes:
        raise ValueError(
            f"none of the {len(found)} tasks of {place} has exactly one function that is yet to be written"
        )
    sandbox = SandboxConfig()
    check.require(sandbox.backend)
    written = bodies(checkpoint.load(model), Encoder(model), holes)
    result = asyncio.run(pass_at_1(holes, written, sandbox, len(found) - len(holes)))
    if as_json:
        print(json.dumps(asdict(result)))
        return 0
    table = Table(title=f"{model.name} on {place}: functions written in one go")
    for column in ("pass@1", "95 % interval", "tasks", "unmeasured", "left out"):
        table.add_column(column, justify="right")
    counts = (f"{count:,}" for count in (result.tasks, result.unmeasured, result.left_out))
    table.add_row(f"{result.pass_at_1:.1%}", "{:.1%} – {:.1%}".format(*result.ci95), *counts)
    console.print(table)
    return 0


def hole_of(task: Task) -> Hole | None:
    """The one function to write, or None where there is none or more than one."""
    found: list[Hole] = []
    for path, data in base_tree(task).items():
        if path.endswith(".py"):
            try:
                text = data.decode()
                tree = ast.parse(text)
            except (SyntaxError, ValueError):  # UnicodeDecodeError is one
                continue
            functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            found += [hole for node in functions if (hole := _hole(task, path, text, node)) is not None]
    return found[0] if len(found) == 1 else None


def _hole(task: Task, path: str, text: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Hole | None:
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    if len(body) != 1 or not _unwritten(body[0]) or body[0].end_lineno is None:
        return None
    lines = text.splitlines(keepends=True)
    first, last = body[0].lineno - 1, body[0].end_lineno
    if lines[first][: body[0].col_offset].strip():  # on the line of the `def` itself
        return None
    return Hole(task, path, "".join(lines[:first]), "".join(lines[last:]), body[0].col_offset)


def _unwritten(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise) and statement.exc is not None:
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value is ...
    return isinstance(statement, ast.Pass)


def bodies(model: Transformer, encoder: Encoder, holes: Sequence[Hole]) -> list[str]:
    """What the model writes for each, cut where the function ends. `model` no longer learns afterwards."""
    room = model.spec.max_positions
    limit = min(TOKENS, room // 2)
    ids = encoder.encode([hole.prompt for hole in holes])
    prompts = [[encoder.end, *each[-(room - limit - 1) :]] for each in ids]  # what is nearest to the body stays
    answers = greedy(model, prompts, [limit] * len(prompts), encoder.ends)
    texts = [encoder.tokenizer.decode(each, skip_special_tokens=False) for each in answers]
    return [until_dedent(text, hole.indent) for text, hole in zip(texts, holes, strict=True)]


def until_dedent(text: str, indent: int) -> str:
    """The lines up to the first that is indented by less; lines in brackets or strings that reach further left end it,
    too, as they do in the benchmarks that cut at the dedent."""
    kept: list[str] = []
    for line in text.splitlines():
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            break
        kept.append(line)
    return "\n".join(kept).rstrip() + "\n"


async def pass_at_1(holes: Sequence[Hole], written: Sequence[str], sandbox: SandboxConfig, left_out: int) -> Passed:
    """Grade one body each. Raises ValueError when nothing could be measured."""
    pool = BoxPool(sandbox)
    await pool.start()
    grader = Grader(GradingConfig(), pool)
    outcomes: Counter[str] = Counter()
    solved, why = 0, ""
    try:
        for hole, body in zip(holes, written, strict=True):
            tree = base_tree(hole.task) | {hole.path: f"{hole.before}{body}{hole.after}".encode("utf-8", "replace")}
            grade = (await grader.grade(hole.task, [tree], seed=0))[0]
            outcomes[grade.outcome.value] += 1
            solved += grade.solved
            why = grade.reason if grade.outcome is Outcome.INFRA else why
    finally:
        await grader.close()
        await pool.close()
    unmeasured = outcomes[Outcome.INFRA.value]
    measured = len(holes) - unmeasured
    if not measured:
        raise ValueError(f"no task could be measured: {why}")
    interval = wilson(solved, measured)
    return Passed(solved / measured, interval, measured, unmeasured, left_out, dict(outcomes))
