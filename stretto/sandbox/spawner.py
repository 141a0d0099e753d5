"""The process that starts boxes: small, unprivileged, their parent and reaper.

A worker is large and threaded, so that forking it per box would cost milliseconds and the "die with parent" signal
would follow a thread. This process is neither. It drops root for good before the first box, starts bubblewrap with
`posix_spawn`, and reaps everything below it. It ends when its socket closes, and its boxes end with it: killing the
worker leaves nothing behind. The writable places of boxes are mounts of its own (`rooms.py`), gone with it as well.

    worker ──(socket: spawn, copy, kill / exited)── spawner ──▶ bwrap ──▶ PID 1 of the box (inside/)
       └──────────────────(socket per box: requests / answers)──────────────────┘

Messages on its SEQPACKET socket are JSON; `spawn` carries two descriptors: the box's socket (its fd 0) and a file for
error messages (its fd 2). Standard library only: it runs as `python -I -S`.
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

from stretto.sandbox import rooms, tree

MESSAGE = 65536
SUBREAPER = 36


def main(number: int, uid: int, gid: int, folder: str) -> None:
    """Serve the socket `number`; `folder` is where rooms get mounted."""
    control = socket.socket(fileno=number)
    drop_root(uid, gid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")
    rooms.enter(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the worker, which closes the socket
    with contextlib.suppress(ConnectionError):  # the worker died with messages under way: the other kind of end
        Spawner(control).serve()


def drop_root(uid: int, gid: int) -> None:
    """For good, when this is root: it becomes the given user, without groups."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


class Spawner:
    def __init__(self, control: socket.socket):
        self.control = control
        self.boxes: dict[int, str | None] = {}  # pid of bubblewrap: the box's room
        self.copies: dict[int, tuple[int, int]] = {}  # pid: (id of the request, descriptor with its answer)

    def serve(self) -> None:
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select.select([self.control, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                self.reap()
            if self.control in ready:
                data, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE, 2)
                if not data:
                    return
                message = json.loads(data)
                if message["do"] == "spawn":
                    self.spawn(message, descriptors)
                elif message["do"] == "copy":
                    self.copy(message)
                elif message["pid"] in self.boxes:
                    os.kill(message["pid"], signal.SIGKILL)

    def spawn(self, message: dict, descriptors: list[int]) -> None:
        """Start one bubblewrap, as the worker's request says."""
        box, errors = descriptors
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        null = os.open("/dev/null", os.O_WRONLY)
        passed = []
        room = message["room"]
        answer = {"did": "spawn", "id": message["id"]}
        try:
            if room:
                rooms.furnish(**room)
            argv, passed = command_line(message["bwrap"], message["arguments"], bytes.fromhex(message["filter"]))
            argv += message["command"]
            actions = [(os.POSIX_SPAWN_DUP2, old, new) for new, old in enumerate((box, null, errors))]
            handled = [signal.SIGPIPE, signal.SIGINT]
            pid = os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsigdef=handled)
            self.boxes[pid] = room["folder"] if room else None
            answer["pid"] = pid
        except OSError as error:
            answer["error"] = str(error)
            if room:
                with contextlib.suppress(OSError):
                    rooms.clear(room["folder"])
        finally:
            for descriptor in (box, errors, null, *passed):
                os.close(descriptor)
        self.say(answer)

    def copy(self, message: dict) -> None:
        """Copy trees over each other into an empty folder, in a process of its own: others don't wait for it."""
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(out)
            os._exit(report_copy(message, into))
        os.close(into)
        self.copies[pid] = (message["id"], out)

    def reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.boxes:  # else an orphan of a killed bwrap
                if room := self.boxes.pop(pid):
                    rooms.clear(room)
                self.say({"did": "exit", "pid": pid})
            elif pid in self.copies:
                number, out = self.copies.pop(pid)
                said = os.read(out, 4096).decode(errors="replace")
                os.close(out)
                self.say({"did": "copy", "id": number, "error": said if said != "done" else None})

    def say(self, message: dict) -> None:
        self.control.send(json.dumps(message).encode())


def report_copy(message: dict, into: int) -> int:
    said = "the copying process was killed"
    try:
        target = os.open(message["target"], tree.FOLDER)
        caps = tree.Caps(message["entries"], message["bytes"])
        for path in message["sources"]:
            source = os.open(path, tree.FOLDER)
            tree.copy(source, target, caps, fresh=path == message["sources"][0])
            os.close(source)
        os.fchmod(target, 0o755)
        said = "done"
    except (OSError, tree.TreeError) as error:
        said = str(error)
    os.write(into, said.encode(errors="replace")[:4000])
    return 0


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
