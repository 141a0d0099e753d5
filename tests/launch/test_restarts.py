"""A process that dies is started again, later each time, and not for ever."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.launch.local import LaunchError, Processes
from stretto.launch.restarts import LONGEST_SECONDS, Restarts
from stretto.launch.service import FINAL


def test_the_wait_doubles_and_the_limit_ends_it():
    restarts = Restarts(limit=4, window=60.0)
    assert [restarts.died("a", at) for at in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.1, 0.2, 0.4, 0.8, None]
    assert restarts.died("b", 4.0) == 0.1, "each process for itself"
    assert restarts.counts == {"a": 5, "b": 1}


def test_deaths_long_ago_are_forgotten():
    restarts = Restarts(limit=1, window=60.0)
    assert [restarts.died("a", at) for at in (0.0, 61.0, 122.0)] == [0.1] * 3
    assert restarts.died("a", 123.0) is None


def test_no_restarts_at_all():
    assert Restarts(limit=0, window=60.0).died("a", 0.0) is None


@given(st.lists(st.floats(0, 30), max_size=40), st.integers(1, 30))
def test_waits_are_bounded_and_only_the_limit_is_final(gaps, limit):
    restarts, now, deaths = Restarts(limit, 60.0), 0.0, []
    for gap in gaps:
        now += gap
        recent = [at for at in deaths if now - at < 60.0]
        deaths.append(now)
        wait = restarts.died("a", now)
        assert (wait is None) == (len(recent) >= limit)
        assert wait is None or 0 < wait <= LONGEST_SECONDS


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


@pytest.fixture
def processes(tmp_path: Path):
    made: list[Processes] = []

    def make(limit: int, **told) -> Processes:
        made.append(Processes(tmp_path, restarts=Restarts(limit, 60.0), **told))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def revive_until(processes: Processes, condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        processes.revive()
        time.sleep(0.02)


def test_a_killed_child_is_started_again_with_the_same_command(processes, tmp_path: Path) -> None:
    started, died = [], []
    many = processes(
        3, started=lambda child: started.append(child.restarts), died=lambda child: died.append(child.name)
    )
    child = many.start("worker-0", python("import time; print('up', flush=True); time.sleep(60)"), role="worker")
    first = child.process.pid
    revive_until(many, lambda: "up" in child.log.read_text())
    child.process.kill()
    revive_until(many, lambda: child.log.read_text().count("up") == 2)
    assert child.process.pid != first and child.exit_code is None and child.restarts == 1
    assert (started, died) == ([0, 1], ["worker-0"])
    assert '"restarts": 1' in (tmp_path / "pids.json").read_text()


def test_ASY_14_a_child_that_dies_too_often_ends_the_run_with_its_last_lines(processes) -> None:
    many = processes(2)
    many.start("trainer", python("raise SystemExit('no luck today')"))
    with pytest.raises(LaunchError) as error:
        revive_until(many, lambda: False)
    text = str(error.value)
    assert "trainer ended with exit code 1, its death number 3 (launch.restarts is 2)" in text
    assert text.count("no luck today") == 1, "the lines of the last start alone"


def test_an_error_that_no_restart_heals_ends_the_run_at_once(processes) -> None:
    many = processes(5)
    child = many.start("trainer", python(f"print('the batch is malformed'); raise SystemExit({FINAL})"))
    with pytest.raises(LaunchError, match="the batch is malformed"):
        revive_until(many, lambda: False)
    assert child.restarts == 0


def test_a_child_whose_job_is_done_stays_ended(processes) -> None:
    many = processes(5)
    child = many.start("trainer", python("pass"), may_finish=True)
    revive_until(many, lambda: child.exit_code == 0)
    many.revive()
    assert child.restarts == 0


def test_another_command_may_take_the_place(processes) -> None:
    many = processes(5)
    child = many.start("follower", python("import time; print('old', flush=True); time.sleep(60)"))
    revive_until(many, lambda: "old" in child.log.read_text())
    many.again(child, python("import time; print('new', flush=True); time.sleep(60)"))
    revive_until(many, lambda: "new" in child.log.read_text())
    assert child.exit_code is None
