"""`stretto bench wan`: versions over slow links, from one publisher to clusters that are far away.

    publisher ──▶ a folder, served over HTTP ──┬── 1000 Mbit/s ── follower, engine
                                               ├──  100 Mbit/s ── follower, engine
                                               ├──   20 Mbit/s ── follower, engine;  a late joiner
                                               ├──    5 Mbit/s ── follower, engine
                                               ├──   20 Mbit/s ── a region: three followers, each for itself
                                               └──   20 Mbit/s ── a region: a relay, and two followers behind it

Lag is from HEAD's move to the engine's own word that it serves the version. Weights are the shipped nano model's; the
steps are simulated (noise of the size of Adam's update at LR). Engines are real and idle: a pause is what a swap takes
between two tokens. The full transfer beside it is an anchor, fetched through the same link by the same reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from stretto.bench.links import Link, links, why_not_namespaces
from stretto.config import ModelConfig
from stretto.launch.local import free_port
from stretto.watch.metrics import read
from stretto.weights.codec_report import UNIT_UPDATE, inside_cell, to_bf16
from stretto.weights.publisher import Publisher
from stretto.weights.readers import readers
from stretto.weights.relay import serving
from stretto.weights.store import Store
from stretto.weights.tensorfile import unpack

RATES = [1000.0, 100.0, 20.0, 5.0]
REGION = 20.0
"""Mbit/s of each of the two regions, and which of RATES the late joiner has."""
VERSIONS = 12
LATE = 3
"""Versions published after the late joiner has caught up, for the regions to follow."""
SECONDS = 1.5
"""Between versions."""
LR = 1e-5
CHAIN = "wan"
DEADLINE = 300.0
STRETTO = [sys.executable, "-c", "from stretto.cli import main; raise SystemExit(main())"]


@dataclass
class Row:
    """One cluster."""

    mbit: float
    versions: int  # that its engine took
    lag_median_s: float
    lag_max_s: float
    pause_median_s: float
    bytes_per_version: float  # over its link, after the first version
    full_bytes: int
    full_transfer_s: float


class Fleet:
    """The processes of a bench: started one by one, ended together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: list[str]) -> None:
        with (self._folder / f"{name}.log").open("wb") as output:
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            )

    def follower(self, name: str, prefix: list[str], url: str, engine: str = "", more: list[str] | None = None) -> None:
        command = [*prefix, *STRETTO, "follow", "--store", url, "--chain", CHAIN, "--engines", engine]
        command += ["--cluster", name, "--cache", str(self._folder / f"cache-{name}")]
        command += ["--metrics", str(self._folder / f"{name}.jsonl"), *(more or [])]
        self.start(f"follower-{name}", command)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        """While the links still stand: a follower takes leave of the store."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + 10.0
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wan(json_file: Path | None, console: Console) -> bool:
    """Measure, print, write; whether every engine ended at the newest version."""
    reason = why_not_namespaces()
    if reason:
        console.print(f"Links are throttled in this process: network namespaces are not permitted here ({reason})")
    with tempfile.TemporaryDirectory(prefix="stretto-wan-") as folder:
        rows, extra = asyncio.run(_measure(Path(folder), not reason, console))
    console.print(_table(rows))
    for name, value in extra.items():
        console.print(f"{name}: {value if isinstance(value, bool | int) else format(value, '.3g')}")
    checks = {
        "every_engine_at_the_newest_version": bool(extra["every_engine_at_the_newest_version"]),
        "relay_saves_bytes": extra["region_bytes_with_relay"] < extra["region_bytes_without_relay"],
        "lag_below_full_transfer_on_slow_links": all(
            row.lag_median_s < row.full_transfer_s for row in rows if row.mbit <= 5
        ),
    }
    if json_file is not None:
        data = {
            "benchmark": "wan",
            "links": "namespaces" if not reason else "throttle",
            "rows": [asdict(row) for row in rows],
            **extra,
            "checks": checks,
        }
        json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return all(checks.values())


async def _measure(folder: Path, namespaces: bool, console: Console) -> tuple[list[Row], dict[str, Any]]:
    store = Store(folder / "store")
    masters, rng = _masters(), np.random.default_rng(0)
    publisher = Publisher(store, CHAIN, {})
    visible: dict[int, float] = {}

    async def publish() -> None:
        version = len(visible)
        if version:
            for master in masters.values():
                master -= (LR * UNIT_UPDATE) * rng.standard_normal(master.shape, dtype=np.float32)
        tensors = {name: to_bf16(master) for name, master in masters.items()}
        await asyncio.to_thread(publisher.publish, version, tensors)
        visible[version] = time.time()

    async with serving(store, "0.0.0.0", 0) as port, links(port, [*RATES, REGION, REGION], namespaces) as made:
        with Fleet(folder) as fleet:
            ways, alone, relayed = made[: len(RATES)], made[-2], made[-1]
            console.print(f"Starting {len(RATES)} engines and followers behind {len(made)} links")
            started = [await asyncio.to_thread(_cluster, fleet, way) for way in ways]
            await publish()
            await _until(lambda: _acknowledged(store, 0) == len(ways), "the first version at every engine")
            before = [way.delivered() for way in ways]
            for _ in range(VERSIONS):
                await asyncio.sleep(SECONDS)
                await publish()
            newest = len(visible) - 1
            await _until(lambda: all(_swaps(folder, way, newest) for way in ways), f"version {newest} at every engine")
            spent = [way.delivered() - start for way, start in zip(ways, before, strict=True)]

            slow = next(way for way in ways if way.mbit == REGION)
            begun, at = time.monotonic(), slow.delivered()
            fleet.follower("late", slow.prefix, slow.url)
            await _until(lambda: _has(folder, "late", newest), "the late joiner")
            late_s, late_bytes = time.monotonic() - begun, slow.delivered() - at

            await asyncio.to_thread(_regions, fleet, alone, relayed)
            names = [f"{region}-{number}" for region in ("alone", "relayed") for number in range(3)]
            await _until(lambda: all(_has(folder, name, newest) for name in names), "both regions")
            region = [alone.delivered(), relayed.delivered()]
            for _ in range(LATE):
                await publish()
                await _until(lambda: all(_has(folder, name, len(visible) - 1) for name in names), "both regions")
            newest = len(visible) - 1
            per_version = [(way.delivered() - b) / LATE for way, b in zip((alone, relayed), region, strict=True)]
            await _until(lambda: all(_swaps(folder, way, newest) for way in ways), f"version {newest} at every engine")
            fingerprints = [await asyncio.to_thread(_serves, way, engine) for way, engine in started]
            full = [await asyncio.to_thread(_full, store, way) for way in ways]
    rows = [
        _row(folder, way, visible, cost / VERSIONS, *transfer)
        for way, cost, transfer in zip(ways, spent, full, strict=True)
    ]
    return rows, {
        "every_engine_at_the_newest_version": all(version == newest for version in fingerprints),
        "late_joiner_s": late_s,
        "late_joiner_bytes": late_bytes,
        "region_join_bytes_without_relay": region[0],
        "region_join_bytes_with_relay": region[1],
        "region_bytes_without_relay": per_version[0],
        "region_bytes_with_relay": per_version[1],
    }


def _masters() -> dict[str, np.ndarray]:
    tensors, _ = unpack((ModelConfig(path="nano").folder / "model.safetensors").read_bytes())
    rng = np.random.default_rng(1)
    return {name: inside_cell(array, rng) for name, array in tensors.items()}


def _cluster(fleet: Fleet, way: Link) -> tuple[Link, str]:
    port = free_port("127.0.0.1")
    engine = f"http://127.0.0.1:{port}"
    fleet.start(f"engine-{way.mbit:g}", [*way.prefix, *STRETTO, "serve", "nano", "--port", str(port)])
    fleet.follower(f"{way.mbit:g}", way.prefix, way.url, engine)
    return way, engine


def _regions(fleet: Fleet, alone: Link, relayed: Link) -> None:
    for number in range(3):
        fleet.follower(f"alone-{number}", alone.prefix, alone.url)
    port = free_port("127.0.0.1")
    fleet.follower("relayed-0", relayed.prefix, relayed.url, more=["--relay", str(port)])
    time.sleep(3.0)
    for number in (1, 2):
        fleet.follower(f"relayed-{number}", relayed.prefix, f"http://127.0.0.1:{port}")


async def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come within {DEADLINE:g} s")
        await asyncio.sleep(0.1)


def _acknowledged(store: Store, version: int) -> int:
    """Followers whose record in the store says that their engines serve `version`."""
    return sum(seen.reader.serves == version for seen in readers(store, CHAIN))


def _swaps(folder: Path, way: Link, version: int) -> bool:
    return any(line["version"] == version for line in _lines(folder, way))


def _lines(folder: Path, way: Link) -> list[dict[str, Any]]:
    path = folder / f"{way.mbit:g}.jsonl"
    return [line for line in read(path) if line["kind"] == "swap"] if path.exists() else []


def _has(folder: Path, name: str, version: int) -> bool:
    """Whether a follower without engines has rebuilt a version: it says so in its record, and keeps what it has."""
    path = folder / f"{name}.jsonl"
    return path.exists() and any(line.get("version") == version for line in read(path) if line["kind"] == "rebuilt")


def _serves(way: Link, engine: str) -> int | None:
    """The version that an engine itself names; asked from behind its link."""
    program = f"import urllib.request as u; print(u.urlopen('{engine}/health', timeout=20).read().decode())"
    done = subprocess.run([*way.prefix, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    with contextlib.suppress(ValueError):
        return json.loads(done.stdout).get("version")
    return None


def _full(store: Store, way: Link) -> tuple[int, float]:
    """Bytes of an anchor's weights, and seconds to fetch them over a link."""
    key = next(key for key in store.list(f"weights/{CHAIN}/anchors") if key.endswith(".safetensors"))
    program = (
        "import time, urllib.request as u; t = time.monotonic(); "
        f"data = u.urlopen('{way.url}/{key}', timeout=100).read(); print(len(data), time.monotonic() - t)"
    )
    command = [*way.prefix, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    size, seconds = done.stdout.split()
    return int(size), float(seconds)


def _row(folder: Path, way: Link, visible: dict[int, float], cost: float, full: int, full_s: float) -> Row:
    swaps = [line for line in _lines(folder, way) if line["version"] > 0]
    lags = [line["time"] - visible[line["version"]] for line in swaps]
    pauses = [line["pause_s"] for line in swaps]
    return Row(way.mbit, len(swaps), median(lags), max(lags), median(pauses), cost, full, full_s)


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"nano (2.3 MB), simulated steps at {LR:g}, a version every {SECONDS:g} s")
    for name in ("Mbit/s", "versions", "lag s", "longest", "pause ms", "B / version", "full B", "full s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.mbit:g}",
            f"{row.versions}",
            f"{row.lag_median_s:.2f}",
            f"{row.lag_max_s:.2f}",
            f"{row.pause_median_s * 1000:.1f}",
            f"{row.bytes_per_version:,.0f}",
            f"{row.full_bytes:,}",
            f"{row.full_transfer_s:.2f}",
        )
    return table
