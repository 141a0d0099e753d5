"""The command line as a person meets it: quick help, dry runs, and mistakes answered in a sentence."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.watch.metrics import read


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *words], capture_output=True, text=True, cwd=cwd, timeout=60, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, stretto.cli; stretto.cli.parser(); print(sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for module in ("torch", "numpy", "pydantic", "aiohttp", "rich", "msgspec"):
        assert f"'{module}'" not in found
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "train" in run("--help").stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.parametrize(
    "command", "train eval serve follow status report midtrain tasks weights bench version".split()
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert len(capsys.readouterr().out) > 80


def test_dry_run_prints_the_resolved_tree(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "quickstart", "trainer.lr=1e-3", "--name", "x", "--dry-run", "trainer.steps=7"]
    assert main([*words, "--control", "shuffle"]) == 0
    out = capsys.readouterr().out
    tree = tomllib.loads(out)
    assert (tree["run"]["name"], tree["trainer"]["steps"], tree["trainer"]["lr"]) == ("x", 7, 1e-3)
    assert tree["grading"]["control"] == "shuffle"
    assert "7 steps" in out.splitlines()[-1] and "shuffled" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "trainer.lrr=1"], "did you mean trainer.lr?"),
        (["train", "nowhere"], "no config named 'nowhere'"),
        (["train", "a", "b"], "takes one configuration, got a, b"),
        (["train", "tasks.source=nowhere", "--dry-run"], "no task folder at nowhere"),
        (["train", "model.path=gone"], "there is no checkpoint folder at gone"),
        (["eval", "gone"], "there is no checkpoint folder at gone"),
        (["eval", "http://127.0.0.1:9"], "there is no engine of ours at http://127.0.0.1:9"),
        (["eval", "nano", "--split", "gone"], "no split named 'gone'"),
        (["eval", "nano", "--tasks", "gone"], "no task folder at gone"),
        (["serve", "nano", "--port", "99999"], "there is no port 99999"),
        (["resume", "gone"], "no run named 'gone'"),
        (["resume", "gone", "quickstart"], "quickstart is no override of the form a.b=c"),
        (["train", "trainer.steps=true"], "trainer.steps: true is not a value for this key"),
        (["status", "gone"], "there are none yet"),
        (["report", "gone"], "no run named 'gone'"),
        (["weights", "inspect", "empty"], "holds no chain"),
    ],
)
def test_mistakes_are_sentences(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.startswith(f"stretto {words[0]}: ") and "Traceback" not in error
    assert list(tmp_path.iterdir()) == [], "a mistake leaves nothing behind"


def test_unknown_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["train", "--nam", "x", "--frobnicate"], "unrecognized arguments"),
        (["version", "extra"], "unrecognized arguments"),
        (["eval", "nano", "--count", "-3"], "argument --count: is -3, but must be at least 1"),
        (["eval", "nano", "--temperature", "nan"], "argument --temperature: is nan, but must be 0"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert said in capsys.readouterr().err


def test_a_follower_started_by_hand_can_log(tmp_path: Path) -> None:
    """So that a remote cluster's swaps show in a report: its engines are named, and what it has to say comes after."""
    words = ["follow", "--store", "store", "--chain", "run-0", "--cluster", "far", "--metrics", "metrics.jsonl"]
    command = [sys.executable, "-m", "stretto.cli", *words, "--engines", "http://127.0.0.1:9/,http://127.0.0.1:10"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while len(lines := read(tmp_path / "metrics.jsonl")) < 2 or not (tmp_path / "cache").is_dir():
            assert process.poll() is None and time.monotonic() < deadline, "it does not start"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    said = [(line["process"], line["kind"], line["role"], line["cluster"], line["url"]) for line in lines[:2]]
    urls = ("http://127.0.0.1:9", "http://127.0.0.1:10")
    assert said == [("far-follower", "service", "engine", "far", url) for url in urls]


def test_tasks_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tasks"
    assert main(["tasks", "make", "repair", "--out", str(out), "--count", "3", "--split", "heldout"]) == 0
    assert len(list(out.glob("*/task.toml"))) == 3
    assert main(["tasks", "make", "repair", "--out", str(out), "--split", "nope"]) == 1
    assert "no split named 'nope'" in capsys.readouterr().err
