"""The folder of a pool on the host: one that no living pool holds is removed by the next.

Its name is neutral, since a box can read the sources of its mounts. A living pool holds a lock on its folder, so that
a worker killed without warning leaves nothing for longer than until the next one starts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

ABOVE = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
PREFIX = "boxes-"
YOUNG = "new-boxes-"
"""Not yet locked: it is renamed once it is."""


def open_folder() -> tuple[Path, int]:
    """(a new folder that others may pass through, the lock on it). Removes what dead pools left."""
    for left in ABOVE.glob(f"{PREFIX}*"):
        remove_left(left)
    young = Path(tempfile.mkdtemp(prefix=YOUNG, dir=ABOVE))
    young.chmod(0o711)
    lock = os.open(young, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = ABOVE / young.name.removeprefix("new-")
    young.rename(folder)
    return folder, lock


def close_folder(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def remove_left(folder: Path) -> None:
    """Remove a folder of ours that nobody has locked."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
