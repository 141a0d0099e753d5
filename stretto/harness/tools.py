"""Carrying out a policy's calls: the tool set reads the arguments, the toolbox acts in the box, and whatever happens is
an observation and a status, never an exception of ours. A broken or refused call is answered with a sentence.
"""

from __future__ import annotations

from stretto.harness.declare import load
from stretto.harness.parse import Attempt
from stretto.harness.toolbox.implementations import IMPLEMENTATIONS
from stretto.harness.toolbox.terminal import run_command
from stretto.harness.toolbox.workspace import Refused, Workspace
from stretto.harness.toolset import Limits, Tool, ToolSet
from stretto.records import CallStatus
from stretto.sandbox import output
from stretto.sandbox.box import BoxError

NANO = load("nano")


async def run_call(attempt: Attempt, workspace: Workspace, toolset: ToolSet = NANO) -> tuple[str, CallStatus]:
    """Carry out one attempt: its observation, and OK or what was wrong with it.

    BoxLost (the box failed, not the policy) passes through to the caller.
    """
    if attempt.status is not CallStatus.OK:
        return f"error: {attempt.error}", attempt.status
    tool = toolset.tools.get(attempt.name)
    if tool is None:
        there = ", ".join(toolset.tools)
        return f"error: no tool named {attempt.name[:40]!r}; there are {there}", CallStatus.UNKNOWN_TOOL
    try:
        arguments = tool.arguments(attempt.arguments, attempt.spelled)
    except ValueError as error:
        return f"error: {error}", CallStatus.BAD_ARGUMENTS
    try:
        observation = await _carry_out(tool, workspace, arguments)
    except (Refused, BoxError) as error:
        return f"error: {error}"[: toolset.limits.observation], CallStatus.FAILED
    return cut(observation, toolset.limits), CallStatus.OK


def cut(observation: str, limits: Limits) -> str:
    """An observation no longer than its limit, with a note of what is left out."""
    over = len(observation) - limits.observation
    if over <= 0:
        return observation
    if limits.cut == "head":
        return f"{observation[: limits.observation]}\n[cut: {over} characters more]"
    return output.cut(observation.encode(errors="replace"), limits.observation).decode(errors="ignore")


async def _carry_out(tool: Tool, workspace: Workspace, arguments: dict) -> str:
    if tool.command:
        return await run_command(workspace, tool.command, arguments)
    return await IMPLEMENTATIONS[tool.does](workspace, **arguments)
