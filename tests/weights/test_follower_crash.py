"""kill -9 at every point at which a follower touches its disk or its memory of the weights: old or new, never between.

One child process forks once per point. The fork goes from version 0, in its cache, to version 1, counting the calls by
which the cache folder and the tensors are written, and kills itself at the n-th.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from stretto.config import WeightsConfig
from stretto.weights import chain as chains
from stretto.weights.follower import Follower
from stretto.weights.publisher import Publisher
from stretto.weights.state import fingerprint
from stretto.weights.store import Store
from stretto.weights.tensorfile import unpack

OLD = {name: np.arange(start, start + 3000, dtype=np.uint16) for start, name in enumerate("abc")}
NEW = {name: array + np.uint16(1) * (np.arange(3000) < 100) for name, array in OLD.items()}

CHILD = """
import asyncio, os, shutil, signal, sys
from pathlib import Path
import safetensors
from stretto.weights import chain, codec, frames, rebuild
from tests_crash import Cycle

codec.warm_up()  # numba writes its cache by the same calls
root = Path(sys.argv[1])

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
    codec.apply = counted(codec.apply)  # in the middle of writing a delta into the tensors, too
    whole = safetensors.serialize_file
    def half(specs, file, metadata):
        whole(specs, file, metadata)
        data = Path(file).read_bytes()
        Path(file).write_bytes(data[: len(data) // 2])
        counted(lambda: None)()
        Path(file).write_bytes(data)
    safetensors.serialize_file = half

point, killed = 0, True
while killed:
    point += 1
    if os.fork() == 0:
        shutil.copytree(root / "cache", root / f"{point:03d}")
        kill_at(point)
        asyncio.run(Cycle(root / "store", root / f"{point:03d}").once())
        os._exit(0)
    status = os.wait()[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status:
        sys.exit(f"point {point} ended with status {status}")
print(point - 1)
"""

CYCLE = """
import aiohttp
from stretto.config import WeightsConfig
from stretto.weights.follower import Follower
from stretto.weights.store import Store

class Cycle:
    def __init__(self, store, cache):
        self.store, self.cache = store, cache
    async def once(self):
        async with aiohttp.ClientSession() as session:
            engines, config = ["http://nobody"], WeightsConfig()
            follower = Follower(Store(self.store), "run-0", "a", engines, None, self.cache, config, None, session)
            follower.state = follower.cache.open()
            await follower._advance(await follower._head())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)


async def cycle(store: Path, cache: Path, advance: bool = True) -> Follower:
    """A follower that opens its cache and, perhaps, goes to HEAD."""
    async with aiohttp.ClientSession() as session:
        follower = Follower(Store(store), "run-0", "a", ["http://nobody"], None, cache, WeightsConfig(), None, session)
        follower.state = await asyncio.to_thread(follower.cache.open)
        if advance:
            head = await follower._head()
            assert head is not None
            await follower._advance(head)
        return follower


async def test_WGT_4_killed_anywhere_the_old_version_or_the_new_one_is_there(folder: Path) -> None:
    publisher = Publisher(Store(folder / "store"), "run-0", {"config.json": b"{}"})
    publisher.publish(0, OLD)
    await cycle(folder / "store", folder / "cache")
    publisher.publish(1, NEW)
    (folder / "tests_crash.py").write_text(CYCLE)
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", CHILD, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])},
    )
    assert run.returncode == 0, run.stderr
    points = int(run.stdout)
    assert points >= 10  # what a delta would make, twice; the patch and the whole file; their folder
    seen = []
    for point in range(1, points + 2):
        cache = folder / f"{point:03d}"
        files = sorted(cache.glob("*.safetensors"))
        assert files, "the file that engines serve from is never gone"
        for file in files:  # whole, whenever it was
            tensors, _ = unpack(file.read_bytes())
            assert fingerprint(tensors) in (fingerprint(OLD), fingerprint(NEW))
        opened = await cycle(folder / "store", cache, advance=False)
        assert opened.state is not None
        seen.append(opened.state.version)
        again = await cycle(folder / "store", cache)
        target = again.cluster.target
        assert again.state is not None and target is not None
        assert again.state.root == fingerprint(again.state.tensors) == fingerprint(NEW)
        assert fingerprint(unpack((await again._whole(target)).read_bytes())[0]) == fingerprint(NEW)
    assert seen == sorted(seen) and set(seen) == {0, 1}, "once there, a version stays"
    assert chains.read_head(Store(folder / "store"), "run-0") is not None
