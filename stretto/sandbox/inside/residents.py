"""Processes that stay: a shell, a driver that is talked to. The host holds the other ends of their pipes itself.

A resident is started with four descriptors that come over the control socket: stdin, stdout, stderr, and one on which
we write its wait status when it has ended. It owns its descendants and the processes of its session: commands leave
them alone.
"""

# ruff: noqa: SIM105 (contextlib costs 2 ms per box)
import errno
import posix
import resource
import sys

from stretto.sandbox.inside.commands import become_command, run_program
from stretto.sandbox.inside.files import open_workspace
from stretto.sandbox.inside.processes import (
    CONTINUE,
    KILL,
    STOP,
    everyone,
    kill_others,
    owned,
    reap,
    residents,
    signal,
)
from stretto.sandbox.inside.wire import Refused

watchers = {}  # descriptor that becomes readable when a resident ends: its pid
marks = {}  # resident: who was there when its current command began
asleep = set()  # who had been stopped already when the box was frozen


def start(control, *argv):
    """Ask for the descriptors, take them, start `argv`; returns its pid."""
    open_workspace()
    standard, report = take_descriptors(control)
    try:
        pid = posix.fork()
        if pid == 0:
            become_command(standard, lambda: run_program(argv))
    except OSError:
        posix.close(report)
        raise
    finally:
        for end in standard:
            posix.close(end)
    watcher = posix.pidfd_open(pid)
    watchers[watcher] = pid

    def ended(status):
        marks.pop(pid, None)
        del watchers[watcher]
        posix.close(watcher)
        try:
            posix.write(report, b"%d" % status)
        except OSError:
            pass  # the host has let go of it
        posix.close(report)

    residents[pid] = ended
    return [b"ok", b"%d" % pid]


def take_descriptors(control):
    from _socket import CMSG_SPACE, socket  # costs a millisecond, which most boxes need not spend

    posix.write(control, b"?")
    channel = socket(fileno=control)
    try:
        _, extra, _, _ = channel.recvmsg(1, CMSG_SPACE(16))
    finally:
        channel.detach()
    ends = [int.from_bytes(data[at : at + 4], sys.byteorder) for _, _, data in extra for at in range(0, len(data), 4)]
    for end in ends:
        posix.set_inheritable(end, False)
    if len(ends) != 4:
        raise Refused(errno.EBADF, "the descriptors did not arrive")
    return ends[:3], ends[3]


def collect():
    try:
        reap(None, wait=False)
    except ChildProcessError:
        pass


def mark(control, pid):
    """A resident's next command begins: who comes from now on is that command's."""
    marks[int(pid)] = frozenset(everyone())
    return [b"ok"]


def interrupt(control, pid, seconds, certain):
    """End what a resident's current command has started, but not the resident, nor what was there before the command
    with what that starts. Answers 1 when there was nothing, 2 when there was; 0, having done nothing, when it wants CPU
    and has had less than `seconds` of it (unless `certain`): a busy machine is not its fault."""
    pid = int(pid)
    found, others = owned((residents.keys() | marks.get(pid, frozenset())) - {pid})
    mine = {one: seen for one, seen in found.items() if one not in others and one != pid}
    runnable = [seen for one, seen in found.items() if seen.state == b"R" and (one in mine or one == pid)]
    if certain == b"0" and runnable and sum(seen.seconds for seen in mine.values()) < float(seconds) and mine:
        return [b"ok", b"0"]
    for one in mine:
        signal(one, KILL)
    collect()
    return [b"ok", b"2" if mine else b"1"]


def end(control, pid):
    """End a resident with all it owns."""
    pid = int(pid)
    if pid in residents:
        signal(pid, KILL)
        while pid in residents:
            reap(None, wait=True)
    kill_others()
    return [b"ok"]


def freeze(control):
    """Stop everybody. A process can't refuse, and one that forks meanwhile is caught before its child exists."""
    asleep.update(pid for pid, seen in everyone().items() if seen.state == b"T")
    signal(-1, STOP)
    return [b"ok"]


def thaw(control):
    for pid in everyone():  # also who has not stopped yet: it has not been on a CPU since
        if pid not in asleep:
            signal(pid, CONTINUE)
    asleep.clear()
    return [b"ok"]


def stats(control):
    """Processes there are (us included), CPU seconds of all there are and were (us not)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = everyone().values()
    spent = ended.ru_utime + ended.ru_stime + sum(seen.seconds for seen in alive)
    return [b"ok", b"%d" % (1 + len(alive)), b"%.3f" % spent]
