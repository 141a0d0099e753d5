"""One command at a time: forked from the warm interpreter, with its own limits, fed, timed, and cleaned up after."""

import _ctypes
import _signal  # pyright: ignore[reportMissingImports]
import errno
import posix
import resource
import select
import sys
import time

from stretto.sandbox.inside.files import open_workspace
from stretto.sandbox.inside.processes import Seen, everyone, kill_others, residents
from stretto.sandbox.inside.wire import FLOOD, PATIENCE, WORKSPACE, Closed

PRCTL = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # pyright: ignore (`import ctypes` would cost 3 ms)
SLICE = 3
"""Milliseconds between looks at a child that can't be watched."""
limits = [0, 0]  # of commands: address space in bytes, processes


def dumpable(flag):
    if _ctypes.call_function(PRCTL, (4, flag, 0, 0, 0)) != 0:  # PR_SET_DUMPABLE
        raise OSError(errno.EPERM, "prctl failed")


def python(control, seconds, keep, stdin, source):
    return command(control, float(seconds), int(keep), stdin, lambda: run_source(source))


def execute(control, seconds, keep, stdin, *argv):
    return command(control, float(seconds), int(keep), stdin, lambda: run_program(argv))


def command(control, seconds, keep, stdin, body):
    """Run `body` in a child and return its wait status, flags, seconds and output. Leaves no other process alive."""
    begun = time.monotonic()
    open_workspace()
    before = frozenset(everyone()) if residents else frozenset()
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    pipes = [posix.pipe() for _ in range(3)]  # stdin, stdout, stderr: (read end, write end)
    child = posix.fork()
    if child == 0:
        become_command((pipes[0][0], pipes[1][1], pipes[2][1]), body)
    ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
    for end in (pipes[0][0], pipes[1][1], pipes[2][1]):
        posix.close(end)
    for end in ours:
        posix.set_blocking(end, False)
    watcher = watch_process(child)
    try:
        flow = Flow(ours, stdin, keep)
        timed_out = watch(control, watcher, child, flow, begun, seconds)
        status = kill_others(child, before)
        flow.drain()
    finally:
        kill_others(child, before)
        for end in (watcher, *ours):
            if end is not None:
                posix.close(end)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    numbers = (status, timed_out, flow.flooded, flow.lost[flow.out], flow.lost[flow.err])
    times = (b"%.6f" % (time.monotonic() - begun), b"%.6f" % spent)
    return [
        b"ok",
        *(b"%d" % number for number in numbers),
        *times,
        *(bytes(flow.kept[end]) for end in (flow.out, flow.err)),
    ]


class Flow:
    """The bytes between a command and us: feeds stdin, keeps head and tail of each output and counts the rest."""

    def __init__(self, ends, stdin, keep):
        self.stdin, self.out, self.err = ends
        self.to_write = memoryview(stdin)
        self.keep = keep
        self.kept = {self.out: bytearray(), self.err: bytearray()}
        self.lost = {self.out: 0, self.err: 0}
        self.seen = 0
        self.flooded = False
        self.open = {self.out, self.err}

    def read(self, end):
        """Take what is there; False when nothing was."""
        try:
            data = posix.read(end, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.open.discard(end)
            return False
        kept = self.kept[end]
        kept += data
        if len(kept) > self.keep:  # the middle goes: between the first and the last half of what may be kept
            cut = len(kept) - self.keep
            del kept[self.keep // 2 : self.keep // 2 + cut]
            self.lost[end] += cut
        self.seen += len(data)
        self.flooded |= self.seen > FLOOD * self.keep
        return True

    def write(self):
        """Feed stdin; False when it is done with, one way or the other."""
        try:
            self.to_write = self.to_write[posix.write(self.stdin, self.to_write[:65536]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self.to_write)

    def drain(self):
        for end in tuple(self.open):
            while not self.flooded and self.read(end):
                pass


def watch_process(child):
    """A descriptor that becomes readable when the child ends; None where the kernel has none (gVisor)."""
    try:
        return posix.pidfd_open(child)
    except OSError:
        return None


def watch(control, watcher, child, flow, begun, seconds):
    """Pump bytes until the child has ended, floods us or is out of time; True for the last."""
    poller = select.poll()
    if watcher is not None:
        poller.register(watcher, select.POLLIN)
    poller.register(control, 0)  # a hang-up ends everything
    for end in flow.open:
        poller.register(end, select.POLLIN)
    writing = bool(flow.to_write)
    if writing:
        poller.register(flow.stdin, select.POLLOUT)
    else:
        close_keeping_number(flow.stdin)
    deadline = begun + seconds
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            if time.monotonic() < begun + PATIENCE * seconds and starved(child, seconds):
                deadline = time.monotonic() + 0.1 * seconds
                continue
            return True
        if watcher is None and posix.waitid(posix.P_PID, child, posix.WEXITED | posix.WNOHANG | posix.WNOWAIT):
            return False
        for end, _ in poller.poll(left * 1000 + 1 if watcher is not None else min(left * 1000 + 1, SLICE)):
            if end == control:
                raise Closed
            if end == watcher:
                return False
            if end == flow.stdin:
                if not flow.write():
                    poller.unregister(end)
                    close_keeping_number(end)
            elif not flow.read(end) and end not in flow.open:
                poller.unregister(end)
            if flow.flooded:
                return False


def close_keeping_number(end):
    """End of file for the reader, without freeing the number for reuse while it is in our tables."""
    null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    posix.dup2(null, end, inheritable=False)
    posix.close(null)


def starved(child, seconds):
    """Whether the child wants CPU, and has had less of it than its limit: a busy machine is not its fault."""
    seen = Seen(child)
    return seen.state == b"R" and seen.seconds < seconds


def become_command(standard, body):
    """In the child: own session, own limits, none of the server's descriptors; never returns."""
    try:
        posix.setsid()
        for number, end in enumerate(standard):
            posix.dup2(end, number)
        posix.closerange(3, 1024)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        dumpable(1)
        with open("/proc/self/oom_score_adj", "wb") as file:  # the kernel's choice should be a command, not PID 1
            file.write(b"1000")
        memory, processes = limits
        for name, value in (("AS", memory), ("NPROC", processes), ("NOFILE", 256), ("CORE", 0)):
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        posix.chdir(WORKSPACE)
        body()
    except BaseException as error:
        posix.write(2, f"the command could not start: {error}\n".encode())
    finally:
        posix._exit(126)


def run_program(argv):
    try:
        if b"/" in argv[0]:
            posix.execve(argv[0], argv, posix.environ)
        for folder in posix.environ[b"PATH"].split(b":"):
            try:
                posix.execve(folder + b"/" + argv[0], argv, posix.environ)
            except FileNotFoundError:
                continue
        problem = b"command not found"
    except OSError as error:
        problem = (error.strerror or "").encode()
    posix.write(2, argv[0] + b": " + problem + b"\n")
    posix._exit(127)


def run_source(source):
    """Run `source` as `__main__`, as `python -c` would, then leave without the interpreter's slow goodbye."""
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c"]
    code = 0
    try:
        exec(compile(source, "<string>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as stop:
        code = exit_code(stop.code)
    except BaseException as error:
        code = 1
        if error.__traceback__:
            error.__traceback__ = error.__traceback__.tb_next  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    posix._exit(code)


def exit_code(value):
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1
