"""A product's own agent, declared: any program that speaks to an OpenAI-compatible endpoint.

A TOML file that `harness.client` names:

    command = 'my-agent --yes --task "$(cat)"'      # run by bash in /workspace; the instruction comes on stdin
    libraries = ["openai"]                          # distributions of our environment, read-only in the box
    folder = "agent"                                # beside this file; read-only in the box, at /opt/libraries/agent
    environment.MY_AGENT_MODE = "headless"
    does.bash = "run"                               # what its tools are, for the counts in reports

How it is played is in `product.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.harness.declare import demand_known
from stretto.harness.toolbox.implementations import IMPLEMENTATIONS
from stretto.harness.toolset import ToolSet, ToolSetError
from stretto.sandbox.libraries import LibraryMissing, closure

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NEEDS = ["shell", "libraries"]
"""Capabilities of the sandbox without which no client can be played."""


@dataclass(frozen=True)
class Client:
    """`folder` is absolute, or empty. `digest` is a hash of all of it, the folder's files included."""

    command: str
    libraries: tuple[str, ...] = ()
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    does: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""

    @property
    def toolset(self) -> ToolSet:
        """A set without tools of ours, with what the box needs, and the limits of a submission."""
        folder = [self.folder] if self.folder else []
        return ToolSet(name="client", tools={}, libraries=(*self.libraries, *folder))

    @property
    def version(self) -> str:
        """Kept with each rollout: a policy that meets another client meets another world."""
        return f"client-{self.digest[:12]}"


@functools.cache
def load(path: str) -> Client:
    """Raises ToolSetError with a sentence for what can't be read or used."""
    file = Path(path)
    try:
        tree = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ToolSetError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ToolSetError(f"{path} is not valid TOML: {error}") from None
    demand_known(tree, ("command", "libraries", "folder", "environment", "does"), path)
    command, libraries, folder = tree.get("command", ""), tree.get("libraries", []), tree.get("folder", "")
    if not isinstance(command, str) or not command.strip():
        raise ToolSetError(f"{path} needs a command, as text")
    if not isinstance(libraries, list) or not all(isinstance(name, str) for name in libraries):
        raise ToolSetError(f"libraries of {path} must be a list of names")
    if any(name.startswith("/") for name in libraries):
        raise ToolSetError(f"libraries of {path} are names of Python distributions; a folder goes into folder")
    place = ""
    if folder:
        place = str((file.parent / str(folder)).resolve())
        if not Path(place).is_dir():
            raise ToolSetError(f"{path}: there is no folder {place}")
    does = _texts(tree, "does", path)
    demand_known(does.values(), IMPLEMENTATIONS, f"does of {path}")
    environment = _texts(tree, "environment", path)
    if wrong := [name for name in environment if not _NAME.fullmatch(name)]:
        raise ToolSetError(f"{path}: {wrong[0]!r} can't be the name of an environment variable")
    if any("\0" in text for text in (command, *environment.values())):
        raise ToolSetError(f"{path} holds a NUL character, which no command can")
    try:
        closure(libraries)
    except LibraryMissing as error:
        raise ToolSetError(f"{path}: {error}") from None
    return Client(command, tuple(libraries), place, environment, does, _digest(tree, place))


def _texts(tree: Mapping[str, Any], key: str, path: str) -> dict[str, str]:
    table = tree.get(key, {})
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ToolSetError(f"{key} of {path} must be a table of texts")
    return table


def _digest(tree: Mapping[str, Any], folder: str) -> str:
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode())
    for file in sorted(Path(folder).rglob("*")) if folder else ():
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()
