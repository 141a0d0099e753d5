"""`stretto bench sandbox` goes through, sees what is left behind, and each of its limits can be missed."""

from __future__ import annotations

import os
import socket
import time

import pytest

from stretto.bench import sandbox as bench
from stretto.bench.sandbox import LIMITS, judge, measure_commands, measure_starts, traces


async def test_starts_are_counted_and_leave_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "CHUNK", 10)
    started = await measure_starts(20)
    assert started.leftovers == []
    assert started.per_s >= started.per_s_clock > 0 and started.cpu_ms > 1


def test_what_is_left_behind_is_seen():
    before = traces()
    one, two = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    left = traces() - before
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    one.close()
    two.close()
    assert any(name.startswith(f"process {pid} ") for name in left)
    assert sum(name.startswith("descriptor ") for name in left) == 2
    assert traces() <= before


async def test_commands_are_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "COMMANDS", 3)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    took = await measure_commands()
    assert len(took) == 4 and all(0 < value < 5000 for value in took.values())


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_can_be_missed(name: str):
    comparison, limit = LIMITS[name]
    worse, better = (limit - 1, limit + 1) if comparison == ">=" else (limit + 1, limit - 0.1)
    assert not judge(name, worse)["ok"]
    assert judge(name, better)["ok"] or (name == "leftovers" and judge(name, 0)["ok"])
    assert judge("fork16_s", 0.5)["ok"] is False
