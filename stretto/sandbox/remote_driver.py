"""What a SWE-ReX server runs for one request of a box, after `wire` and `files` of `inside/` (see `swerex.py`).

The arguments are the workspace and a file with the request; the answer is printed in base64. There is no PID 1 of ours
on that machine: a command is ended by its process group, and what leaves the group lives on until the machine ends.
"""

# ruff: noqa: SIM105
import base64
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

from stretto.sandbox.inside import wire
from stretto.sandbox.inside.files import files, listing, read, write


def run(seconds, keep, stdin, argv):
    seconds, keep = float(seconds), int(keep)
    most = wire.FLOOD * keep
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    timed_out = False
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                argv,
                cwd=wire.WORKSPACE,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
            )
        except OSError as error:
            why = "command not found" if isinstance(error, FileNotFoundError) else error.strerror or ""
            nothing = [b"0"] * 6  # flags, what is lost, times
            return [b"ok", b"%d" % (127 << 8), *nothing, b"", argv[0] + b": " + why.encode() + b"\n"]
        try:
            child.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = child.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        status = -code if code < 0 else code << 8
        kept, lost = zip(*(ends(file, keep) for file in (out, err)), strict=True)
        flags = (status, timed_out, code == -signal.SIGXFSZ, *lost)
        return [b"ok", *(b"%d" % flag for flag in flags), b"%.6f" % (time.monotonic() - begun), b"%.6f" % spent, *kept]


def ends(file, keep):
    """(the first and the last half of `keep` bytes, how many are lost between)."""
    size = file.seek(0, 2)
    file.seek(0)
    if size <= keep:
        return file.read(), 0
    head = file.read(keep // 2)
    file.seek(size - (keep - len(head)))
    return head + file.read(), size - keep


def python(control, seconds, keep, stdin, source):
    return run(seconds, keep, stdin, [b"python3", b"-S", b"-s", b"-B", b"-c", source])


def execute(control, seconds, keep, stdin, *argv):
    return run(seconds, keep, stdin, list(argv))


def sleep(control, seconds):
    time.sleep(float(seconds))
    return [b"ok"]


OPERATIONS = {
    b"python": python,
    b"exec": execute,
    b"sleep": sleep,
    b"read": read,
    b"write": write,
    b"files": files,
    b"listing": listing,
}


def main():
    with open(sys.argv[2], "rb") as file:
        request = base64.b64decode(file.read())
    os.unlink(sys.argv[2])
    operation, *arguments = wire.unpack(request[4:])
    try:
        if operation not in OPERATIONS:
            raise OSError(errno.ENOSYS, "this backend can't do that")
        answer = OPERATIONS[operation](None, *arguments)
    except wire.Refused as refusal:
        number, detail = refusal.args
        answer = [b"refused", b"%d" % number, detail.encode("utf-8", "replace")]
    except OSError as error:
        answer = [b"refused", b"%d" % error.errno, (error.strerror or "").encode()]
    sys.stdout.write(base64.b64encode(wire.pack(answer)).decode())
