"""One box, as its user sees it: run code, read and write files, stop.

Blame is decided here. `BoxError` is the policy's doing (no such file, a link where a file was, a box its own command
broke); `BoxLost` is ours, proven from outside: the box died or went silent with no policy code running in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stretto.sandbox.capabilities import Capabilities
from stretto.sandbox.cgroup import Slot
from stretto.sandbox.inside.wire import PATIENCE, pack, unpack
from stretto.sandbox.output import join

if TYPE_CHECKING:
    from stretto.sandbox.layers import Snapshot
    from stretto.sandbox.process import Process
    from stretto.sandbox.shell import Shell

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
    """What became of a command. `stdout` and `stderr` hold head and tail of each stream (`output.py`)."""

    exit_code: int  # 128 + signal when a signal ended it
    signal: int  # 0: none
    timed_out: bool
    oom: bool  # the kernel killed one of its processes for memory
    stdout: bytes
    stderr: bytes
    truncated: bool  # more was written than kept; a command that floods is also killed
    seconds: float
    cpu_seconds: float | None = None  # of all its processes
    memory_peak: int | None = None  # bytes of the whole box since its start, files in memory included
    process_peak: int | None = None  # processes and threads of the whole box since its start
    restarted: bool = False  # of a shell: it ended with this command, and a new one has begun


@dataclass(frozen=True)
class Stats:
    """What a box uses and has used; None where it is not measured."""

    processes: int
    cpu_seconds: float | None
    memory_peak: int | None
    process_peak: int | None


@dataclass(frozen=True)
class Entry:
    """One name in a workspace. `kind` is `file`, `folder`, `link` or `other`; `size` is that of a file's data."""

    path: str
    kind: str
    size: int


class Keeper(Protocol):
    """What a box asks of the pool it came from."""

    capabilities: Capabilities
    owner: tuple[int, int]
    """uid and gid on the host of what runs in the box."""

    async def end(self) -> None:
        """Wait for the box's processes to be gone."""
        ...

    def ours(self) -> bool:
        """Whether what carries the box has failed."""
        ...

    async def snapshot(self) -> Snapshot:
        """BoxError when it can't be made."""
        ...


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
        keeper: Keeper,
    ):
        self.reader, self.writer, self.slot, self.seconds, self.keeper = reader, writer, slot, seconds, keeper
        self._turn = asyncio.Lock()
        self._over: Exception | None = None
        self.again: Callable[[Snapshot], Awaitable[Box]] | None = None
        """Begin another box like this one on a snapshot; from the pool."""
        self._residents: set[Process] = set()
        self._frozen = False

    @property
    def capabilities(self) -> Capabilities:
        return self.keeper.capabilities

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

    async def listing(self, folder: str = "", max_entries: int = 4096, depth: int = 32) -> list[Entry]:
        """What is in a folder of the workspace (default: all of it) and below, sorted by path; links are not followed.

        Names that are not UTF-8 are passed over, and what is deeper than `depth`. BoxError beyond `max_entries`.
        """
        inner = clean(folder) if folder.strip("/") not in ("", ".", "workspace") else b""
        fields = await self._files(folder or "the workspace", [b"listing", inner, b"%d" % max_entries, b"%d" % depth])
        found = []
        for kind, size, name in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
            with contextlib.suppress(UnicodeDecodeError):
                found.append(Entry(name.decode(), kind.decode(), int(size)))
        return sorted(found, key=lambda entry: entry.path)

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

    async def open(self, argv: Sequence[str]) -> Process:
        """Start a program of the box that stays while other requests are answered; talk to it through its pipes."""
        self._need("shell")
        from stretto.sandbox.process import Process

        pipes = [os.pipe() for _ in range(4)]  # stdin, stdout, stderr, its wait status: (read end, write end)
        theirs = [pipes[0][0], *(end for _, end in pipes[1:])]
        ours = [pipes[0][1], *(end for end, _ in pipes[1:])]
        try:
            if self.keeper.owner[0] != os.geteuid():
                for end in theirs:
                    os.fchown(end, *self.keeper.owner)  # `/dev/stdout` is opened anew by programs
            request = [b"open", *(argument.encode() for argument in argv)]
            status, *fields = await self._ask(request, ANSWER_SECONDS, running=False, descriptors=theirs)
            if status != b"ok":
                raise BoxError(f"{argv[0]} could not be started: {refusal(int(fields[0]), fields[1].decode())}")
        except BaseException:
            for end in ours:
                os.close(end)
            raise
        finally:
            for end in theirs:
                os.close(end)
        process = Process(self, int(fields[0]), ours)
        self._residents.add(process)
        return process

    async def shell(self) -> Shell:
        """A bash that stays: folder, variables, functions and background jobs last from one command to the next."""
        from stretto.sandbox.shell import Shell

        return await Shell.start(self)

    async def snapshot(self) -> Snapshot:
        """The workspace as it is now, to begin other boxes with (`BoxPool.box(base=…)`). Close it when done.

        Processes are not part of it; those that run are stopped while it is taken. BoxError when it can't be copied.
        """
        self._need("fork")
        async with self._turn:
            if self._over:
                raise self._over
        if not self._residents or self._frozen:
            return await self.keeper.snapshot()
        await self.freeze()
        try:
            return await self.keeper.snapshot()
        finally:
            await self.thaw()

    async def fork(self, count: int) -> list[Box]:
        """`count` boxes that begin with this one's workspace, which they share until they write. This one lives on."""
        self._need("fork")
        snapshot = await self.snapshot()
        again = self.again
        assert again, "only a box of a pool can be forked"
        try:
            started = await asyncio.gather(*(again(snapshot) for _ in range(count)), return_exceptions=True)
        finally:
            await snapshot.close()
        boxes = [box for box in started if isinstance(box, Box)]
        for failure in started:
            if isinstance(failure, BaseException):
                await asyncio.gather(*(box.stop() for box in boxes))
                raise failure
        return boxes

    async def freeze(self) -> None:
        """Stop everything that runs in the box, until `thaw`. Nothing else may be asked of it meanwhile."""
        self._need("freeze")
        await self._simple(b"freeze")
        self._frozen = True

    async def thaw(self) -> None:
        self._frozen = False
        await self._simple(b"thaw")

    async def stats(self) -> Stats:
        processes, cpu = await self._simple(b"stats")
        slot = self.slot
        return Stats(
            processes=int(processes),
            cpu_seconds=float(cpu),
            memory_peak=slot.memory_peak() if slot else None,
            process_peak=slot.process_peak() if slot else None,
        )

    async def sleep(self, seconds: float) -> None:
        """Let the box do nothing for a while, for experiments with slow tools."""
        await self._ask([b"sleep", b"%f" % seconds], seconds + ANSWER_SECONDS, running=False)

    async def stop(self) -> None:
        """End the box and wait until nothing is left of it. May be called again."""
        self._over = self._over or BoxLost("the box was stopped")
        self.writer.close()
        for resident in tuple(self._residents):
            resident.let_go()
        await self.keeper.end()

    def _need(self, capability: str) -> None:
        if self.capabilities.missing(capability):
            raise ValueError(f"the backend of this box has no {capability}; see `stretto/sandbox/backends.py`")

    async def _simple(self, *request: bytes) -> list[bytes]:
        return await self._files("the box", list(request))

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
        wait, timed_out, flooded, *lost = (int(field) for field in fields[:5])
        elapsed, cpu = (float(field) for field in fields[5:7])
        signal = wait & 0x7F
        slot = self.slot
        return Result(
            exit_code=128 + signal if signal else wait >> 8,
            signal=signal,
            timed_out=bool(timed_out),
            oom=slot is not None and slot.killed(),
            stdout=join(fields[7], lost[0], keep),
            stderr=join(fields[8], lost[1], keep),
            truncated=bool(flooded or any(lost)),
            seconds=elapsed,
            cpu_seconds=cpu,
            memory_peak=slot.memory_peak() if slot else None,
            process_peak=slot.process_peak() if slot else None,
        )

    async def _ask(
        self, request: list[bytes], seconds: float, running: bool, descriptors: Sequence[int] = ()
    ) -> list[bytes]:
        async with self._turn:
            if self._over:
                raise self._over
            if self._frozen:
                raise RuntimeError("the box is frozen: thaw it first")
            try:
                async with asyncio.timeout(seconds):
                    self.writer.write(pack(request))
                    await self.writer.drain()
                    first = await self.reader.readexactly(1)
                    if descriptors and first == b"?":  # never the first byte of an answer's length
                        self._send_descriptors(descriptors)
                        first = await self.reader.readexactly(1)
                    size = int.from_bytes(first + await self.reader.readexactly(3), "big")
                    if size > MAX_ANSWER:
                        raise ValueError(f"an answer of {size} bytes")
                    answer = unpack(await self.reader.readexactly(size))
                    if answer[0] != b"failed":
                        return answer
                    raise ValueError(answer[1].decode())
            except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
                what = f"did not answer within {seconds:.0f} s" if isinstance(error, TimeoutError) else "died"
                if (running or self._residents) and not self.keeper.ours():
                    self._over = BoxBroken(f"the box {what} while a command ran in it; its files are gone")
                else:
                    self._over = BoxLost(f"the box {what} ({error or type(error).__name__})")
            except BaseException:
                self._over = BoxLost("a request to the box was cancelled")
                self.writer.close()
                raise
            self.writer.close()
            raise self._over

    def _send_descriptors(self, descriptors: Sequence[int]) -> None:
        """On the control socket itself, which no policy code can reach."""
        with socket.socket(fileno=os.dup(self.writer.get_extra_info("socket").fileno())) as channel:
            socket.send_fds(channel, [b"!"], list(descriptors))


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
