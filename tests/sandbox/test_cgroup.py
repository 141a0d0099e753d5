"""Control groups of both versions get the limits asked for; without any, that is said.

Version 1 is tried for real by the bombs in `test_escapes.py` where it is mounted. Here are what both versions are told,
in folders that look like the kernel's (the files exist, and keep what is written).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from stretto.sandbox import cgroup
from stretto.sandbox.cgroup import Limits, Slot, Slots, candidates
from stretto.sandbox.pool import BoxPool

LIMITS = Limits(memory=128 << 20, processes=32, cpus=1.5)


def group(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


V2 = {
    "cgroup.procs": "",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.peak": "4096",
    "memory.events": "low 0\noom 2\noom_kill 1\n",
    "pids.max": "max",
    "cpu.max": "max 100000",
}


def test_version_2_is_told_in_its_own_words(tmp_path: Path):
    folder = group(tmp_path, V2)
    slot = Slot({"memory": folder, "pids": folder, "cpu": folder})
    slot.limit(LIMITS)
    told = {name: (folder / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    assert told == {
        "memory.max": str(128 << 20),
        "memory.swap.max": "0",
        "pids.max": "33",
        "cpu.max": "150000 100000",
    }
    slot.admit(4321)
    assert (folder / "cgroup.procs").read_text() == "4321"
    assert not slot.killed()
    (folder / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert slot.killed() and not slot.killed()
    (folder / "memory.peak").write_text("81920")
    assert slot.memory_peak() == 81920 and slot.process_peak() is None
    slot.remove()


def test_version_1_has_a_folder_for_each(tmp_path: Path):
    memory = group(
        tmp_path / "memory",
        {
            "cgroup.procs": "",
            "memory.limit_in_bytes": "",
            "memory.memsw.limit_in_bytes": "",
            "memory.max_usage_in_bytes": "99",
            "memory.oom_control": "oom_kill_disable 0\noom_kill 0\n",
        },
    )
    pids = group(tmp_path / "pids", {"cgroup.procs": "", "pids.max": "", "pids.peak": "7"})
    cpu = group(tmp_path / "cpu", {"cgroup.procs": "", "cpu.cfs_quota_us": ""})
    slot = Slot({"memory": memory, "pids": pids, "cpu": cpu})
    slot.limit(LIMITS)
    assert (memory / "memory.limit_in_bytes").read_text() == str(128 << 20)
    assert (memory / "memory.memsw.limit_in_bytes").read_text() == str(128 << 20)
    assert (pids / "pids.max").read_text() == "33" and (cpu / "cpu.cfs_quota_us").read_text() == "150000"
    slot.admit(7)
    assert all((folder / "cgroup.procs").read_text() == "7" for folder in (memory, pids, cpu))
    assert slot.memory_peak() == 0 and slot.process_peak() == 7


def test_where_groups_might_be(tmp_path: Path):
    own = "3:memory:/a\n2:pids:/\n1:cpu,cpuacct:/b\n0::/user.slice/me.scope\n"
    for name in ("memory/a", "pids", "cpu/b", "unified/user.slice/me.scope"):
        (tmp_path / name).mkdir(parents=True)
    first = {"memory": tmp_path / "memory" / "a", "pids": tmp_path / "pids", "cpu": tmp_path / "cpu" / "b"}
    assert candidates(tmp_path, own) == [first]
    (tmp_path / "unified" / "user.slice" / "cgroup.controllers").write_text("memory pids")
    assert candidates(tmp_path, own)[1] == dict.fromkeys(cgroup.CONTROLLERS, tmp_path / "unified" / "user.slice")
    assert candidates(tmp_path, "0::/me.scope\n") == []  # a folder is not a hierarchy


def test_without_groups_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path):
    monkeypatch.setattr(cgroup, "candidates", lambda: [])
    with caplog.at_level(logging.WARNING):
        assert Slots.open() is None
    assert "limited per process" in caplog.text
    closed = dict.fromkeys(cgroup.CONTROLLERS, tmp_path / "no-such-folder")
    monkeypatch.setattr(cgroup, "candidates", lambda: [closed])
    assert Slots.open() is None


def test_a_missing_cpu_group_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    places = [place for place in candidates() if len(set(place.values())) > 1]
    if os.geteuid() != 0 or not places:
        pytest.skip("no writable control groups of version 1 here")
    monkeypatch.setattr(cgroup, "candidates", lambda: [{**places[0], "cpu": Path("/proc/no-such-folder")}])
    with caplog.at_level(logging.WARNING):
        slots = Slots.open()
    assert slots is not None and set(slots.folders) == {"memory", "pids"} and "for cpu" in caplog.text
    slots.close()
    assert not slots.folders["memory"].exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_peaks_are_those_of_this_box_alone(pool: BoxPool):
    if pool.carrier.slots is None:
        pytest.skip("no writable control groups here")
    big = await pool.box()
    result = await big.python(
        "import os, time\nx = bytearray(50 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\n"
        "for _ in range(8):\n    if os.fork() == 0: time.sleep(0.3); os._exit(0)\ntime.sleep(0.1)"
    )
    assert result.memory_peak and result.memory_peak > 50 << 20
    assert (result.process_peak or 0) >= 10 or pool.carrier.slots.slots[0].unified
    await big.stop()
    small = await pool.box()  # in the same groups
    result = await small.exec(["true"])
    assert result.memory_peak and result.memory_peak < 30 << 20
    assert (result.process_peak or 0) < 5
    assert (await small.stats()).memory_peak
    await small.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_cpu_time_is_that_of_all_processes(pool: BoxPool):
    box = await pool.box()
    burn = (
        "import os, time\nos.fork()\nend = time.process_time() + 0.15\nwhile time.process_time() < end: pass\nos.wait()"
    )
    result = await box.python(burn, seconds=10)
    assert result.cpu_seconds and 0.25 < result.cpu_seconds < 1.0
    await box.stop()
