"""Trees of files that a policy may have made, walked from the host: copied, and stacked layers merged into one.

Every name is opened through openat2(2) beneath the folder being walked, following no link and crossing no mount, so
that nothing planted in a tree can lead out of it. Regular files, folders and symbolic links are copied (a link as the
text it is); FIFOs, sockets and devices are passed over, except overlayfs's own marks: a whiteout (character device
0:0, "deleted below") and an opaque folder (an attribute, "nothing below shows").

Standard library only: `spawner.py` uses this too. Linux 5.6 or newer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import shutil
import stat
import struct
from dataclasses import dataclass, field

OPENAT2 = 437  # the same number on x86-64 and aarch64
NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH = 0x01, 0x02, 0x04, 0x08
RESOLVE = NO_XDEV | NO_MAGICLINKS | NO_SYMLINKS | BENEATH
FOLDER = os.O_RDONLY | os.O_DIRECTORY
OPAQUE = "user.overlay.opaque"
MAX_DEPTH = 100
LIBC = ctypes.CDLL(None, use_errno=True)


class TreeError(Exception):
    """The tree is more than may be copied; the message is a sentence."""


@dataclass
class Caps:
    """What may still be copied; counts down. Sizes are bytes of data: holes are free, and stay holes."""

    entries: int
    bytes: int
    passed_over: int = field(default=0)

    def take(self, size: int) -> None:
        self.entries -= 1
        self.bytes -= size
        if self.entries < 0:
            raise TreeError("more files and folders than are allowed")
        if self.bytes < 0:
            raise TreeError("more data than is allowed")


def open_beneath(folder: int, path: bytes | str, flags: int, mode: int = 0) -> int:
    """openat2 of `path` below the open `folder`: OSError (ELOOP, EXDEV) when a link or a mount is on the way."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, RESOLVE)
    opened = LIBC.syscall(OPENAT2, folder, ctypes.c_char_p(os.fsencode(path)), how, ctypes.c_size_t(len(how)))
    if opened < 0:
        number = ctypes.get_errno()
        if number == errno.ENOSYS:
            raise OSError(number, f"this kernel ({platform.release()}) has no openat2; Linux 5.6 or newer is needed")
        raise OSError(number, os.strerror(number), os.fsdecode(path))
    return opened


def copy(
    source: int, target: int, caps: Caps, owner: tuple[int, int] | None = None, fresh: bool = False, depth: int = 0
) -> None:
    """The content of the open folder `source` laid over what is in `target`, as an overlay layer lies over another.

    A file or whiteout replaces what had its name; a folder joins with a folder unless it is opaque. `owner` (uid, gid)
    is who everything shall belong to, when that is not us. `fresh`: `target` is known to be empty. Raises TreeError
    beyond the caps, OSError.
    """
    if depth > MAX_DEPTH:
        raise TreeError(f"folders nested more than {MAX_DEPTH} deep")
    with os.scandir(source) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    for name, about in found:
        kind = stat.S_IFMT(about.st_mode)
        caps.take(about.st_blocks * 512 if kind == stat.S_IFREG else 0)
        if kind == stat.S_IFDIR:
            _copy_folder(name, about, source, target, caps, owner, fresh, depth)
        elif kind == stat.S_IFREG:
            _copy_file(name, about, source, target, owner, fresh)
        elif kind == stat.S_IFLNK or (kind == stat.S_IFCHR and about.st_rdev == 0):
            if not fresh:
                _remove(name, target)
            if kind == stat.S_IFLNK:
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            else:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
            if owner:
                os.chown(name, *owner, dir_fd=target, follow_symlinks=False)
            os.utime(name, ns=(about.st_mtime_ns, about.st_mtime_ns), dir_fd=target, follow_symlinks=False)
        else:
            caps.passed_over += 1


def _copy_folder(
    name: str,
    about: os.stat_result,
    source: int,
    target: int,
    caps: Caps,
    owner: tuple[int, int] | None,
    fresh: bool,
    depth: int,
) -> None:
    below = open_beneath(source, name, FOLDER)
    try:
        opaque = _opaque(below)
        existing = 0 if fresh else _kind(name, target)
        joins = existing == stat.S_IFDIR and not opaque
        if not joins:
            opaque |= existing not in (0, stat.S_IFDIR)  # what lay below a file or a whiteout stays hidden
            if existing:
                _remove(name, target)
            os.mkdir(name, 0o700, dir_fd=target)
        into = open_beneath(target, name, FOLDER)
        try:
            if opaque:
                os.setxattr(into, OPAQUE, b"y")
            copy(below, into, caps, owner, not joins, depth + 1)
            _finish(into, about, owner, more=0o700)
        finally:
            os.close(into)
    finally:
        os.close(below)


def _copy_file(
    name: str, about: os.stat_result, source: int, target: int, owner: tuple[int, int] | None, fresh: bool
) -> None:
    if not fresh:
        _remove(name, target)
    end = open_beneath(source, name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        into = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
        try:
            _copy_data(end, into, about)
            _finish(into, about, owner)
        finally:
            os.close(into)
    finally:
        os.close(end)


def _finish(into: int, about: os.stat_result, owner: tuple[int, int] | None, more: int = 0) -> None:
    if owner:
        os.fchown(into, *owner)
    os.fchmod(into, about.st_mode & 0o777 | more)
    os.utime(into, ns=(about.st_mtime_ns, about.st_mtime_ns))


def _copy_data(end: int, into: int, about: os.stat_result) -> None:
    """Holes stay holes: a sparse file of a terabyte costs what it holds."""
    at, size = 0, about.st_size
    sparse = about.st_blocks * 512 < size
    while at < size:
        begin, stop = at, size
        if sparse:
            try:
                begin = os.lseek(end, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    break
                raise
            stop = min(os.lseek(end, begin, os.SEEK_HOLE), size)
            os.lseek(into, begin, os.SEEK_SET)
        while begin < stop:
            sent = os.sendfile(into, end, begin, stop - begin)
            if sent == 0:
                return
            begin += sent
        at = stop
    if sparse:
        os.ftruncate(into, size)


def _kind(name: str, folder: int) -> int:
    """File type bits of `name`, 0 where there is nothing."""
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return 0


def _opaque(folder: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getxattr(folder, OPAQUE) == b"y"
    return False


def _remove(name: str, folder: int) -> None:
    kind = _kind(name, folder)
    if kind == stat.S_IFDIR:
        shutil.rmtree(name, dir_fd=folder)
    elif kind:
        os.unlink(name, dir_fd=folder)
