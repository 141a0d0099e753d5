"""The links of `bench wan` are as slow as they say, and count what they deliver."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.bench.links import links, why_not_namespaces
from stretto.weights.relay import serving
from stretto.weights.store import Store

SIZE = 400_000


@pytest.mark.parametrize("namespaces", [False, True])
async def test_a_link_delivers_at_its_rate(tmp_path: Path, namespaces: bool) -> None:
    if namespaces and (reason := why_not_namespaces()):
        pytest.skip(f"network namespaces are not permitted here: {reason}")
    store = Store(tmp_path)
    store.put("a", bytes(SIZE))
    async with serving(store, "0.0.0.0", 0) as port, links(port, [4.0, 400.0], namespaces) as made:
        seconds = []
        for link in made:
            program = (
                "import time, urllib.request as u; t = time.monotonic(); "
                f"u.urlopen('{link.url}/a', timeout=30).read(); print(time.monotonic() - t)"
            )
            command = [*link.prefix, sys.executable, "-c", program]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            seconds.append(float(done.stdout))
            assert SIZE <= link.delivered() < 1.2 * SIZE
    assert 0.5 < seconds[0] < 5.0 and seconds[1] < seconds[0]
