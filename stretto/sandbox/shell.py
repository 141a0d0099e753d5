"""A bash that stays in its box: what a terminal tool talks to.

Folder, variables, functions and background jobs last from one command to the next. Commands go to bash over one pipe
and their status comes back over another, which the commands themselves don't have; output is never searched for a
prompt. As in a terminal, stdout and stderr are one stream, and what background jobs write shows with the next command.

A command that is out of time is ended with all that it started; background jobs of earlier commands live on. When that
does not bring bash back (it was itself the loop), or the command ended bash, a new one begins and `Result.restarted`
says so.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

from stretto.sandbox.inside.wire import PATIENCE
from stretto.sandbox.output import Kept

if TYPE_CHECKING:
    from stretto.sandbox.box import Box, Result
    from stretto.sandbox.process import Process, Stream

GRACE = {1: 0.3, 2: 3.0}
"""Seconds for bash to come back: when there was nothing to end (it is the loop itself), and when there was."""
KEEP = 32768
MOST = 16 << 20
"""A command that has written so many bytes is ended: it would keep the worker busy with what nobody sees."""
DRIVER = (
    'cd -- "$1" 2>/dev/null || cd /workspace; set --; exec 250<&0 251>&2 0</dev/null 2>&1; shopt -s expand_aliases; '
    "__status=0; __return() { return $__status; }; "
    "while IFS= read -r -d '' -u 250 __token && IFS= read -r -d '' -u 250 __command; do "
    '__return; eval "$__command" 250<&- 251>&-; __status=$?; '
    'printf \'%s %s %s\\0\' "$__token" "$__status" "$PWD" >&251; done'
)
"""One line, so that bash's messages say `line 1`."""


class Shell:
    """Made by `Box.shell`. One command at a time."""

    def __init__(self, box: Box):
        self.box = box
        self.cwd = "/workspace"
        self._kept = Kept(KEEP)
        self._tokens = itertools.count(1)
        self._turn = asyncio.Lock()
        self._process: Process
        self._spoiled = False
        """A command was given up by its caller and may still run."""

    @classmethod
    async def start(cls, box: Box) -> Shell:
        shell = cls(box)
        await shell._begin()
        return shell

    async def run(self, command: str, seconds: float | None = None, keep: int = KEEP) -> Result:
        """Run `command`; its output, with what background jobs wrote since the last one, is in `stdout`.

        BoxError when the command can't be given to bash, or bash can't be started.
        """
        from stretto.sandbox.box import BoxError, Result

        data = command.encode("utf-8", "surrogatepass")
        if b"\0" in data:
            raise BoxError("a command can't have a NUL character in it")
        async with self._turn:
            limit = self.box.seconds if seconds is None else seconds
            if self._process.exit_code is not None or self._spoiled:
                await self._process.close()
                await self._begin()
            self._spoiled = True
            self._kept.keep = keep
            slot = self.box.slot
            await self.box._simple(b"mark", b"%d" % self._process.pid)
            begun = time.monotonic()
            status, timed_out, flooded = await self._command(data, begun, limit)
            seconds = time.monotonic() - begun
            restarted = status is None
            if restarted:
                status = await self._begin_again(timed_out)
            self._drain()
            stdout, cut_short = self._kept.take()
            self._spoiled = False
            return Result(
                exit_code=137 if timed_out else status or 0,
                signal=9 if timed_out else max(0, (status or 0) - 128),
                timed_out=timed_out,
                oom=slot is not None and slot.killed(),
                stdout=stdout,
                stderr=b"",
                truncated=cut_short or flooded,
                seconds=seconds,
                memory_peak=slot.memory_peak() if slot else None,
                process_peak=slot.process_peak() if slot else None,
                restarted=restarted,
            )

    async def close(self) -> None:
        """End bash and its background jobs."""
        await self._process.close()

    async def _begin(self) -> None:
        self._process = await self.box.open(["bash", "--noprofile", "--norc", "-c", DRIVER, "bash", self.cwd])
        self._process.stdout.hear = self._hear
        self._hear(self._process.stdout.give(1 << 20))

    async def _begin_again(self, timed_out: bool) -> int:
        """After bash ended, or went on where it should not; returns the exit code of the command that did it."""
        self._drain()
        code = self._process.exit_code
        await self._process.close()
        if not timed_out:
            self.cwd = "/workspace"
        await self._begin()
        return 137 if timed_out or code is None else code

    async def _command(self, data: bytes, begun: float, limit: float) -> tuple[int | None, bool, bool]:
        """(exit code or None when bash did not come back, out of time, flooded)."""
        token = b"%d" % next(self._tokens)
        deadline = begun + limit
        giving = asyncio.ensure_future(self._process.write(token + b"\0" + data + b"\0", PATIENCE * limit + 1))
        giving.add_done_callback(lambda done: done.cancelled() or done.exception())  # bash ended: seen below
        try:
            while True:
                seen = self._seen()
                if (status := self._status(token)) is not None or self._gone():
                    return status, False, False
                flooded = self._kept.seen > MOST
                if not flooded and (left := deadline - time.monotonic()) > 0:
                    await self._news(seen, left)
                    continue
                certain = flooded or time.monotonic() > begun + PATIENCE * limit
                if ended := await self._interrupt(limit, certain):
                    return await self._late(token, GRACE[ended]), not flooded, flooded
                deadline = time.monotonic() + 0.1 * limit
        finally:
            giving.cancel()

    async def _late(self, token: bytes, seconds: float) -> int | None:
        """The status of a command whose processes were ended."""
        until = time.monotonic() + seconds
        while True:
            seen = self._seen()
            left = until - time.monotonic()
            if (status := self._status(token)) is not None or self._gone() or left <= 0:
                return status
            await self._news(seen, left)

    def _streams(self) -> tuple[Stream, Stream, Stream]:
        return self._process.stderr, self._process.status, self._process.stdout

    def _seen(self) -> tuple[int, ...]:
        """To be taken before looking for what `_news` would wait for."""
        return tuple(stream.news for stream in self._streams())

    async def _news(self, seen: tuple[int, ...], seconds: float) -> None:
        """Until bash may have answered or ended, the output may be a flood, or the time is up."""
        streams = zip(self._streams(), seen, strict=True)
        waits = [asyncio.ensure_future(stream.wait(since)) for stream, since in streams]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _interrupt(self, limit: float, certain: bool) -> int:
        request = (b"interrupt", b"%d" % self._process.pid, b"%f" % limit, b"%d" % certain)
        return int((await self.box._simple(*request))[0])

    def _status(self, token: bytes) -> int | None:
        """What bash reported for `token`, once it has."""
        held = self._process.stderr.held
        while (end := held.find(b"\0")) >= 0:
            name, _, rest = self._process.stderr.give(end + 1)[:-1].partition(b" ")
            code, _, folder = rest.partition(b" ")
            if name == token and code.isdigit():
                self.cwd = folder.decode("utf-8", "replace")
                return int(code)
        return None

    def _gone(self) -> bool:
        return self._process.exit_code is not None

    def _hear(self, data: bytes) -> None:
        self._kept.add(data)
        if self._kept.seen > 2 * MOST:
            self._process.stdout.pause()  # whoever writes so much has to wait for the next command

    def _drain(self) -> None:
        stream = self._process.stdout
        while not stream.ended and self._kept.seen <= 2 * MOST and stream.take():
            pass
        stream.resume()
