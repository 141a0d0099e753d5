"""The tools of the quickstart: read a file, patch a line, run the visible tests, submit.

A tool is a JSON schema and a coroutine on a box. Broken or refused calls are answered with a sentence; whatever the
policy does, the result is an observation and a status, never an exception of ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

from stretto.harness.parse import Attempt
from stretto.records import CallStatus
from stretto.sandbox.box import BoxError

MAX_OBSERVATION = 2000
"""Characters of an observation; the rest is cut, with a note."""

_TESTS = "test_solution.py"
_RUNNER = (resources.files("stretto.harness") / "run_visible.py").read_text()
_TYPES = {"string": str, "integer": int}


class Refused(Exception):
    """The tool could not do it; the sentence is the observation."""


class ToolBox(Protocol):
    """What tools need of a sandbox box."""

    async def read(self, path: str, limit: int = 65536) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def python(self, source: str, stdin: bytes = b"", seconds: float | None = None) -> Any: ...


@dataclass(frozen=True)
class Workspace:
    """A box, and the files it was started with."""

    box: ToolBox
    given: dict[str, str]


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, str]  # name -> JSON type; all are required
    run: Callable[..., Awaitable[str]]

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI `tools` entry."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


async def _read_file(workspace: Workspace, path: str) -> str:
    lines = (await _read_text(workspace.box, path)).splitlines()
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1)) or f"{path} is empty"


async def _edit_file(workspace: Workspace, path: str, line: int, text: str) -> str:
    if path not in workspace.given:
        raise Refused(f"there is no {path[:100]!r} to edit")
    lines = workspace.given[path].splitlines()
    if not 1 <= line <= len(lines):
        raise Refused(f"{path} has no line {line}")
    lines[line - 1] = text  # which may hold several lines
    await workspace.box.write(path, ("\n".join(lines) + "\n").encode())
    return "ok"


async def _run_tests(workspace: Workspace) -> str:
    result = await workspace.box.python(_RUNNER, stdin=_TESTS.encode())
    if result.timed_out:
        return "FAILED timed out"
    if result.exit_code != 0:
        return f"FAILED the tests died (exit code {result.exit_code})"
    return result.stdout.decode(errors="replace").strip() or "FAILED no output"


async def _submit(workspace: Workspace) -> str:
    return "submitted"


async def _read_text(box: ToolBox, path: str) -> str:
    try:
        return (await box.read(path)).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not UTF-8 text") from error


TOOLS = {
    tool.name: tool
    for tool in (
        Tool("read_file", "Show a file with line numbers.", {"path": "string"}, _read_file),
        Tool(
            "edit_file",
            "Replace a numbered line of a file as it was given, by one or more lines; an earlier edit of it is gone.",
            {"path": "string", "line": "integer", "text": "string"},
            _edit_file,
        ),
        Tool("run_tests", "Run the visible tests.", {}, _run_tests),
        Tool("submit", "Hand in the work; nothing can be changed afterwards.", {}, _submit),
    )
}


async def run_call(attempt: Attempt, workspace: Workspace) -> tuple[str, CallStatus]:
    """Carry out one attempt: its observation, and OK or what was wrong with it.

    BoxLost (the box failed, not the policy) passes through to the caller.
    """
    if attempt.status is not CallStatus.OK:
        return f"error: {attempt.error}", attempt.status
    tool = TOOLS.get(attempt.name)
    if tool is None:
        return f"error: no tool named {attempt.name[:40]!r}; there are {', '.join(TOOLS)}", CallStatus.UNKNOWN_TOOL
    problem = _mismatch(tool, attempt.arguments)
    if problem:
        return f"error: {problem}", CallStatus.BAD_ARGUMENTS
    try:
        observation = await tool.run(workspace, **attempt.arguments)
    except (Refused, BoxError) as error:
        return f"error: {error}"[:MAX_OBSERVATION], CallStatus.FAILED
    if len(observation) > MAX_OBSERVATION:
        observation = f"{observation[:MAX_OBSERVATION]}\n[cut: {len(observation) - MAX_OBSERVATION} characters more]"
    return observation, CallStatus.OK


def _mismatch(tool: Tool, arguments: dict[str, Any]) -> str:
    for name, kind in tool.parameters.items():
        if name not in arguments:
            return f"{tool.name} needs {name}"
        if type(arguments[name]) is not _TYPES[kind]:
            return f"{name} must be of type {kind}"
    extra = sorted(set(arguments) - set(tool.parameters))
    return f"{tool.name} takes no {extra[0][:40]!r}" if extra else ""
