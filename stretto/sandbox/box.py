"""One box, as its user sees it: run code, read and write files, stop.

Blame is decided here. `BoxError` is the policy's doing (no such file, a link where a file was, a box its own command
broke); `BoxLost` is ours, proven from outside: the box died or went silent with no policy code running in it.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from stretto.sandbox.cgroup import Slot
from stretto.sandbox.inside import PATIENCE, pack, unpack

ANSWER_SECONDS = 20.0
"""An idle box answers a request within this time, or it is lost."""
OUTPUT = 32768
"""Bytes kept of each output of a command, unless asked otherwise."""
MAX_ANSWER = 1 << 26
MAX_PATH = 1024


class BoxError(Exception):
    """The policy's doing; the message is a sentence fit for an observation."""


class BoxBroken(BoxError):
    """A command destroyed its own box; nothing more can be done in it."""


class BoxLost(Exception):
    """The box failed us with no policy code running: infrastructure."""


@dataclass(frozen=True)
class Result:
    """What became of a command. `stdout` and `stderr` hold the head of each stream."""

    exit_code: int  # 128 + signal when a signal ended it
    signal: int  # 0: none
    timed_out: bool
    oom: bool  # the kernel killed one of its processes for memory
    stdout: bytes
    stderr: bytes
    truncated: bool  # more was written than kept; a command that floods is also killed
    seconds: float


class Box:
    """Made by `BoxPool`. One request at a time; a cancelled request ends the box, since its state is unknown.

    box = await pool.box({"solution.py": "def total(xs): return sum(xs)"})
    result = await box.python("import solution; print(solution.total([1, 2]))")
    await box.stop()
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        slot: Slot | None,
        seconds: float,
        end: Callable[[], Coroutine[Any, Any, None]],
        ours: Callable[[], bool] = lambda: False,
    ):
        """`end` waits for the box's processes to be gone; `ours` tells whether what carries the box has failed."""
        self.reader, self.writer, self.slot, self.seconds = reader, writer, slot, seconds
        self._end, self._ours = end, ours
        self._turn = asyncio.Lock()
        self._over: Exception | None = None

    async def read(self, path: str, limit: int = 65536) -> bytes:
        """The whole of a regular file; BoxError when there is none or it is longer than `limit` bytes."""
        return (await self._files(path, [b"read", clean(path), b"%d" % limit]))[0]

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a regular file, and the folders above it."""
        await self._files(path, [b"write", clean(path), data])

    async def write_all(self, files: dict[str, bytes]) -> None:
        """Several files in one round trip."""
        request = [b"write"]
        for path, data in files.items():
            request += [clean(path), data]
        await self._files("the workspace", request)

    async def files(self, max_files: int = 64, max_bytes: int = 1 << 20) -> dict[str, bytes]:
        """All regular files with a UTF-8 name; links, FIFOs and the like are passed over. BoxError beyond the caps."""
        fields = await self._files("the workspace", [b"files", b"%d" % max_files, b"%d" % max_bytes])
        found = {}
        for name, data in zip(fields[::2], fields[1::2], strict=True):
            try:
                found[name.decode()] = data
            except UnicodeDecodeError:
                continue
        return found

    async def python(self, source: str, stdin: bytes = b"", seconds: float | None = None, keep: int = OUTPUT) -> Result:
        """Run `source` as `__main__` in /workspace, forked from the interpreter already running in the box.

        `keep` is how many bytes of each output are returned.
        """
        return await self._command(b"python", [source.encode("utf-8", "surrogatepass")], stdin, seconds, keep)

    async def exec(
        self, argv: list[str], stdin: bytes = b"", seconds: float | None = None, keep: int = OUTPUT
    ) -> Result:
        """Run a program of the box in /workspace."""
        return await self._command(b"exec", [argument.encode() for argument in argv], stdin, seconds, keep)

    async def sleep(self, seconds: float) -> None:
        """Let the box do nothing for a while, for experiments with slow tools."""
        await self._ask([b"sleep", b"%f" % seconds], seconds + ANSWER_SECONDS, running=False)

    async def stop(self) -> None:
        """End the box and wait until nothing is left of it. May be called again."""
        self._over = self._over or BoxLost("the box was stopped")
        self.writer.close()
        await self._end()

    async def _files(self, what: str, request: list[bytes]) -> list[bytes]:
        status, *fields = await self._ask(request, ANSWER_SECONDS, running=False)
        if status == b"ok":
            return fields
        raise BoxError(f"{what}: {refusal(int(fields[0]), fields[1].decode())}")

    async def _command(
        self, operation: bytes, what: list[bytes], stdin: bytes, seconds: float | None, keep: int
    ) -> Result:
        limit = self.seconds if seconds is None else seconds
        request = [operation, b"%f" % limit, b"%d" % keep, stdin, *what]
        status, *fields = await self._ask(request, PATIENCE * limit + ANSWER_SECONDS, running=True)
        if status != b"ok":
            raise BoxError(f"the command could not be run: {refusal(int(fields[0]), fields[1].decode())}")
        wait, timed_out, truncated, flooded = (int(field) for field in fields[:4])
        signal = wait & 0x7F
        return Result(
            exit_code=128 + signal if signal else wait >> 8,
            signal=signal,
            timed_out=bool(timed_out),
            oom=self.slot is not None and self.slot.killed(),
            stdout=fields[5],
            stderr=fields[6],
            truncated=bool(truncated or flooded),
            seconds=float(fields[4]),
        )

    async def _ask(self, request: list[bytes], seconds: float, running: bool) -> list[bytes]:
        async with self._turn:
            if self._over:
                raise self._over
            try:
                async with asyncio.timeout(seconds):
                    self.writer.write(pack(request))
                    await self.writer.drain()
                    size = int.from_bytes(await self.reader.readexactly(4), "big")
                    if size > MAX_ANSWER:
                        raise ValueError(f"an answer of {size} bytes")
                    answer = unpack(await self.reader.readexactly(size))
                    if answer[0] != b"failed":
                        return answer
                    raise ValueError(answer[1].decode())
            except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
                what = f"did not answer within {seconds:.0f} s" if isinstance(error, TimeoutError) else "died"
                if running and not self._ours():
                    self._over = BoxBroken(f"the box {what} while a command ran in it; its files are gone")
                else:
                    self._over = BoxLost(f"the box {what} ({error or type(error).__name__})")
            except BaseException:
                self._over = BoxLost("a request to the box was cancelled")
                self.writer.close()
                raise
            self.writer.close()
            raise self._over


def clean(path: str) -> bytes:
    """`path` relative to the workspace, without `.` parts; BoxError when it leads elsewhere."""
    if path.startswith("/") and not path.startswith("/workspace/"):
        raise BoxError(f"{path}: outside the workspace; use a relative path")
    parts = [part for part in path.removeprefix("/workspace").split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BoxError(f"{path}: outside the workspace; `..` is not allowed")
    try:
        cleaned = "/".join(parts).encode()
    except UnicodeEncodeError:
        raise BoxError("the path is not valid text") from None
    if not cleaned or b"\0" in cleaned or len(cleaned) > MAX_PATH:
        raise BoxError(f"{path[:80]!r} is not the path of a file")
    return cleaned


def refusal(number: int, detail: str) -> str:
    known = {
        errno.ENOENT: "no such file",
        errno.ENOTDIR: "a part of the path is not a folder",
        errno.EISDIR: "is a folder",
        errno.ELOOP: "is a symbolic link",
        errno.ENXIO: "not a regular file",
        errno.ENOSPC: "no space left in the workspace",
        errno.EACCES: "permission denied",
        errno.EROFS: "the box is read-only",
    }
    return known.get(number, detail.lower() or f"error {number}")
