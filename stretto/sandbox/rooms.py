"""The writable places of a box: two tmpfs of a size and a number of inodes, in mounts that only the spawner sees.

`room/upper` is the workspace itself or, over layers, where an overlay keeps what changed; `room/work` belongs to the
overlay. `scratch` holds home, tmp and shm. Limits of a tmpfs hold for whatever makes files in it, under any name.

The spawner becomes privileged in a user namespace of its own for this; on the host it stays an ordinary user. Standard
library only.
"""

from __future__ import annotations

import ctypes
import os

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
NO_SUID, NO_DEVICES, DETACH, DUMPABLE = 2, 4, 2, 4
SCRATCH = ("home", "tmp", "shm")
LIBC = ctypes.CDLL(None, use_errno=True)


def enter(folder: str) -> None:
    """Give this process mounts of its own, with a place for rooms at `folder`. Needs user namespaces; OSError."""
    uid, gid = os.geteuid(), os.getegid()
    LIBC.prctl(DUMPABLE, 1, 0, 0, 0)  # cleared when root was dropped; without it our own id maps are closed to us
    _check(LIBC.unshare(NEW_USER | NEW_MOUNTS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    mount(folder, "mode=0755")


def furnish(folder: str, workspace: tuple[int, int], scratch: tuple[int, int]) -> None:
    """Make the room `folder` with limits (bytes, inodes)."""
    os.mkdir(folder)
    for name, (size, inodes), below in (("room", workspace, ("upper", "work")), ("scratch", scratch, SCRATCH)):
        os.mkdir(f"{folder}/{name}")
        mount(f"{folder}/{name}", f"mode=0755,size={size},nr_inodes={inodes + 1 + len(below)}")
        for sub in below:
            os.mkdir(f"{folder}/{name}/{sub}")


def clear(folder: str) -> None:
    """Undo `furnish`, whatever was put there."""
    for name in ("room", "scratch"):
        LIBC.umount2(os.fsencode(f"{folder}/{name}"), DETACH)
        os.rmdir(f"{folder}/{name}")
    os.rmdir(folder)


def mount(folder: str, options: str) -> None:
    flags = NO_SUID | NO_DEVICES
    _check(LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode()), f"mount at {folder}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
