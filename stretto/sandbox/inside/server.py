"""The loop of PID 1: answer requests until the host closes the socket, and notice residents that end meanwhile."""

import _signal  # pyright: ignore[reportMissingImports]
import gc
import posix
import select
import time

from stretto.sandbox.inside.commands import dumpable, execute, limits, python
from stretto.sandbox.inside.files import files, listing, read, write
from stretto.sandbox.inside.residents import collect, end, freeze, interrupt, mark, start, stats, thaw, watchers
from stretto.sandbox.inside.wire import Closed, Refused, receive, send


def serve(answers=0):
    """The first request sets the limits of commands. Requests come from fd 0, answers go to the same or to fd 1."""
    control, answers = harden(answers)
    posix.write(answers, b"+")  # before this, no limit and no control group is needed: no policy code exists
    limits[:] = [int(field) for field in receive(control)]
    send(answers, [b"ok"])
    while True:
        try:
            wait_for_request(control)
            operation, *arguments = receive(control)
            answer = OPERATIONS[operation](control, *arguments)
        except Closed:
            posix._exit(0)
        except Refused as refusal:
            number, detail = refusal.args
            answer = [b"refused", b"%d" % number, detail.encode("utf-8", "replace")]
        except OSError as error:
            answer = [b"refused", b"%d" % error.errno, (error.strerror or "").encode()]
        except Exception as error:
            answer = [b"failed", f"{type(error).__name__}: {error}".encode("utf-8", "replace")]
        send(answers, answer)


def harden(answers):
    """Make this process untouchable by its children; returns fd 0 and the one for answers, moved away."""
    control = posix.dup(0)  # non-inheritable, like every descriptor this process opens
    answers = posix.dup(answers) if answers else control
    null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    for standard in (0, 1, 2):
        posix.dup2(null, standard)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # a handler would let children interrupt PID 1
    dumpable(0)
    gc.freeze()
    return control, answers


def wait_for_request(control):
    """Until there is something to read; meanwhile whoever ends is reaped, and its owner told."""
    while watchers:
        poller = select.poll()
        for descriptor in (control, *watchers):
            poller.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poller.poll()]
        collect()
        if control in ready:
            return


def sleep(control, seconds):
    """Do nothing for a while, for experiments with slow tools."""
    time.sleep(float(seconds))
    return [b"ok"]


OPERATIONS = {
    b"python": python,
    b"exec": execute,
    b"read": read,
    b"write": write,
    b"files": files,
    b"listing": listing,
    b"sleep": sleep,
    b"open": start,
    b"mark": mark,
    b"interrupt": interrupt,
    b"end": end,
    b"freeze": freeze,
    b"thaw": thaw,
    b"stats": stats,
}
