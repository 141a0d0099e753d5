"""What a tool works on: a box, and what the rollout has said and written down so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Protocol

from stretto.harness.toolset import Limits
from stretto.sandbox.box import clean
from stretto.sandbox.libraries import LIBRARIES

FILE_SECONDS = 10.0
"""Longest time that looking at files may take."""
SHORTEST = 0.5
"""Seconds that any command gets."""
FILE_BYTES = 1 << 20
"""Bytes of a file that can be edited."""


class Refused(Exception):
    """The tool could not do it; the sentence is the observation."""


class ToolBox(Protocol):
    """What tools need of a sandbox box."""

    async def read(self, path: str, limit: int = 65536) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def python(self, source: str, stdin: bytes = b"", seconds: float | None = None, keep: int = ...) -> Any: ...
    async def exec(self, argv: list[str], stdin: bytes = b"", seconds: float | None = None, keep: int = ...) -> Any: ...
    async def shell(self) -> Any: ...


@dataclass
class Workspace:
    """A box, the files it was started with, and the state that tools keep during one rollout."""

    box: ToolBox
    given: dict[str, str]
    limits: Limits = field(default_factory=Limits)
    user: tuple[str, ...] = ()
    """Answers of the user, in order; none: no user is there."""
    libraries: bool = False
    """Whether the box has libraries, for the terminal to find."""
    left: float = math.inf
    """Seconds that the rollout's tools may still run."""
    questions: int = 0
    todos: list[dict[str, str]] = field(default_factory=list)
    _shell: Any = None

    def seconds(self, wanted: float) -> float:
        """What a command may take: no more than is left, so that nobody runs out the clock of the lease."""
        return max(min(wanted, self.limits.seconds, self.left), SHORTEST)

    async def shell(self) -> Any:
        """The rollout's terminal, opened when it is first used."""
        if self._shell is None:
            self._shell = await self.box.shell()
            if self.libraries:
                await self._shell.run(f'export PATH="$PATH:{LIBRARIES}/bin" PYTHONPATH={LIBRARIES}', SHORTEST * 10)
        return self._shell

    async def inside(self, script: str, request: dict[str, Any]) -> str:
        """What one of the scripts of this folder, run in the box, answers. Raises Refused with its sentence."""
        source = (resources.files("stretto.harness.toolbox") / script).read_text()
        seconds = self.seconds(FILE_SECONDS)
        result = await self.box.python(source, ascii(request).encode(), seconds, keep=1 << 20)
        if result.timed_out:
            raise Refused(f"this took longer than {seconds:g} s and was stopped")
        answer, _, text = result.stdout.decode(errors="replace").partition("\n")
        if answer == "no":
            raise Refused(text)
        if answer != "ok":
            last = result.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {result.exit_code}"]
            raise Refused(f"the workspace could not be looked at ({last[0][:200]})")
        return text


def folder(path: str) -> str:
    """A path relative to the workspace, which itself is `.`; BoxError when it leads elsewhere."""
    return "." if path.rstrip("/") in ("", ".", "/workspace") else clean(path).decode()


def printable(name: str) -> str:
    """A file's name on one line, whatever is in it."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)
