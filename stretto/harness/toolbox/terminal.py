"""The terminal, and tools that are declared as a command: what was written, and how it ended."""

from __future__ import annotations

import json
from typing import Any

from stretto.harness.toolbox.workspace import Workspace
from stretto.sandbox.box import Result

USUAL_SECONDS = 30.0


async def run(workspace: Workspace, command: str, seconds: int | None = None) -> str:
    limit = workspace.seconds(float(seconds or USUAL_SECONDS))
    shell = await workspace.shell()
    return told(await shell.run(command, limit, workspace.limits.observation), limit)


async def run_command(workspace: Workspace, command: str, arguments: dict[str, Any]) -> str:
    """A tool that its declaration gives a command: it reads the arguments as JSON, and what it writes is the answer."""
    limit = workspace.seconds(workspace.limits.seconds)
    stdin = json.dumps(arguments, ensure_ascii=False).encode()
    return told(
        await workspace.box.exec(["/bin/sh", "-c", command], stdin, limit, keep=workspace.limits.observation), limit
    )


def told(result: Result, seconds: float) -> str:
    parts = [part.decode(errors="replace").rstrip() for part in (result.stdout, result.stderr)]
    parts = [part for part in parts if part]
    if result.timed_out:
        parts.append(f"[stopped after {seconds:g} s]")
    elif result.oom:
        parts.append("[killed: out of memory]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    if result.restarted:
        parts.append("[the terminal ended; a new one has begun]")
    return "\n".join(parts) or "[no output]"
