"""Processes are watched and ended: real children, real signals, nothing left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stretto.launch.local import LaunchError, Processes, free_port, service
from stretto.launch.service import FINAL

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"ready": READY}')
    def log_message(self, *a): pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path, start_seconds=1.0)
    yield found
    found.stop(grace=0.2)


def python(source: str, *words: str) -> list[str]:
    return [sys.executable, "-u", "-c", textwrap.dedent(source), *words]


def wait_until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_a_child_that_died_of_a_full_disk_is_explained(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = processes.start("silent", python("raise SystemExit(1)"))
    wait_until(lambda: child.exit_code is not None)
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=0))
    with pytest.raises(
        LaunchError, match=r"no space is left below .*: make room first\. silent ended with exit code 1"
    ):
        processes.check()


def test_stop_ends_children_and_grandchildren(processes: Processes, tmp_path: Path) -> None:
    parent = processes.start("parent", python(GRANDCHILD))
    stubborn = processes.start(
        "stubborn", python("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)")
    )
    wait_until(lambda: parent.log.read_text().strip())
    grandchild = psutil.Process(int(parent.log.read_text()))
    pids = json.loads((tmp_path / "pids.json").read_text())
    assert pids["launcher"] == os.getpid() and pids["children"]["parent"]["pid"] == parent.process.pid
    processes.stop(grace=0.3)
    assert stubborn.process.returncode == -signal.SIGKILL
    wait_until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
    assert json.loads((tmp_path / "pids.json").read_text())["children"] == {}


def test_the_first_child_ends_last(processes: Processes, tmp_path: Path) -> None:
    order = tmp_path / "order"
    say = "import signal, sys, time\ndef end(*_):\n    open({!r}, 'a').write(sys.argv[1]); sys.exit()\n"
    source = say.format(str(order)) + "signal.signal(15, end)\nprint('up')\ntime.sleep(60)"
    children = [processes.start(name, python(source, name)) for name in "abc"]
    wait_until(lambda: all("up" in child.log.read_text() for child in children))
    processes.stop()
    assert order.read_text()[-1] == "a" and sorted(order.read_text()) == ["a", "b", "c"]


def test_ASY_14_a_dead_child_is_named_with_its_last_lines(processes: Processes) -> None:
    processes.start("fine", SLEEP)
    child = processes.start("trainer", python("print('first')\nraise SystemExit('out of luck')"))
    wait_until(lambda: child.exit_code is not None)
    with pytest.raises(LaunchError) as error:
        processes.check()
    assert "trainer ended with exit code 1" in str(error.value)
    assert "    first\n    out of luck" in str(error.value) and "trainer.log" in str(error.value)


def test_a_killed_child_is_named_with_the_signal(processes: Processes) -> None:
    child = processes.start("engine-0", SLEEP)
    child.process.kill()
    wait_until(lambda: child.exit_code is not None)
    with pytest.raises(LaunchError, match="engine-0 was killed by SIGKILL"):
        processes.check()


def test_only_a_child_that_may_finish_may_finish(processes: Processes) -> None:
    done = processes.start("trainer", python("pass"), may_finish=True)
    wait_until(lambda: done.exit_code is not None)
    processes.check()
    early = processes.start("worker", python("pass"))
    wait_until(lambda: early.exit_code is not None)
    with pytest.raises(LaunchError, match="worker ended with exit code 0"):
        processes.check()


def test_health_checks_have_a_deadline_that_names_who_is_silent(processes: Processes) -> None:
    port, silent = free_port("127.0.0.1"), free_port("127.0.0.1")
    good = processes.start("good", python(HEALTHY.replace("READY", "true"), str(port)), url=f"http://127.0.0.1:{port}")
    ticks: list[int] = []
    processes.start_seconds = 10.0
    processes.wait_ready([good], lambda: ticks.append(1))
    assert ticks
    processes.start_seconds = 0.3
    source = "print('still loading')\nimport time\ntime.sleep(60)"
    mute = processes.start("mute", python(source), url=f"http://127.0.0.1:{silent}")
    wait_until(lambda: "still" in mute.log.read_text())
    with pytest.raises(LaunchError, match=r"^mute did not answer .* 0\.3 s[\s\S]*still loading"):
        processes.wait_ready([good, mute])


def test_answering_is_not_being_ready(processes: Processes) -> None:
    port = free_port("127.0.0.1")
    child = processes.start("e", python(HEALTHY.replace("READY", "false"), str(port)), url=f"http://127.0.0.1:{port}")
    wait_until(lambda: processes.answers(child))
    assert not processes.answers(child, ready=True)


def test_a_taken_port_is_a_sentence() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is taken"):
            free_port("127.0.0.1", port)
    with pytest.raises(LaunchError, match="cannot bind to 192.0.2.1"):
        free_port("192.0.2.1")


def test_nothing_survives_a_killed_launcher(tmp_path: Path) -> None:
    """kill -9 of the launcher: its services end with it."""
    launcher = f"""
    import time
    from pathlib import Path
    from stretto.launch.local import Processes
    processes = Processes(Path({str(tmp_path)!r}))
    source = "import os, stretto.launch.service as s; s.die_with(int(os.environ[s.PARENT])); print('up', flush=True)"
    child = processes.start("service", [{sys.executable!r}, "-c", source + "; import time; time.sleep(60)"])
    while "up" not in child.log.read_text():
        time.sleep(0.02)
    print(child.process.pid, flush=True)
    time.sleep(60)
    """
    with subprocess.Popen(python(launcher), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
        assert child.is_running()
        process.kill()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_service_error_is_one_line(tmp_path: Path) -> None:
    """Without config.toml no service can start; it says so in a sentence, the traceback is not on stderr."""
    command = service("orchestrator", run=tmp_path, host="127.0.0.1", port=1)
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == FINAL  # starting it again would end the same way
    assert result.stderr == f"stretto orchestrator: cannot read {tmp_path / 'config.toml'}: No such file or directory\n"
