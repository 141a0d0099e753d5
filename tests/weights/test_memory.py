"""Memory: beside the weights it serves, a follower holds at most one copy more, a publisher one copy (its baseline).

Measured by the kernel (VmHWM, the most that was ever resident) in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import sys
from pathlib import Path
import numpy as np
from stretto.weights import chain, codec, writer
from stretto.weights.publisher import Publisher
from stretto.weights.rebuild import rebuild
from stretto.weights.store import Store

writer.ANCHOR_BYTES = 8 << 20
codec.warm_up()
store = Store(sys.argv[1])
rng = np.random.default_rng(0)

def peak(reset=False):
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10

def model():
    return {f"w{i}": rng.integers(0x3C00, 0x3F80, (1024, 2048), dtype=np.uint16) for i in range(48)}

def step(tensors):
    for array in tensors.values():
        where = rng.integers(0, array.size, array.size // 50)
        array.reshape(-1)[where] += 1
FULL = 48 * 1024 * 2048 * 2
"""

PUBLISH = (
    SETUP
    + """
tensors = model()
before = peak(reset=True)
mine = Publisher(store, "run-0", {}, anchor_every=2)
for version in range(4):
    mine.publish(version, tensors)
    step(tensors)
print((peak() - before) / FULL)
"""
)

FOLLOW = (
    SETUP
    + """
def head(version):
    found = chain.read_head(store, "run-0")[0]
    links = [link for link in found.links if link.version <= version]
    manifest = chain.read_manifest(store, "run-0", links[-1])
    return chain.Head(format=2, chain="run-0", version=version, root=manifest.root, links=links)

before = peak(reset=True)
state = rebuild(store, head(2)).state
joining = peak(reset=True)
held = rebuild(store, head(3), state)
assert held.form == "delta"
following = peak(reset=True)
wrong = held.state.__class__(3, "0" * 64, held.state.tensors, held.state.tags)
again = rebuild(store, head(3), wrong)
assert again.form == "anchor"
print((joining - before) / FULL, (following - before) / FULL, (peak() - before) / FULL)
"""
)


def run(program: str, folder: Path) -> list[float]:
    # glibc keeps up to 64 MB of freed memory per thread, as much as the weights of this test: let it give all back.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=120, env=environment
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this kernel does not let a process reset its peak of memory")
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def test_at_most_one_copy_and_a_chunk(tmp_path: Path) -> None:
    (publishing,) = run(PUBLISH, tmp_path)
    joining, following, again = run(FOLLOW, tmp_path)
    print(
        f"beyond the caller's weights, in copies: publisher {publishing:.2f}; follower {joining:.2f} joining, ", end=""
    )
    print(f"{following:.2f} by a delta, {again:.2f} by an anchor")
    chunk = 0.5  # of 200 MB: the files, frames and patches on their way
    assert publishing < 1 + chunk + 0.2  # and what changed, for the next skip
    assert joining < 1 + chunk
    assert following < 1 + chunk
    assert again < 2 + chunk
