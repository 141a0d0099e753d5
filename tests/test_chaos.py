"""A small version of `stretto bench chaos`: ten kills over one run, after which the books are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.bench.chaos import account, turn
from stretto.launch.status import show, status

TINY = [
    "rollouts.groups_per_step=2",
    "rollouts.group_size=4",
    "rollouts.workers=2",
    "rollouts.concurrency=16",
    "engine.slots=16",
    "tasks.train=60",
    "tasks.heldout=0",
    "tasks.new_templates=0",
    "trainer.checkpoint_every=2",
    "trainer.mismatch_every=0",
    "eval.every=0",
    "launch.late_join_version=0",
    "launch.restarts=1000",
]


def test_LED_1_ASY_12_ten_kills_and_the_books_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = turn(tmp_path, "x", steps=8, kills=10, seed=1, settings=TINY)
    assert run.code == 0, run.said
    assert run.left == [] and sum(run.kills.values()) == 10
    books = account(run)
    assert books["unaccounted"] == books["trained_twice"] == 0, books
    assert books["staleness_max_over_bound"] <= 0 and books["broken_versions"] == [] and books["chains"] == 1
    counts = books["ledger"]
    assert counts["version"] == 8 and counts["batches"] == {"cut": 8, "trained": 8}
    assert counts["ordinals"]["trained"] >= 16 and counts["ordinals"]["dropped"] == {}
    assert books["restarts"] >= 1

    said = status(run.folder)
    assert not said["running"] and said["stage"] == "done" and said["ledger"] == counts
    assert said["state"] == "finished" and said["reason"] is None
    assert {process["health"] for process in said["processes"].values()} == {"ended"}
    assert {said["processes"][name]["version"] for name in ("orchestrator", "trainer")} == {8}
    assert sum(process["restarts"] for process in said["processes"].values()) >= 1
    assert json.loads(json.dumps(said)) == said
    show(said, as_json=False)
    text = capsys.readouterr().out
    assert "finished at version 8" in text and "ended, last at version 8" in text and "dead" not in text
