"""Boxes on machines of a remote service, through SWE-ReX (extra `swerex`): its servers run in Docker, Modal, Fargate ….

`sandbox.server` names one or more of them, separated by commas. A box has a server to itself while it lives, and is a
new folder there; how well that machine is shut off from the world is the service's matter. Each request is one command
of the server's: a small program (`remote_driver.py`) that does what PID 1 does elsewhere, and no more.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stretto.config import SandboxConfig
from stretto.sandbox.backends import TABLE
from stretto.sandbox.box import ANSWER_SECONDS, Box, BoxBroken, BoxError, BoxLost
from stretto.sandbox.carrier import Kind
from stretto.sandbox.check import SandboxUnavailable
from stretto.sandbox.folder import contents
from stretto.sandbox.inside.boot import sources
from stretto.sandbox.inside.wire import pack, unpack
from stretto.sandbox.layers import Snapshot
from stretto.sandbox.recipe import ENVIRONMENT

KEY = "SWEREX_TOKEN"
ALIVE_SECONDS = 60.0
FOLDER = "/tmp/{}"
"""A box's own, on its server: `workspace` and requests under way."""


class Swerex:
    """A carrier (`carrier.py`)."""

    def __init__(self, config: SandboxConfig):
        self.config = config
        self.capabilities = TABLE["swerex"]
        self.alive: set[Box] = set()
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        self._program = driver()

    async def open(self, trusted: bool) -> None:
        if find_spec("swerex") is None:
            raise SandboxUnavailable(
                "sandbox.backend is swerex, which needs the extra of that name: pip install 'stretto[swerex]'"
            )
        from swerex.runtime.remote import RemoteRuntime  # pyright: ignore[reportMissingImports]

        for server in filter(None, (part.strip() for part in self.config.server.split(","))):
            host, _, port = server.rpartition(":")
            runtime = RemoteRuntime(
                host=host, port=int(port), auth_token=os.environ.get(KEY, ""), timeout=ALIVE_SECONDS
            )
            answer = await runtime.is_alive()
            if not answer.is_alive:
                raise SandboxUnavailable(f"the SWE-ReX server {server} does not answer: {answer.message.strip()[:200]}")
            self._free.put_nowait(runtime)

    async def close(self) -> None:
        pass

    async def box(self, kind: Kind) -> Box:
        """Waits for a free server."""
        if isinstance(kind.base, Snapshot) or kind.libraries or kind.sealed:
            raise ValueError("sandbox.backend swerex has no snapshots, no libraries and no sealed boxes")
        files, programs = await asyncio.to_thread(contents, kind.base) if kind.base is not None else ({}, [])
        runtime = await self._free.get()
        box = RemoteBox(runtime, self)
        self.alive.add(box)
        try:
            await box.begin()
            if files:
                await box.write_all(files)
            if programs:
                await box.exec(["chmod", "+x", *programs])
        except BaseException:
            await asyncio.shield(box.stop())
            raise
        return box

    def give_back(self, box: RemoteBox) -> None:
        self._free.put_nowait(box.runtime)


class RemoteBox(Box):
    """A box whose requests go to a server, one command each."""

    def __init__(self, runtime: Any, carrier: Swerex):
        self.runtime, self.carrier = runtime, carrier
        self.folder = FOLDER.format(secrets.token_hex(6))
        super().__init__(asyncio.StreamReader(), None, None, carrier.config.seconds, self)  # pyright: ignore

    @property
    def capabilities(self):
        return self.carrier.capabilities

    async def begin(self) -> None:
        await self._execute(["mkdir", "-p", f"{self.folder}/workspace"], ANSWER_SECONDS)

    async def stop(self) -> None:
        self._over = self._over or BoxLost("the box was stopped")
        if self in self.carrier.alive:
            self.carrier.alive.discard(self)
            try:
                await self._execute(["rm", "-rf", self.folder], ANSWER_SECONDS)
            except BoxLost:
                pass  # the server is gone, and the folder with it
            finally:
                self.carrier.give_back(self)

    def ours(self) -> bool:
        return False

    async def snapshot(self) -> Snapshot:
        raise BoxError("boxes of this backend have no snapshots")

    async def _ask(
        self, request: list[bytes], seconds: float, running: bool, descriptors: Sequence[int] = ()
    ) -> list[bytes]:
        from swerex.runtime.abstract import WriteFileRequest  # pyright: ignore[reportMissingImports]

        async with self._turn:
            if self._over:
                raise self._over
            path = f"{self.folder}/request"
            try:
                async with asyncio.timeout(seconds):
                    content = base64.b64encode(pack(request)).decode()
                    await self.runtime.write_file(WriteFileRequest(path=path, content=content))
                said = await self._execute(
                    ["python3", "-I", "-c", self.carrier._program, f"{self.folder}/workspace", path], seconds
                )
                return unpack(base64.b64decode(said)[4:])
            except Exception as error:
                if running:  # its command runs as the user that serves us, and can end the server
                    self._over = BoxBroken(f"the box died while a command ran in it; its files are gone ({error})")
                else:
                    self._over = error if isinstance(error, BoxLost) else BoxLost(f"the remote box is lost ({error})")
            except BaseException:
                self._over = BoxLost("a request to the box was cancelled")
                raise
            raise self._over

    async def _execute(self, argv: list[str], seconds: float) -> str:
        from swerex.runtime.abstract import Command  # pyright: ignore[reportMissingImports]

        try:
            async with asyncio.timeout(seconds + ANSWER_SECONDS):
                done = await self.runtime.execute(Command(command=argv, timeout=seconds, env=ENVIRONMENT))
        except Exception as error:  # whatever the library or its server raises
            raise BoxLost(f"the remote box is lost ({error or type(error).__name__})") from error
        if done.exit_code:
            raise BoxLost(f"the remote box can't be used: {(done.stderr or done.stdout).strip()[-300:]}")
        return done.stdout


def driver() -> str:
    """One program: the modules `wire` and `files` for the workspace of argv[1], then `remote_driver.py`."""
    modules = {name: text.decode() for name, text in sources() if name.endswith((".wire", ".files"))}
    text = (Path(__file__).parent / "remote_driver.py").read_text()
    return (
        "import sys\n"
        "def module(name, text):\n"
        "    made = sys.modules[name] = type(sys)(name)\n"
        "    exec(text, made.__dict__)\n"
        "    return made\n"
        "package = module('stretto.sandbox.inside', '')\n"
        f"for name, text in {modules!r}.items():\n"
        "    made = module(name, text)\n"
        "    made.WORKSPACE = sys.argv[1]\n"
        "    setattr(package, name.rpartition('.')[2], made)\n"
        f"module('driver', {text!r}).main()\n"
    )
