"""`stretto bench orchestrator`, small: every rollout it says is out is one that the real orchestrator knows again after
a kill, and the limits are applied to what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from stretto.bench import orchestrator as bench
from stretto.bench.orchestrator import Result, orchestrator, summary


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(bench, "PACE", 100)
    monkeypatch.setattr(bench, "PACED_SECONDS", 2.0)
    monkeypatch.setattr(bench, "FLAT_OUT_SECONDS", 2.0)
    monkeypatch.setattr(bench, "TASKS", 20)


def test_a_small_fleet_goes_through(short, tmp_path):
    file = tmp_path / "numbers.json"
    console = Console(width=120, record=True)
    orchestrator(file, console, in_flight=400, workers=8)
    tree = json.loads(file.read_text())
    assert tree["in_flight"] == tree["known"] == tree["recalled"] == 400
    assert tree["batches"] > 0, "no batch was cut, so that nothing went round"
    assert tree["rollouts_per_s"] > 50 and tree["lease_p99_ms"] > 0 and tree["ledger_bytes_per_rollout"] > 50
    assert tree["checks"]["recalled"]["ok"] and tree["lapsed"] == 0
    assert {"rollouts_per_s", "kib_per_rollout", "restart_s"} <= set(tree["checks"])
    assert "400 rollouts in flight" in console.export_text()


def test_each_limit_can_be_missed():
    good = Result(
        in_flight=10,
        workers=1,
        fill_s=1.0,
        rss_empty_mib=1.0,
        rss_full_mib=2.0,
        kib_per_rollout=2.0,
        ledger_bytes_per_rollout=100.0,
        paced_rollouts_per_s=1000.0,
        lease_p50_ms=1.0,
        lease_p99_ms=5.0,
        paced_cores=0.5,
        paced_queued=0.1,
        rollouts_per_s=2000.0,
        cpu_ms_per_rollout=0.2,
        cores=0.9,
        receipts_per_request=3.0,
        restart_s=2.0,
        known=10,
        recalled=10,
        lapsed=0,
        load_average=1.0,
        batches=3,
    )

    def missed(result: Result) -> list[str]:
        return [name for name, check in summary(result)["checks"].items() if not check["ok"]]

    assert missed(good) == []
    bad = replace(
        good, rollouts_per_s=999.0, kib_per_rollout=5.1, lease_p99_ms=1001.0, restart_s=10.0, recalled=9, lapsed=1
    )
    assert missed(bad) == ["rollouts_per_s", "kib_per_rollout", "lease_p99_ms", "restart_s", "recalled", "lapsed"]
