"""The processes of a run on this machine: started, watched, and ended.

    processes = Processes(run_dir, start_seconds=60)
    port = free_port("127.0.0.1")
    child = processes.start("engine-0", service("engine", port=port, ...), url=f"http://127.0.0.1:{port}")
    processes.wait_ready([child])      # the error names who did not answer by the deadline, with its last lines
    processes.check()                  # raises when any of them is dead
    processes.revive()                 # or: starts again those that died, raises when one dies too often
    processes.kill(child, "hangs")     # ends one that lives and does nothing (`vigil.py` finds it)
    processes.stop()                   # SIGTERM, then SIGKILL, grandchildren too

Nothing outlives the launcher: each child leads its own process group, which `stop` ends, and dies with its parent
when that is killed (`service.die_with`). What the services do is not known here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from stretto.launch.client import Unanswered, ask
from stretto.launch.restarts import Restarts
from stretto.launch.service import FINAL, PARENT

LAST_LINES = 6


class LaunchError(RuntimeError):
    """A process did not start, did not answer or died; the text names it and ends with its last lines."""


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str | None
    may_finish: bool  # ending with exit code 0 is its job done, not a failure
    command: list[str]
    threads: int = 1
    log_start: int = 0  # bytes in the log before this process: those of an earlier start
    details: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    due: float | None = None  # it died and is started again at this time (monotonic)
    hung: str = ""  # why it was killed by us

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    @property
    def finished(self) -> bool:
        """It ended, and its job is done."""
        return self.exit_code == 0 and self.may_finish

    @property
    def dead(self) -> bool:
        """It ended, and should not have."""
        return self.exit_code is not None and not self.finished

    def end(self) -> str:
        """How it ended, for a sentence."""
        if self.hung:
            return f"{self.hung}; it was killed"
        code = self.exit_code or 0
        return f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"

    def last_lines(self) -> str:
        """The end of its log, indented for an error message; our own sentence alone, where it ended with one."""
        try:
            text = self.log.read_bytes()[self.log_start :][-8192:].decode("utf-8", "replace")
        except OSError:
            return "    (no log)"
        lines = [f"    {line.rstrip()[:300]}" for line in text.splitlines() if line.strip()]
        if lines and lines[-1].startswith(f"    stretto {self.name}: "):
            lines = lines[-1:]
        return "\n".join(lines[-LAST_LINES:]) or "    (it printed nothing)"


class Processes:
    """Children of one run; `run` gets logs/ and pids.json. `started` is called with each new child, also with one that
    is started again; `died` with one that will be."""

    def __init__(
        self,
        run: Path,
        start_seconds: float = 120.0,
        started: Callable[[Child], None] = lambda child: None,
        died: Callable[[Child], None] = lambda child: None,
        restarts: Restarts | None = None,
    ) -> None:
        self.run = run
        self.start_seconds = start_seconds
        self.children: list[Child] = []
        self._started, self._died = started, died
        self._finished = 0
        self._restarts = restarts or Restarts(0, 1.0)
        (run / "logs").mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        command: Sequence[str],
        url: str | None = None,
        threads: int = 1,
        may_finish: bool = False,
        **details: Any,
    ) -> Child:
        """Start a child; must be called from the main thread, whose end is what the child dies with."""
        log = self.run / "logs" / f"{name}.log"
        process, log_start = _spawn(command, log, threads)
        child = Child(name, process, log, url, may_finish, list(command), threads, log_start, details)
        self.children.append(child)
        self._write_pids()
        self._started(child)
        return child

    def again(self, child: Child, command: Sequence[str] | None = None) -> None:
        """Start a child again, perhaps with another command; ends it first if it lives. From the main thread."""
        _end([child], grace=5.0)
        child.command = list(command or child.command)
        child.process, child.log_start = _spawn(child.command, child.log, child.threads)
        child.due, child.hung = None, ""
        child.restarts += 1
        self._write_pids()
        self._started(child)

    def check(self) -> None:
        """Raise LaunchError if any child is dead that should be alive."""
        for child in self.children:
            if child.dead:
                raise self._fatal(child)

    def kill(self, child: Child, why: str) -> None:
        """End a child that hangs, grandchildren too, at once; `why` goes on after its name."""
        child.hung = why
        _end([child], grace=0.0)

    def revive(self) -> None:
        """Start dead children again, each after its back-off; call it often. Raises LaunchError when one died too
        often, or said that starting it again is no use."""
        now = time.monotonic()
        finished = sum(child.finished for child in self.children)
        if finished != self._finished:
            self._finished = finished
            self._write_pids()
        for child in self.children:
            if child.due is not None:
                if now >= child.due:
                    self.again(child)
            elif child.dead:
                wait = None if child.exit_code == FINAL or _full(self.run) else self._restarts.died(child.name, now)
                if wait is None:
                    raise self._fatal(child)
                child.due = now + wait
                self._died(child)

    def _fatal(self, child: Child) -> LaunchError:
        full = f"no space is left below {self.run}: make room first. " if _full(self.run) else ""
        limit, count = self._restarts.limit, self._restarts.counts[child.name]
        often = f", its death number {count} (launch.restarts is {limit})" if limit and count > limit else ""
        return LaunchError(
            f"{full}{child.name} {child.end()}{often}. Its last lines ({child.log}):\n{child.last_lines()}"
        )

    def wait_ready(self, children: Iterable[Child], tick: Callable[[], None] = lambda: None) -> None:
        """Return when every child's /health says it is ready; `tick` is called between tries."""
        deadline = time.monotonic() + self.start_seconds
        missing = [child for child in children if child.url]
        while missing:
            self.check()
            missing = [child for child in missing if not self.answers(child, ready=True)]
            if missing and time.monotonic() > deadline:
                child = missing[0]
                raise LaunchError(
                    f"{', '.join(c.name for c in missing)} did not answer a health check within "
                    f"{self.start_seconds:g} s (launch.start_seconds). Last lines of {child.name} ({child.log}):\n"
                    f"{child.last_lines()}"
                )
            if missing:
                tick()
                time.sleep(0.05)

    def answers(self, child: Child, ready: bool = False) -> bool:
        """Whether its /health answers at all; with `ready`, whether it says it is ready for work."""
        try:
            return bool(ask(f"{child.url}/health", timeout=2.0).get("ready")) or not ready
        except Unanswered:
            return False

    def stop(self, grace: float = 10.0) -> None:
        """End every child: all but the first get SIGTERM and `grace` seconds together, then the first; then SIGKILL."""
        first, rest = self.children[:1], self.children[1:]
        for wave in (rest, first):
            _end(wave, grace)
        self.children = []
        self._write_pids()

    def _write_pids(self) -> None:
        tree = {
            "launcher": os.getpid(),
            "children": {
                child.name: {
                    "pid": child.process.pid,
                    "url": child.url,
                    "log": str(child.log),
                    "restarts": child.restarts,
                    "finished": child.finished,
                    **child.details,
                }
                for child in self.children
            },
        }
        path = self.run / "pids.json"
        with contextlib.suppress(OSError):  # a full disk must not keep `stop` from ending processes
            path.with_suffix(".tmp").write_text(json.dumps(tree, indent=1))
            path.with_suffix(".tmp").replace(path)


def service(role: str, **options: Any) -> list[str]:
    """Command line of one of our services."""
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "stretto.launch.service", role, *flags]


def free_port(host: str, wanted: int = 0) -> int:
    """A port nobody listens on: `wanted` itself, or any for 0. Raises LaunchError when `wanted` is taken."""
    if not 0 <= wanted < 1 << 16:
        raise LaunchError(f"there is no port {wanted}; give one up to 65535, or 0 for a free one")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            if wanted:
                raise LaunchError(f"port {wanted} on {host} is taken; give another one with --port") from error
            raise LaunchError(f"cannot bind to {host}: {error.strerror}; set launch.host to an own address") from error
        return probe.getsockname()[1]


def _spawn(command: Sequence[str], log: Path, threads: int) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and where in the log its lines begin."""
    environment = os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[variable] = str(threads)
    with log.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return process, log_start


def _end(wave: list[Child], grace: float) -> None:
    families = [member for child in wave for member in _family(child)]
    for child in wave:
        if child.exit_code is None:
            child.process.terminate()
    deadline = time.monotonic() + grace
    while any(child.exit_code is None for child in wave) and time.monotonic() < deadline:
        time.sleep(0.02)
    for child in wave:
        if child.exit_code is None:
            families += _family(child)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
    for member in families:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def _full(folder: Path) -> bool:
    """Whether a process that died there may not even have been able to say why."""
    return shutil.disk_usage(folder).free < 1 << 20


def _family(child: Child) -> list[psutil.Process]:
    """Its descendants, also those that left its process group."""
    try:
        return psutil.Process(child.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
