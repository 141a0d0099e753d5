"""Files and folders: read_file, edit_file, list_dir. All of it happens in the box; only an edit's text is made here."""

from __future__ import annotations

from stretto.harness.toolbox.patch import apply_patch, replace_text
from stretto.harness.toolbox.workspace import FILE_BYTES, Refused, Workspace, folder
from stretto.sandbox.box import BoxError, clean


async def read_file(workspace: Workspace, path: str, start: int = 1, lines: int | None = None) -> str:
    shown = min(lines or workspace.limits.lines, workspace.limits.lines)
    request = {"do": "read", "path": clean(path).decode(), "start": start, "lines": shown}
    return await workspace.inside("look.py", request)


async def list_dir(workspace: Workspace, path: str = ".", depth: int = 1) -> str:
    request = {"do": "list", "path": folder(path), "depth": depth, "entries": workspace.limits.entries}
    return await workspace.inside("look.py", request)


async def edit_file(
    workspace: Workspace,
    path: str,
    old: str | None = None,
    new: str | None = None,
    all: bool = False,
    patch: str | None = None,
) -> str:
    if (patch is None) == (old is None) or (old is None) != (new is None):
        raise Refused("give old and new, or patch")
    if old == "":
        return await _create(workspace, path, new or "")
    text = await _text(workspace, path)
    if patch is not None:
        changed, places = apply_patch(text, patch, path)
    else:
        changed, places = replace_text(text, old or "", new or "", all, path)
    await workspace.box.write(path, changed.encode())
    return f"edited {path}: {', '.join(f'{first}-{last}' if last > first else f'{first}' for first, last in places)}"


async def _create(workspace: Workspace, path: str, new: str) -> str:
    try:
        held = await workspace.box.read(path, FILE_BYTES)
    except BoxError as error:
        if "no such file" not in str(error):
            raise
        held = b""
    if held:
        raise Refused(f"{path} exists; give as old the text to replace")
    await workspace.box.write(path, new.encode())
    return f"made {path}: {len(new.splitlines())} lines"


async def _text(workspace: Workspace, path: str) -> str:
    data = await workspace.box.read(path, FILE_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Refused(f"{path} is not UTF-8 text, so it can't be edited as text") from None
