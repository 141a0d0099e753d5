"""The process that starts boxes: small, unprivileged, their parent and reaper.

A worker is large and threaded, so that forking it per box would cost milliseconds and the "die with parent" signal
would follow a thread. This process is neither. It drops root for good before the first box, starts bubblewrap with
`posix_spawn`, and reaps everything below it. It ends when its socket closes, and its boxes end with it: killing the
worker leaves nothing behind.

    worker ──(socket: spawn, kill / exited)── spawner ──▶ bwrap ──▶ PID 1 of the box (inside.py)
       └───────────────────(socket per box: requests / answers)─────────────┘

Run as `python -I -S spawner.py FD UID GID`, where FD is a SEQPACKET socket. Messages are JSON; `spawn` carries two
descriptors: the box's socket (its fd 0) and a file for error messages (its fd 2).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys

MESSAGE = 65536


def main(number: int, uid: int, gid: int) -> None:
    control = socket.socket(fileno=number)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the worker, which closes the socket
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    alive: set[int] = set()
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            reap(control, alive)
        if control in ready:
            data, descriptors, _, _ = socket.recv_fds(control, MESSAGE, 2)
            if not data:
                return
            message = json.loads(data)
            if message["do"] == "spawn":
                answer = spawn(message, descriptors)
                alive.add(answer["pid"])
                control.send(json.dumps(answer).encode())
            elif message["pid"] in alive:
                os.kill(message["pid"], signal.SIGKILL)


def spawn(message: dict, descriptors: list[int]) -> dict:
    """Start one bubblewrap, as the worker's request says."""
    box, errors = descriptors
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    argv, passed = command_line(message["bwrap"], message["arguments"], bytes.fromhex(message["filter"]))
    null = os.open("/dev/null", os.O_WRONLY)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, old, new) for new, old in enumerate((box, null, errors))]
        argv += message["command"]
        pid = os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsigdef=[signal.SIGPIPE, signal.SIGINT])
    finally:
        for descriptor in (box, errors, null, *passed):
            os.close(descriptor)
    return {"did": "spawn", "id": message["id"], "pid": pid}


def command_line(bwrap: str, arguments: list[str], program: bytes) -> tuple[list[str], list[int]]:
    """bubblewrap's command line up to the command, and the inheritable descriptors it reads.

    The arguments go through a pipe, so that no host path shows on a command line; so does the system call filter.
    """
    passed = []
    if program:
        passed.append(filled_pipe(program))
        arguments = ["--seccomp", str(passed[0]), *arguments]
    passed.append(filled_pipe(b"".join(argument.encode() + b"\0" for argument in arguments)))
    return [bwrap, "--args", str(passed[-1]), "--"], passed


def filled_pipe(data: bytes) -> int:
    """The inheritable read end of a pipe that holds `data` (less than a pipe's 64 KiB) and then ends."""
    out, into = os.pipe()
    os.set_inheritable(out, True)
    os.write(into, data)
    os.close(into)
    return out


def reap(control: socket.socket, alive: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in alive:  # else an orphan of a killed bwrap
            alive.discard(pid)
            control.send(json.dumps({"did": "exit", "pid": pid, "status": status}).encode())


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the worker died with messages under way: the other kind of end
        main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
