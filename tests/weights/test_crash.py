"""kill -9 at every write point of a publisher: the old version, or the new one, is there whole; a restart goes on.

One child process forks once per point. The fork publishes version 1, counting the calls by which a local store
touches the disk, and kills itself at the n-th; n grows until a publish gets through.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stretto.weights import chain as chains
from stretto.weights import inspect
from stretto.weights.publisher import Publisher
from stretto.weights.rebuild import rebuild
from stretto.weights.store import Store

CHILD = """
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from stretto.weights import codec
from stretto.weights.publisher import Publisher
from stretto.weights.store import Store

codec.warm_up()  # numba writes its cache by the same calls
root = Path(sys.argv[1])
OLD = {"w": np.arange(4000, dtype=np.uint16)}
NEW = {"w": np.arange(4000, dtype=np.uint16) + np.uint16(1)}

def kill_at(point):
    calls = 0
    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return wrapper
    for name in ("mkdir", "fsync", "replace", "link", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    path_open = Path.open
    class HalfWriter:  # dies with half of the bytes written
        def __init__(self, file): self.file = file
        def __enter__(self): return self
        def __exit__(self, *a): self.file.close()
        def __getattr__(self, name): return getattr(self.file, name)
        def write(self, data):
            self.file.write(data[: len(data) // 2]); self.file.flush()
            counted(lambda: None)()
            self.file.write(data[len(data) // 2 :])
    def opened(self, mode="r", *args, **kwargs):
        file = counted(path_open)(self, mode, *args, **kwargs)
        return HalfWriter(file) if "x" in mode else file
    Path.open = opened

publisher = Publisher(Store(root / "before"), "run-0", {"config.json": b"{}"}, anchor_every=1)
publisher.publish(0, OLD)
point, killed = 0, True
while killed:
    point += 1
    if os.fork() == 0:
        shutil.copytree(root / "before", root / f"{point:03d}")
        publisher._writer.store = Store(root / f"{point:03d}")
        kill_at(point)
        publisher.publish(1, NEW)
        os._exit(0)
    status = os.wait()[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status:
        sys.exit(f"point {point} ended with status {status}")
print(point - 1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: a killed process, unlike a power cut, does not need the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)


def test_WGT_6_killed_anywhere_a_version_is_there_whole_or_not_at_all(folder: Path) -> None:
    run = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    points = int(run.stdout)
    assert points >= 50  # delta, manifest, HEAD; anchor, its manifest, HEAD
    old, new = np.arange(4000, dtype=np.uint16), np.arange(4000, dtype=np.uint16) + np.uint16(1)
    seen = []
    for point in range(1, points + 2):
        store = Store(folder / f"{point:03d}")
        found = chains.read_head(store, "run-0")
        assert found is not None
        state = rebuild(store, found[0]).state
        assert np.array_equal(state.tensors["w"], new if state.version == 1 else old)
        assert inspect.verify(store, "run-0") == []
        seen.append(state.version)
        if point % 5 == 0:  # whatever was left behind: a new chain starts beside it
            Publisher(store, "run-1", {}).publish(1, {"w": new})
    assert seen == sorted(seen) and set(seen) == {0, 1}, "once visible, a version stays"


def test_a_killed_start_leaves_no_version(tmp_path: Path) -> None:
    """Everything but HEAD was written: nobody sees a version, and the same chain may be begun again."""
    store = Store(tmp_path)
    Publisher(store, "run-0", {"config.json": b"{}"}).publish(0, {"w": np.arange(9, dtype=np.uint16)})
    store.delete("weights/run-0/HEAD")
    assert chains.read_head(store, "run-0") is None
    Publisher(store, "run-0", {"config.json": b"{}"}).publish(0, {"w": np.ones(9, np.uint16)})
    found = chains.read_head(store, "run-0")
    assert found is not None and rebuild(store, found[0]).state.tensors["w"][3] == 1
