"""The nano set's tools: a whole small file at once, one line of it patched as the file was given, its visible tests."""

from __future__ import annotations

from importlib import resources

from stretto.harness.toolbox.workspace import Refused, ToolBox, Workspace

_TESTS = "test_solution.py"
_RUNNER = (resources.files("stretto.harness") / "run_visible.py").read_text()


async def read_whole(workspace: Workspace, path: str) -> str:
    lines = (await _read_text(workspace.box, path)).splitlines()
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1)) or f"{path} is empty"


async def edit_line(workspace: Workspace, path: str, line: int, text: str) -> str:
    if path not in workspace.given:
        raise Refused(f"there is no {path[:100]!r} to edit")
    lines = workspace.given[path].splitlines()
    if not 1 <= line <= len(lines):
        raise Refused(f"{path} has no line {line}")
    lines[line - 1] = text  # which may hold several lines
    await workspace.box.write(path, ("\n".join(lines) + "\n").encode())
    return "ok"


async def run_tests(workspace: Workspace) -> str:
    result = await workspace.box.python(_RUNNER, stdin=_TESTS.encode())
    if result.timed_out:
        return "FAILED timed out"
    if result.exit_code != 0:
        return f"FAILED the tests died (exit code {result.exit_code})"
    return result.stdout.decode(errors="replace").strip() or "FAILED no output"


async def _read_text(box: ToolBox, path: str) -> str:
    try:
        return (await box.read(path)).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not UTF-8 text") from error
