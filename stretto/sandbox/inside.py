"""PID 1 of a box: a small fork server that runs commands and moves files on behalf of the host.

CPython's start costs more than the isolation around it, so it is paid once per box: `python` forks from the warm
interpreter. Only modules that are built in or nearly free are imported (`signal`, `json`, `os`… cost milliseconds).
The code arrives over the control socket (file descriptor 0) already compiled; see `BOOT`.

The policy's code runs in children with the same uid. They can't touch this process: signals to PID 1 of a namespace
are dropped unless it handles them, and it is not dumpable, so no ptrace, no /proc/1/mem, no /proc/1/fd. After each
command every other process of the namespace is killed and reaped, so nothing outlives it.

Wire: a message is a list of byte strings, each behind its length, all behind their total (4 bytes, big-endian).
Requests are `[operation, *arguments]`; answers `[b"ok", *values]`, `[b"refused", errno, detail]` (the state of the box
forbids it) or `[b"failed", text]` (a bug here).
"""

# ruff: noqa: SIM105 (contextlib costs 2 ms per box)
import _ctypes
import _signal  # pyright: ignore[reportMissingImports]
import errno
import gc
import posix
import resource
import select
import sys
import time

BOOT = (
    "import posix,marshal\nd=b''\n"
    "while len(d)<4 or len(d)<4+int.from_bytes(d[:4],'big'):d+=posix.read(0,65536)or posix._exit(1)\n"
    "n={'__name__':'inside'}\nexec(marshal.loads(d[4:]),n)\nn['serve']()"
)
"""What `python -c` runs in the box: read one length-prefixed code object and call its `serve`."""

WORKSPACE = "/workspace"
FLOOD = 16
"""A command is killed when it has written this many times what is kept of its output."""
PATIENCE = 5
"""A command that is runnable but starved of CPU gets up to so many times its seconds on the clock."""
MAX_DEPTH = 32
FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC
KILL = 9
PRCTL = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # pyright: ignore (`import ctypes` would cost 3 ms)
limits = (0, 0)  # of commands: address space in bytes, processes


class Refused(Exception):
    """The request can't be carried out because of what the policy left in the box: (errno, detail)."""


class Closed(Exception):
    """The host closed the control socket."""


def pack(fields):
    """bytes of one message."""
    body = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return len(body).to_bytes(4, "big") + body


def unpack(body):
    """The fields of a message without its total length; raises ValueError when the lengths don't add up."""
    fields, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        at += 4 + size
        if at > len(body):
            raise ValueError("message ends inside a field")
        fields.append(body[at - size : at])
    return fields


def serve():
    """Answer requests until the host closes the socket. The first request sets the limits of commands."""
    global limits
    control = harden()
    posix.write(control, b"+")  # before this, no limit and no control group is needed: no policy code exists
    limits = tuple(int(field) for field in receive(control))
    send(control, [b"ok"])
    while True:
        try:
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
        send(control, answer)


def harden():
    """Make this process untouchable by its children; returns the control socket moved away from fd 0."""
    control = posix.dup(0)  # non-inheritable, like every descriptor this process opens
    null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    for standard in (0, 1, 2):
        posix.dup2(null, standard)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # a handler would let children interrupt PID 1
    dumpable(0)
    gc.freeze()
    return control


def dumpable(flag):
    if _ctypes.call_function(PRCTL, (4, flag, 0, 0, 0)) != 0:  # PR_SET_DUMPABLE
        raise OSError(errno.EPERM, "prctl failed")


def receive(control):
    size = int.from_bytes(receive_exactly(control, 4), "big")
    return unpack(receive_exactly(control, size))


def receive_exactly(control, size):
    data = b""
    while len(data) < size:
        part = posix.read(control, size - len(data))
        if not part:
            raise Closed
        data += part
    return data


def send(control, fields):
    data = memoryview(pack(fields))
    while data:
        data = data[posix.write(control, data) :]


# Commands


def python(control, seconds, keep, stdin, source):
    return command(control, float(seconds), int(keep), stdin, lambda: run_source(source))


def execute(control, seconds, keep, stdin, *argv):
    return command(control, float(seconds), int(keep), stdin, lambda: run_program(argv))


def command(control, seconds, keep, stdin, body):
    """Run `body` in a child and return its wait status, flags, seconds and output. Leaves no other process alive."""
    begun = time.monotonic()
    open_workspace()
    pipes = [posix.pipe() for _ in range(3)]  # stdin, stdout, stderr: (read end, write end)
    child = posix.fork()
    if child == 0:
        become_command((pipes[0][0], pipes[1][1], pipes[2][1]), body)
    ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
    for end in (pipes[0][0], pipes[1][1], pipes[2][1]):
        posix.close(end)
    for end in ours:
        posix.set_blocking(end, False)
    watcher = posix.pidfd_open(child)
    try:
        flow = Flow(ours, stdin, keep)
        timed_out = watch(control, watcher, child, flow, begun, seconds)
        status = kill_others(child)
        flow.drain()
    finally:
        kill_others(child)
        for end in (watcher, *ours):
            posix.close(end)
    flags = (timed_out, flow.truncated, flow.flooded)
    numbers = (b"%d" % status, *(b"%d" % flag for flag in flags), b"%.6f" % (time.monotonic() - begun))
    return [b"ok", *numbers, bytes(flow.kept[ours[1]]), bytes(flow.kept[ours[2]])]


class Flow:
    """The bytes between a command and us: feeds stdin, keeps the head of each output and counts the rest."""

    def __init__(self, ends, stdin, keep):
        self.stdin, self.out, self.err = ends
        self.to_write = memoryview(stdin)
        self.keep = keep
        self.kept = {self.out: bytearray(), self.err: bytearray()}
        self.seen = 0
        self.truncated = self.flooded = False
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
        room = self.keep - len(self.kept[end])
        self.kept[end] += data[:room]
        self.truncated |= len(data) > room
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


def watch(control, watcher, child, flow, begun, seconds):
    """Pump bytes until the child has ended, floods us or is out of time; True for the last."""
    poller = select.poll()
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
        for end, _ in poller.poll(left * 1000 + 1):
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
    with open(f"/proc/{child}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0] == b"R" and (int(fields[11]) + int(fields[12])) / 100 < seconds


def kill_others(child):
    """Kill every process of the namespace but this one, reap them all; returns the child's wait status (or None)."""
    status = None
    while True:
        try:
            posix.kill(-1, KILL)
        except ProcessLookupError:
            pass
        try:
            pid, ended = posix.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == child:
            status = ended


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


# Files. Paths arrive cleaned (relative, no `..`); every component is opened without following links.


def open_workspace():
    """The policy owns the workspace and may have closed it to itself, and so to us."""
    try:
        posix.chmod(WORKSPACE, 0o755)
    except OSError:
        pass  # a sealed box


def folder_of(path, create=False):
    """(descriptor of the folder that holds `path`, last component); raises OSError."""
    *folders, name = path.split(b"/")
    open_workspace()
    at = posix.open(WORKSPACE, FOLDER)
    for folder in folders:
        try:
            if create:
                try:
                    posix.mkdir(folder, 0o755, dir_fd=at)
                except FileExistsError:
                    pass
            below = posix.open(folder, FOLDER, dir_fd=at)
        finally:
            posix.close(at)
        at = below
    return at, name


def open_regular(name, at, flags):
    """Open without following a link or waiting for a FIFO's other end; only regular files pass."""
    end = posix.open(name, flags | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC, 0o644, dir_fd=at)
    if posix.fstat(end).st_mode & 0o170000 != 0o100000:
        posix.close(end)
        raise Refused(errno.EINVAL, "not a regular file")
    return end


def read_file(name, at, limit):
    end = open_regular(name, at, posix.O_RDONLY)
    try:
        size = posix.fstat(end).st_size
        if size > limit:
            raise Refused(errno.EFBIG, f"{size} bytes, more than the {limit} that can be read")
        data = b""
        while part := posix.read(end, limit + 1 - len(data)):
            data += part
        return data
    finally:
        posix.close(end)


def read(control, path, limit):
    at, name = folder_of(path)
    try:
        return [b"ok", read_file(name, at, int(limit))]
    finally:
        posix.close(at)


def write(control, *pairs):
    for path, data in zip(pairs[::2], pairs[1::2]):
        at, name = folder_of(path, create=True)
        try:
            end = open_regular(name, at, posix.O_WRONLY | posix.O_CREAT)
        finally:
            posix.close(at)
        try:
            posix.ftruncate(end, 0)
            rest = memoryview(data)
            while rest:
                rest = rest[posix.write(end, rest) :]
        finally:
            posix.close(end)
    return [b"ok"]


def files(control, max_files, max_bytes):
    """Every regular file as name, data, name, data…; links, FIFOs and sockets are passed over."""
    found = []
    at, _ = folder_of(b"")
    gather(at, b"", found, [int(max_files), int(max_bytes), 0], 0)
    return [b"ok", *found]


def gather(at, prefix, found, budget, depth):
    """Depth-first below the folder `at`, which is closed. `budget`: files left, bytes left, entries seen."""
    try:
        if depth > MAX_DEPTH:
            raise Refused(errno.ENAMETOOLONG, f"folders nested more than {MAX_DEPTH} deep")
        with posix.scandir(at) as entries:
            for entry in entries:
                budget[2] += 1
                if budget[2] > 4096:
                    raise Refused(errno.EMFILE, "more than 4096 entries in the workspace")
                name = entry.name.encode("utf-8", "surrogateescape")
                try:
                    if entry.is_dir(follow_symlinks=False):
                        gather(posix.open(name, FOLDER, dir_fd=at), prefix + name + b"/", found, budget, depth + 1)
                    elif entry.is_file(follow_symlinks=False):
                        data = read_file(name, at, budget[1])
                        found += [prefix + name, data]
                        budget[0] -= 1
                        budget[1] -= len(data)
                except PermissionError:
                    continue
                if budget[0] < 0:
                    raise Refused(errno.EMFILE, "too many files in the workspace")
    finally:
        posix.close(at)


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
    b"sleep": sleep,
}
