"""Boxes in containers: Docker and Podman by their command lines, gVisor by `runsc`. The same PID 1, over its stdin.

The kernel is then shared behind the container engine's own defences (Docker, Podman), or not at all (gVisor answers
system calls itself). A base is copied in, file by file, since none of the three lets an ordinary user stack layers;
there is no fork and no shell. What each can do is in `backends.py`; whether it holds is the engine's matter: `stretto
sandbox probe` is about bubblewrap, and says nothing of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.config import SandboxConfig
from stretto.sandbox.backends import TABLE
from stretto.sandbox.box import Box, BoxError, BoxLost
from stretto.sandbox.carrier import Kind
from stretto.sandbox.cgroup import Limits
from stretto.sandbox.check import SandboxUnavailable, unprivileged
from stretto.sandbox.folder import contents
from stretto.sandbox.inside.boot import BOOT_FROM_SOURCE, bundle
from stretto.sandbox.inside.wire import pack
from stretto.sandbox.layers import Snapshot
from stretto.sandbox.libraries import LIBRARIES, stage
from stretto.sandbox.recipe import ENVIRONMENT, HOME, SYSTEM_PYTHON, UID, reachable

START_SECONDS = 120.0
"""A first start may have to fetch an image."""
STOP_SECONDS = 20.0


class Containers:
    """A carrier (`carrier.py`)."""

    def __init__(self, config: SandboxConfig, limits: Limits):
        self.config, self.limits = config, limits
        self.capabilities = TABLE[config.backend]
        self.alive: set[Box] = set()
        self._names = itertools.count(1)
        self._prefix = f"box-{os.getpid()}-{secrets.token_hex(3)}"

    async def open(self, trusted: bool) -> None:
        cli = "runsc" if self.config.backend == "gvisor" else self.config.backend
        found = shutil.which(cli)
        if found is None:
            raise SandboxUnavailable(f"sandbox.backend is {self.config.backend}, but there is no `{cli}` on PATH")
        self._folder = Path(tempfile.mkdtemp(prefix="containers-"))
        self._folder.chmod(0o711)
        self._cli = found
        if cli == "runsc" and not reachable(Path(found)):
            self._cli = str(shutil.copy(found, self._folder))

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def box(self, kind: Kind) -> Box:
        if isinstance(kind.base, Snapshot):
            raise ValueError(f"sandbox.backend {self.config.backend} has no snapshots")
        files, programs = await asyncio.to_thread(contents, kind.base) if kind.base is not None else ({}, [])
        libraries = await self._stage(kind.libraries)
        name = f"{self._prefix}-{next(self._names)}"
        box = await self._begin(name, self._command(name, kind, libraries), kind.limits or self.limits)
        try:
            if files:
                await box.write_all(files)
                await box.exec(["chmod", "+x", *programs]) if programs else None
        except BaseException:
            await asyncio.shield(box.stop())
            raise
        return box

    async def _stage(self, names: tuple[str, ...]) -> str | None:
        if not names:
            return None
        if not self.capabilities.libraries:
            raise ValueError(
                f"sandbox.backend {self.config.backend} can't take libraries along ({', '.join(names)}): "
                "its image has a Python of its own; install them there"
            )
        folder = self._folder / f"libraries-{'-'.join(names)}"
        if not folder.exists():
            await asyncio.to_thread(stage, names, folder)
        return str(folder)

    def _command(self, name: str, kind: Kind, libraries: str | None) -> list[str]:
        limits = kind.limits or self.limits
        if self.config.backend == "gvisor":
            bundle_of(self._folder / name, limits, kind.sealed, libraries)
            return [*self._runsc(), "run", "--bundle", str(self._folder / name), name]
        return docker_command(self._cli, self.config.image, name, limits, kind.sealed)

    def _runsc(self) -> list[str]:
        return [self._cli, "--root", str(self._folder), "--rootless", "--network=none", "--ignore-cgroups"]

    async def _begin(self, name: str, command: Sequence[str], limits: Limits) -> Box:
        user: dict[str, Any] = {}
        if self.config.backend == "gvisor" and os.geteuid() == 0:
            uid, gid = unprivileged()
            os.chown(self._folder, uid, gid)
            user = {"user": uid, "group": gid, "extra_groups": []}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, **user)
        assert process.stdin and process.stdout and process.stderr
        keep = Keep(self, name, process)
        box = keep.box = Box(process.stdout, process.stdin, None, self.config.seconds, keep)
        self.alive.add(box)
        try:
            async with asyncio.timeout(START_SECONDS):
                code = bundle()
                box.writer.write(len(code).to_bytes(4, "big") + code)
                if await box.reader.readexactly(1) != b"+":
                    raise ValueError("PID 1 of the box did not greet")
                box.writer.write(pack([b"%d" % limits.memory, b"%d" % limits.processes]))
                await box.reader.readexactly(len(pack([b"ok"])))
        except BaseException as error:
            said = ""
            if process.returncode is not None or isinstance(error, EOFError):
                said = (await process.stderr.read(4096)).decode(errors="replace").strip()
            await asyncio.shield(box.stop())
            if not isinstance(error, Exception):
                raise
            raise BoxLost(
                f"{self.config.backend} could not start a box: {said or error or type(error).__name__}"
            ) from error
        return box

    async def remove(self, name: str) -> None:
        """Whatever may still be there of a container."""
        cli = [*self._runsc(), "delete", "-force"] if self.config.backend == "gvisor" else [self._cli, "rm", "-f"]
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*cli, name, stdin=null, stdout=null, stderr=null)
        await process.wait()
        await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)


class Keep:
    """What a box asks of what carries it (`box.Keeper`)."""

    box: Box

    def __init__(self, carrier: Containers, name: str, process: asyncio.subprocess.Process):
        self.carrier, self.name, self.process = carrier, name, process
        self.capabilities = carrier.capabilities
        self.owner = unprivileged()

    async def end(self) -> None:
        try:
            await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        if self.box in self.carrier.alive:
            self.carrier.alive.discard(self.box)
            await self.carrier.remove(self.name)

    def ours(self) -> bool:
        return False

    async def snapshot(self) -> Snapshot:
        raise BoxError("boxes of this backend have no snapshots")


def docker_command(cli: str, image: str, name: str, limits: Limits, sealed: bool) -> list[str]:
    """`docker run` (Podman's is the same) of a container that holds what a box should."""
    words = [cli, "run", "--rm", "--interactive", "--name", name, "--network", "none", "--read-only"]
    words += ["--user", f"{UID}:{UID}", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private"]
    words += ["--memory", str(limits.memory), "--memory-swap", str(limits.memory), "--cpus", str(limits.cpus)]
    words += ["--pids-limit", str(limits.processes + 1), "--hostname", "box", "--workdir", "/"]
    size = f"rw,nosuid,nodev,exec,mode=0777,size={limits.disk},nr_inodes={limits.inodes}"
    for folder in ("/workspace", "/tmp", "/dev/shm", HOME):
        words += ["--tmpfs", f"{folder}:{size.replace('rw', 'ro', 1) if sealed else size}"]
    for key, value in ENVIRONMENT.items():
        words += ["--env", f"{key}={value}"]
    return [*words, "--entrypoint", "python3", image, "-S", "-s", "-B", "-c", BOOT_FROM_SOURCE]


def bundle_of(folder: Path, limits: Limits, sealed: bool, libraries: str | None) -> None:
    """An OCI bundle for `runsc`: `/usr` of this machine, read-only, and places of limited size."""
    root = folder / "root"
    for name in ("usr", "proc", "dev", "tmp", "workspace", "etc", "opt/libraries", HOME.lstrip("/")):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc" / "passwd").write_text(f"user:x:{UID}:{UID}::{HOME}:/bin/bash\n")
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}, bound("/usr", "/usr")]
    places = ("/workspace", "/tmp", "/dev/shm", HOME)
    options = ["nosuid", "nodev", "mode=0777", f"size={limits.disk}"]
    mounts += (
        [] if sealed else [{"destination": at, "type": "tmpfs", "source": "tmpfs", "options": options} for at in places]
    )
    mounts += [bound(libraries, LIBRARIES)] if libraries else []
    spec = {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": UID, "gid": UID},
            "args": [str(SYSTEM_PYTHON), "-S", "-s", "-B", "-c", BOOT_FROM_SOURCE],
            "env": [f"{key}={value}" for key, value in ENVIRONMENT.items()],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": "root", "readonly": True},
        "hostname": "box",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
    (folder / "config.json").write_text(json.dumps(spec))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, *unprivileged(), follow_symlinks=False)


def bound(source: str, target: str) -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": source, "options": ["bind", "ro"]}
