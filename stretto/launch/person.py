"""`stretto tasks try DIR`: be the agent yourself. The task's own box, tools, texts and grader, with you at the keys.

    > read_file path=solution.py
    > edit_file path=solution.py old="return x" new="return 2 * x"
    > edit_file path=notes.md old="" new=<<END        (a value over several lines, up to a line that says END)
    > run {"command": "python3 -m pytest -q"}         (or all arguments as JSON)
    > submit

With `--shell` each line is typed into the box's terminal, and `/submit`, `/read_file …` are the tools. Lines may come
from a file or a pipe as well.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stretto.config import Config, load
from stretto.grading.grader import Grader
from stretto.grading.outcome import Grade, settle
from stretto.harness.declare import of
from stretto.harness.ending import Ending
from stretto.harness.parse import Attempt
from stretto.harness.session import Called, Session
from stretto.harness.toolset import ToolSet
from stretto.records import CallStatus, Task
from stretto.sandbox import check
from stretto.sandbox.box import BoxError
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a file says must not steer the terminal
Ask = Callable[[str], str]
"""Shows a prompt and returns a line; EOFError at the end."""


def attempt(path: Path, shell: bool, words: list[str], console: Console, ask: Ask | None = None) -> Grade:
    """The grade of what you hand in; one without total when nothing was. Raises TaskError for a bad folder."""
    config = load("quickstart", words)
    check.require(config.sandbox.backend)
    return asyncio.run(_attempt(one(path), shell, config, console, ask or _keyboard))


def one(path: Path) -> Task:
    """The task at `path`: a task folder, or a folder that holds a single one."""
    if (path / "task.toml").is_file() or (path / "instruction.md").is_file():
        return folder.read(path)
    tasks = folder.read_all(path)
    if len(tasks) > 1:
        names = ", ".join(folder.name(task) for task in tasks[:3])
        raise folder.TaskError(f"{path} holds {len(tasks)} tasks; give the folder of one ({names}, …)")
    return tasks[0]


async def _attempt(task: Task, shell: bool, config: Config, console: Console, ask: Ask) -> Grade:
    if config.harness.client:
        raise folder.TaskError("harness.client plays by itself: leave it out to be the agent yourself")
    toolset = of(task, config.harness.tools)
    _introduce(task, toolset, shell, console)
    pool = BoxPool(config.sandbox.model_copy(update={"warm": 0}))
    await pool.start()
    session = Session(task, pool, toolset)
    try:
        ending, files = await _play(session, shell, console, ask)
        if ending is not Ending.SUBMITTED:
            return _tell(settle(ending, reason="" if ending is Ending.GAVE_UP else "nothing was handed in"), console)
        grader = Grader(config.grading, pool)
        try:
            (grade,) = await grader.grade(task, [files], seed=config.run.seed)
        finally:
            await grader.close()
        return _tell(grade, console)
    finally:
        await session.close()
        await pool.close()


async def _play(session: Session, shell: bool, console: Console, ask: Ask) -> tuple[Ending, dict[str, bytes]]:
    prompt = "$ " if shell else "> "
    while True:
        try:
            line = (await asyncio.to_thread(ask, prompt)).strip()
            if not line:
                continue
            if shell and not line.startswith("/"):
                await _type(session, line, console)
                continue
            call = await asyncio.to_thread(read_call, line.removeprefix("/") if shell else line, ask)
        except EOFError:
            console.print("[dim]the input ended without a submission[/]")
            return Ending.TURNS, {}
        if call.name in ("quit", "exit") and call.name not in session.toolset.tools:
            return Ending.TURNS, {}
        if call.name == "help" and "help" not in session.toolset.tools:
            _introduce(session.task, session.toolset, shell, console)
            continue
        called = await session.call(call)
        _show(called, console)
        if called.ended("submit"):
            try:
                return Ending.SUBMITTED, await session.collect()
            except BoxError as error:
                console.print(f"the workspace cannot be collected: {escape(str(error))}")
                return Ending.FAULT, {}
        if called.ended("give_up"):
            return Ending.GAVE_UP, {}


async def _type(session: Session, line: str, console: Console) -> None:
    """Type a line into the terminal, by the task's own tool for it where it has one."""
    tool = session.toolset.by_key("run")
    if tool is not None:
        name = tool.parameters["command"].name
        _show(await session.call(Attempt(CallStatus.OK, tool.name, {name: line})), console)
        return
    try:
        text = await session.typed(line)
    except BoxError as error:
        text = f"error: {error}"
    console.print(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text), markup=False, highlight=False, soft_wrap=True)


def read_call(line: str, ask: Ask) -> Attempt:
    """`name key=value …` or `name {json}`. A value `<<WORD` is the lines up to one that says WORD."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if rest.startswith("{"):
        try:
            return Attempt(CallStatus.OK, name, dict(json.loads(rest)))
        except (ValueError, TypeError) as error:
            return Attempt(CallStatus.BAD_JSON, name, error=f"the arguments are not valid JSON: {error}")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        return Attempt(CallStatus.BAD_ARGUMENTS, name, error=f"the arguments can't be read: {error}".lower())
    arguments = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            error = f"{word!r} is not of the form key=value; text with spaces needs quotes"
            return Attempt(CallStatus.BAD_ARGUMENTS, name, error=error)
        arguments[key] = _document(value[2:], ask) if value.startswith("<<") and len(value) > 2 else value
    return Attempt(CallStatus.OK, name, arguments, spelled=True)


def _document(end: str, ask: Ask) -> str:
    lines = []
    while (line := ask("")) != end:
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _keyboard(prompt: str) -> str:
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _introduce(task: Task, toolset: ToolSet, shell: bool, console: Console) -> None:
    console.rule(escape(task.id))
    console.print(task.instruction, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"tools {toolset.version}", title_justify="left")
    for head in ("tool", "fields", ""):
        table.add_column(head, overflow="fold")
    for tool in toolset.tools.values():
        names = [f"{item.name}" if item.required else f"\\[{item.name}]" for item in tool.parameters.values()]
        table.add_row(("/" if shell else "") + tool.name, " ".join(names), escape(tool.description))
    console.print(table)
    how = "lines go to the terminal, /tool key=value calls a tool" if shell else "tool key=value …, or tool {json}"
    console.print(f"[dim]{how}; help, quit[/]")


def _show(called: Called, console: Console) -> None:
    style = None if called.status is CallStatus.OK else "red"
    console.print(
        _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", called.observation), markup=False, highlight=False, style=style
    )


def _tell(grade: Grade, console: Console) -> Grade:
    what = "solved" if grade.solved else "not solved"
    counts = f", {grade.passed} of {grade.total}" if grade.total else ""
    console.print(f"[bold {'green' if grade.solved else 'yellow'}]{what}[/] ({grade.outcome.value}{counts})")
    if grade.reason:
        console.print(grade.reason, markup=False)
    if grade.detected:
        console.print(f"detected: {', '.join(grade.detected)}", markup=False)
    return grade
