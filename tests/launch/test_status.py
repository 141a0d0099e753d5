"""`stretto status` of what does not run: ended, stopped, killed, never started, damaged, no run at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch.run_folder import RunError
from stretto.launch.status import show, status
from stretto.watch.metrics import Metrics


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("[run]\n")
    return tmp_path


def said(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    show(status(run), as_json=False)
    return capsys.readouterr().out


def launch(run: Path, *stages: str, reason: str = "") -> None:
    with Metrics(run / "metrics.jsonl", "launcher") as metrics:
        metrics.log("stage", name="starting")
        metrics.log("service", name="trainer", url=None, pid=1, restarts=2, role="trainer", cluster=None)
        metrics.log("step", version=4, rollouts=8, solve_rate=0.5)
        if reason:
            metrics.log("event", text=reason, alarm=True, final=True)
        for stage in stages:
            metrics.log("stage", name=stage)


@pytest.mark.parametrize(
    ("stages", "state", "words"),
    [
        (["training", "stopping", "report", "done"], "finished", "finished at version"),
        (["training", "stopping"], "stopped", "stopped at version"),
        (["training"], "killed", "its launcher was killed at version"),
    ],
)
def test_processes_of_a_run_that_is_over_have_ended_and_are_not_dead(run, capsys, stages, state, words) -> None:
    launch(run, *stages)
    tree = status(run)
    assert (tree["state"], tree["running"]) == (state, False)
    assert tree["processes"]["trainer"]["health"] == "ended" and tree["processes"]["trainer"]["restarts"] == 2
    text = said(run, capsys)
    assert words in text and "ended, last at version" in text and "dead" not in text
    assert ("stretto resume" in text) == (state != "finished")


def test_the_error_that_ended_a_run_is_told_until_it_is_started_again(run, capsys) -> None:
    launch(run, "stopping", reason="the trainer ended with exit code 1")
    assert "the trainer ended with exit code 1" in said(run, capsys)
    launch(run, "stopping")
    assert status(run)["reason"] is None


def test_a_run_that_was_never_started_says_so(run, capsys) -> None:
    assert status(run)["state"] == "not started" and "has not been started" in said(run, capsys)


def test_a_damaged_ledger_is_told(run, capsys) -> None:
    launch(run, "stopping")
    (run / "ledger.sqlite").write_text("junk")
    assert "ledger.sqlite is damaged" in said(run, capsys)


def test_a_folder_of_something_else_is_refused(tmp_path) -> None:
    for name, text in (("config.toml", "hello [[["), ("metrics.jsonl", "junk\n[1]\n"), ("pids.json", "[1,")):
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match="holds no run that can be read"):
        status(tmp_path)
