"""The probe shows what holds, its rows can fail, and where a required one does nothing that a policy wrote is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto import cli
from stretto.sandbox import bubblewrap, check, probe, recipe
from stretto.sandbox.probe import Row


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As on a machine where nothing was found out yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check.require.cache_clear()
    yield tmp_path
    check.require.cache_clear()


def test_SBX_9_SBX_10_every_required_row_holds_here(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["sandbox", "probe", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] and [row for row in data["rows"] if row["required"] and not row["holds"]] == []
    assert sum(row["required"] for row in data["rows"]) >= 26


def test_SBX_9_without_the_filter_the_rows_fail_and_no_policy_code_is_run(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bubblewrap, "FILTER", "")
    names = {"capabilities", "sockets", "system calls", "terminal"}
    some = [attempt for attempt in probe.attempts() if attempt.name in names | {"host files"}]
    monkeypatch.setattr(probe, "attempts", lambda: some)
    monkeypatch.setattr(probe, "more", lambda can: [])
    assert {row.name for row in probe.refused(probe.probe())} == names
    with pytest.raises(check.SandboxUnavailable, match=r"would not hold.*system calls.*stretto sandbox probe"):
        check.require()
    assert list(fresh.rglob("*holds*")) == []


def test_SBX_12_rows_of_the_host_can_fail(monkeypatch: pytest.MonkeyPatch):
    """One more writable folder in every box."""
    plain = recipe.Recipe.arguments

    def leaky(self, *arguments, **options):
        words = plain(self, *arguments, **options)
        at = words.index("--remount-ro")
        return [*words[:at], "--bind", f"{options.get('room') or arguments[0]}/scratch/tmp", "/srv", *words[at:]]

    monkeypatch.setattr(recipe.Recipe, "arguments", leaky)
    some = [attempt for attempt in probe.attempts() if attempt.name in ("read-only", "host files", "network")]
    monkeypatch.setattr(probe, "attempts", lambda: some)
    monkeypatch.setattr(probe, "more", lambda can: [])
    failed = {row.name: row.detail for row in probe.refused(probe.probe())}
    assert set(failed) == {"read-only", "host files"} and "wrote in /srv" in failed["read-only"]


def test_SBX_4_it_is_asked_once_per_boot_and_version(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(probe, "probe", lambda: asked.append(1) or [Row("one", "", True, True, "")])
    for _ in range(2):
        check.require.cache_clear()
        check.require()
    assert len(asked) == 1 and len(list(fresh.rglob("sandbox-holds-*"))) == 1


def test_a_table_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    rows = [Row("disk", "ends", True, False, "9 bytes in [x]"), Row("cpu", "shared", False, False, "no group")]
    monkeypatch.setattr("stretto.sandbox.report.probe", lambda: rows)
    assert cli.main(["sandbox", "probe"]) == 1
    said = capsys.readouterr().out
    assert "9 bytes in [x]" in said and "Not held: disk." in said
    monkeypatch.setattr("stretto.sandbox.report.probe", lambda: rows[1:])
    assert cli.main(["sandbox", "probe"]) == 0
    assert "Not limited here: cpu." in capsys.readouterr().out
