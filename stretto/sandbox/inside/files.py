"""Files of the workspace, for the host. Paths arrive cleaned (relative, no `..`); every component is opened without
following links, and only regular files pass."""

# ruff: noqa: SIM105 (contextlib costs 2 ms per box)
import errno
import posix

from stretto.sandbox.inside.wire import WORKSPACE, Refused

MAX_DEPTH = 32
MAX_ENTRIES = 4096
KINDS = {0o100000: b"file", 0o040000: b"folder", 0o120000: b"link"}
FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC


def open_workspace():
    """The policy owns the workspace and may have closed it to itself, and so to us."""
    try:
        posix.chmod(WORKSPACE, 0o755)
    except OSError:
        pass  # a sealed box


def folder_of(path, create=False):
    """(descriptor of the folder that holds `path`, last component); raises OSError."""
    *folders, name = path.split(b"/")
    open_workspace()
    at = posix.open(WORKSPACE, FOLDER)
    for folder in folders:
        try:
            if create:
                try:
                    posix.mkdir(folder, 0o755, dir_fd=at)
                except FileExistsError:
                    pass
            below = posix.open(folder, FOLDER, dir_fd=at)
        finally:
            posix.close(at)
        at = below
    return at, name


def open_regular(name, at, flags):
    """Open without following a link or waiting for a FIFO's other end; only regular files pass."""
    end = posix.open(name, flags | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC, 0o644, dir_fd=at)
    if posix.fstat(end).st_mode & 0o170000 != 0o100000:
        posix.close(end)
        raise Refused(errno.EINVAL, "not a regular file")
    return end


def read_file(name, at, limit):
    end = open_regular(name, at, posix.O_RDONLY)
    try:
        size = posix.fstat(end).st_size
        if size > limit:
            raise Refused(errno.EFBIG, f"{size} bytes, more than the {limit} that can be read")
        parts, missing = [], size  # of a file that grows meanwhile: what there was
        while missing and (part := posix.read(end, missing)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
    finally:
        posix.close(end)


def read(control, path, limit):
    at, name = folder_of(path)
    try:
        return [b"ok", read_file(name, at, int(limit))]
    finally:
        posix.close(at)


def write(control, *pairs):
    for path, data in zip(pairs[::2], pairs[1::2]):
        at, name = folder_of(path, create=True)
        try:
            end = open_regular(name, at, posix.O_WRONLY | posix.O_CREAT)
        finally:
            posix.close(at)
        try:
            posix.ftruncate(end, 0)
            rest = memoryview(data)
            while rest:
                rest = rest[posix.write(end, rest) :]
        finally:
            posix.close(end)
    return [b"ok"]


def files(control, max_files, max_bytes):
    """Every regular file as name, data, name, data…; links, FIFOs and sockets are passed over."""
    found = []
    at, _ = folder_of(b"")
    most = max(MAX_ENTRIES, 4 * int(max_files))
    gather(at, b"", found, [int(max_files), int(max_bytes), 0, most], 0)
    return [b"ok", *found]


def gather(at, prefix, found, budget, depth):
    """Depth-first below the folder `at`, which is closed. `budget`: files left, bytes left, entries seen, entries at
    most."""
    try:
        if depth > MAX_DEPTH:
            raise Refused(errno.ENAMETOOLONG, f"folders nested more than {MAX_DEPTH} deep")
        with posix.scandir(at) as entries:
            for entry in entries:
                budget[2] += 1
                if budget[2] > budget[3]:
                    raise Refused(errno.EMFILE, f"more than {budget[3]} entries in the workspace")
                name = entry.name.encode("utf-8", "surrogateescape")
                try:
                    if entry.is_dir(follow_symlinks=False):
                        gather(posix.open(name, FOLDER, dir_fd=at), prefix + name + b"/", found, budget, depth + 1)
                    elif entry.is_file(follow_symlinks=False):
                        data = read_file(name, at, budget[1])
                        found += [prefix + name, data]
                        budget[0] -= 1
                        budget[1] -= len(data)
                except PermissionError:
                    continue
                if budget[0] < 0:
                    raise Refused(errno.EMFILE, "too many files in the workspace")
    finally:
        posix.close(at)


def listing(control, path, max_entries, depth):
    """Every name below a folder as kind, size, path, kind…"""
    found = []
    if path:
        at, name = folder_of(path)
        above = at
        try:
            at = posix.open(name, FOLDER, dir_fd=above)
        finally:
            posix.close(above)
    else:
        at, _ = folder_of(b"")
    list_below(at, b"", found, int(max_entries), int(depth))
    return [b"ok", *found]


def list_below(at, prefix, found, max_entries, depth):
    """Adds what is below the folder `at`, which is closed."""
    try:
        with posix.scandir(at) as entries:
            for entry in entries:
                if len(found) >= 3 * max_entries:
                    raise Refused(errno.EMFILE, f"more than {max_entries} entries")
                name = prefix + entry.name.encode("utf-8", "surrogateescape")
                try:
                    about = entry.stat(follow_symlinks=False)
                except PermissionError:  # of a folder that was closed to everybody
                    continue
                kind = KINDS.get(about.st_mode & 0o170000, b"other")
                found += [kind, b"%d" % about.st_size, name]
                if kind == b"folder" and depth > 1:
                    try:
                        below = posix.open(entry.name, FOLDER, dir_fd=at)
                    except PermissionError:
                        continue
                    list_below(below, name + b"/", found, max_entries, depth - 1)
    finally:
        posix.close(at)
