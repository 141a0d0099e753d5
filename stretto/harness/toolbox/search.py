"""Finding things: glob and grep by ripgrep, search_code by an index. All of them run in the box."""

from __future__ import annotations

from stretto.harness.toolbox.workspace import FILE_SECONDS, Refused, Workspace, folder, printable
from stretto.sandbox.box import Result
from stretto.sandbox.libraries import LIBRARIES

RG = f"{LIBRARIES}/bin/rg"
"""Where the box has ripgrep: the tool set asks for its distribution."""
_OPTIONS = ["--no-config", "--color=never", "--no-require-git", "--sort=path", "--threads=1", "--null"]
_KEEP = 1 << 20
_WIDTH = "300"


async def glob(workspace: Workspace, pattern: str, path: str = ".") -> str:
    result = await _rg(workspace, ["--files", f"--glob={pattern}", "--", f"./{folder(path)}"])
    names = [_name(name) for name in result.stdout.split(b"\0") if name.strip(b"\n")]
    return _first(sorted(names), workspace.limits.entries, "files") or f"no file matches {pattern}"


async def grep(
    workspace: Workspace,
    pattern: str,
    path: str = ".",
    glob: str = "",
    ignore_case: bool = False,
    context: int = 0,
    files_only: bool = False,
) -> str:
    options = ["--line-number", "--with-filename", f"--max-columns={_WIDTH}", "--max-columns-preview"]
    options += [f"--glob={glob}"] if glob else []
    options += ["--ignore-case"] if ignore_case else []
    options += ["--files-with-matches"] if files_only else [f"--context={min(context, 20)}"]
    result = await _rg(workspace, [*options, f"--regexp={pattern}", "--", f"./{folder(path)}"])
    if files_only:
        found = [_name(name) for name in result.stdout.split(b"\0") if name.strip(b"\n")]
        return _first(found, workspace.limits.entries, "files") or "no match"
    return _first(_lines(result.stdout), workspace.limits.matches, "lines") or "no match"


async def search_code(workspace: Workspace, query: str, path: str = ".") -> str:
    request = {"query": query, "path": folder(path), "places": min(workspace.limits.matches, 20)}
    return await workspace.inside("index.py", request)


async def _rg(workspace: Workspace, arguments: list[str]) -> Result:
    if any("\0" in argument for argument in arguments):
        raise Refused("a search can't hold the character NUL")
    seconds = workspace.seconds(FILE_SECONDS)
    result: Result = await workspace.box.exec([RG, *_OPTIONS, *arguments], b"", seconds, keep=_KEEP)
    if result.timed_out:
        raise Refused(f"this took longer than {seconds:g} s and was stopped; search a smaller part")
    said = result.stderr.decode(errors="replace").strip()
    if result.exit_code not in (0, 1) and not result.stdout and not result.truncated:
        raise Refused(
            said.removeprefix("rg: ").removeprefix("./")[:500] or f"the search ended with exit code {result.exit_code}"
        )
    return result


def _lines(output: bytes) -> list[str]:
    """`path:line:text` of matches, `path-line-text` of context. A NUL ends each name, which may hold a newline."""
    found, at = [], 0
    while at < len(output):
        if output.startswith(b"--\n", at):
            found.append("--")
            at += 3
            continue
        name_end = output.find(b"\0", at)
        if name_end < 0:
            break
        line_end = output.find(b"\n", name_end)
        line_end = len(output) if line_end < 0 else line_end
        name, rest = _name(output[at:name_end]), output[name_end + 1 : line_end].decode(errors="replace")
        number = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        mark = rest[len(number) : len(number) + 1] or ":"
        found.append(f"{name}{mark}{rest}".rstrip("\r"))
        at = line_end + 1
    return found


def _name(raw: bytes) -> str:
    return printable(raw.strip(b"\n").removeprefix(b"./").removeprefix(b"./").decode(errors="surrogateescape"))


def _first(found: list[str], limit: int, what: str) -> str:
    cut = [f"[cut: {len(found) - limit} {what} more; search a smaller part]"] if len(found) > limit else []
    return "\n".join(found[:limit] + cut)
