"""The processes of the box: who is there, who came from whom, and ending all that nobody wants to stay.

The kernel hands every orphan of the namespace to us, so that nothing is lost from sight.
"""

# ruff: noqa: SIM105 (contextlib costs 2 ms per box)
import posix
import time

KILL, CONTINUE, STOP = 9, 18, 19
ROUNDS = 500
residents = {}  # pid: what happens with its wait status


class Seen:
    """One process as /proc shows it: parent, session, state letter, CPU seconds used."""

    def __init__(self, pid):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self.state = fields[0]
        self.parent, self.session = int(fields[1]), int(fields[3])
        self.seconds = (int(fields[11]) + int(fields[12])) / 100


def everyone():
    """pid: Seen, of all but this process."""
    found = {}
    for name in posix.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                found[int(name)] = Seen(name)
            except OSError:
                continue  # gone
    return found


def owned(roots, before=frozenset()):
    """(everyone, those of them who belong to `roots`): by descent, by session, or by having been there `before`."""
    found = everyone()
    keep = {pid for pid, seen in found.items() if pid in roots or pid in before or seen.session in roots}
    grown = bool(keep)
    while grown:
        more = {pid for pid, seen in found.items() if pid not in keep and seen.parent in keep}
        keep |= more
        grown = bool(more)
    return found, keep


def reap(child, wait):
    """Collect those who have ended, all (or, to `wait`, the next one); returns the wait status of `child` if seen.

    ChildProcessError: there is nobody left.
    """
    status = None
    while True:
        try:
            pid, ended = posix.waitpid(-1, 0 if wait else posix.WNOHANG)
        except ChildProcessError:
            if status is None:
                raise
            return status  # of the last there was
        if pid == 0:
            return status
        if pid in residents:
            residents.pop(pid)(ended)
        if pid == child:
            status = ended
        if wait:
            return status


def kill_others(child=None, before=frozenset()):
    """End every process that no resident owns, and reap; returns the wait status of `child` (or None).

    Without residents that is everybody but us. With them, one who forks faster than we look ends the residents as well.
    """
    status = None
    for _ in range(ROUNDS):
        if not residents:
            break
        found, keep = owned(residents, before)
        for pid in found:
            if pid not in keep:
                signal(pid, KILL)
        try:
            ended = reap(child, wait=False)
        except ChildProcessError:
            return status
        status = status if ended is None else ended
        if found.keys() <= keep:
            return status
        time.sleep(0.0003)
    while True:
        signal(-1, KILL)
        try:
            ended = reap(child, wait=True)
        except ChildProcessError:
            return status
        status = status if ended is None else ended


def signal(pid, number):
    try:
        posix.kill(pid, number)
    except OSError:
        pass  # it is gone
