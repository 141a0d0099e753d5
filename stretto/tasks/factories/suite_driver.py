"""Runs inside a box: a package's tests, again and again, at the price of a fork each.

pytest is imported and the tests are collected once. Each job then runs in a child that is forked from this state, so
that it costs milliseconds, starts from the same state as all others, and may crash or hang.

| Job | What the child does | Answer |
|---|---|---|
| `survey` | runs one file's tests, tracing calls | per test: outcome, seconds, functions it called |
| `swap` | gives a live function the code it has in an edited file, runs tests until one fails | per test: outcome |
| `fresh` | edits files on disk, imports and collects everything anew, runs tests | and how it failed |

In `fresh` order nothing is collected in the parent, so that no module of the package is loaded there. What a first
child compiles is kept outside the workspace, and the others read it: most of a collection is pytest rewriting tests.

stdin: JSON `{"libraries", "paths", "module", "files", "plugins", "options", "fresh", "jobs"}`.
stdout: a JSON line per job, after one with what was collected, what could not be, and where else the module under test
lies on this disk.
"""

import gc
import glob
import json
import os
import select
import signal
import sys
import threading
import time
import types

ROOT = os.getcwd()
NULL = os.devnull
LONGEST = 12
"""Lines kept of a failure."""
CACHE = "/tmp/bytecode"
COLLECT_SECONDS = 60.0
LATER = 60
"""Seconds by which an edited file is younger than the original: equally long, it would else pass for it."""


def arguments():
    """As in grading: nothing configures pytest but this line."""
    quiet = ["-q", "--no-header", "--no-summary", "--tb=short", "--color=no", "--capture=sys"]
    off = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "junitxml", "pastebin", "doctest")]
    return [*quiet, *off, "-c", NULL, f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "--import-mode=append"]


class Watch:
    """A pytest plugin that notes what became of each test."""

    def __init__(self, only=None):
        self.only = only
        self.tests = {}
        self.broken = {}

    def pytest_collection_modifyitems(self, items: list):
        if self.only is not None:
            items[:] = [item for item in items if item.nodeid in self.only]

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken[report.nodeid] = told(report)

    def pytest_runtest_logreport(self, report):
        test = self.tests.setdefault(report.nodeid, {"ok": False, "seconds": 0.0, "told": []})
        test["seconds"] += report.duration
        if report.when == "call":
            test["reports"] = test.get("reports", 0) + 1  # a test with subtests reports several times
            test["ok"] = report.passed and not hasattr(report, "wasxfail") and test["reports"] == 1
        if report.failed:
            test["ok"] = False
            test["told"] = test["told"] or told(report)


class Server(Watch):
    """Takes the place of pytest's loop over tests: runs the jobs instead."""

    def __init__(self, jobs, answer, twin):
        super().__init__()
        self.items = {}
        self.jobs, self.answer, self.twin = jobs, answer, twin

    def pytest_runtestloop(self, session):
        self.items = {item.nodeid: item for item in session.items}
        self.slow = set()
        self.live = live_functions()
        self.answer({"collected": len(self.items), "broken": self.broken, "twin": self.twin})
        gc.collect()
        gc.freeze()
        for job in self.jobs:
            said: dict = apart(lambda job=job: getattr(self, job["do"])(job), job["seconds"])
            if job["do"] == "survey":  # what is slow isn't traced
                self.slow |= {id for id, test in said.get("tests", {}).items() if test["seconds"] > job["slow"]}
            self.answer(said)
        return True

    def run(self, ids, traced=False, until_failure=False):
        """Run the tests `ids` in this process, perhaps only until one of them fails."""
        items = [self.items[id] for id in ids if id in self.items]
        calls = {}
        for item, following in zip(items, [*items[1:], None]):
            called = calls[item.nodeid] = set()
            if traced:
                trace(called)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            trace(None)
            if until_failure and not self.tests.get(item.nodeid, {"ok": True})["ok"]:
                break
        return calls

    def survey(self, job):
        ids = [id for id in self.items if id.partition("::")[0] == job["file"] and id not in self.slow]
        calls = self.run(ids, traced=job["trace"])
        for id, called in calls.items():
            if id in self.tests:
                self.tests[id]["calls"] = sorted((os.path.relpath(path, ROOT), line) for path, line in called)
        return {"tests": self.tests}

    def swap(self, job):
        for change in job["changes"]:
            path = os.path.join(ROOT, change["file"])
            key = (path, change["line"])
            functions = self.live.get(key, ())
            if not functions:
                return {"refused": "the function is not loaded"}
            with open(path, "rb") as file:
                code = find(compile(edited(file.read(), change["edits"]), path, "exec", dont_inherit=True), key[1])
            for function in functions:
                try:
                    function.__code__ = code
                except (ValueError, TypeError) as error:
                    return {"refused": str(error)}
        self.run(job["tests"], until_failure=True)
        return {"tests": self.tests}


def fresh(job, settings):
    """A new import and collection of everything, on files as a solver would find them."""
    for change in job["changes"]:
        path = os.path.join(ROOT, change["file"])
        with open(path, "rb") as file:
            data = edited(file.read(), change["edits"])
        write(path, data, os.stat(path).st_mtime + LATER)
    import pytest

    only = job["tests"]
    files = job["files"] if only is None else sorted({id.partition("::")[0] for id in only})
    watch = Watch(only if only is None else set(only))
    pytest.main([*arguments(), "--continue-on-collection-errors", *settings, *files], plugins=[watch])
    return {"tests": watch.tests, "broken": watch.broken}


def compiled(files, settings):
    """Collect `files` once, so that the bytecode of all that they import lies in `CACHE`."""
    import pytest

    sys.dont_write_bytecode = False
    quiet = ["--collect-only", "--continue-on-collection-errors"]
    pytest.main([*arguments(), *quiet, *settings, *files])
    return {}


def write(path, data, changed):
    """The file with `data` and that time of change, by which bytecode is told from that of another text."""
    with open(path, "wb") as file:
        file.write(data)
    os.utime(path, (changed, changed))


def told(report):
    """What a user would have seen: the statements of the test that led there, and the error."""
    lines = getattr(report, "longreprtext", str(report.longrepr)).splitlines()
    test, kept, inside = report.nodeid.partition("::")[0], [], False
    for line in lines:
        if (line.startswith("    ") and inside) or line.startswith("E   "):
            kept.append(line[4:300].rstrip())
        else:
            inside = line.startswith(test + ":")
    return (kept or [line[:300] for line in lines[-3:]])[:LONGEST]


def trace(called):
    """Note each function of the package that is entered, in any thread."""

    def enter(frame, event, argument):
        code = frame.f_code
        if code.co_filename.startswith(ROOT):
            called.add((code.co_filename, code.co_firstlineno))

    hook = None if called is None else enter
    threading.settrace(hook)
    sys.settrace(hook)


def live_functions():
    """All function objects by the file and line of their code."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and thing.__code__.co_filename.startswith(ROOT):
            key = (os.path.normpath(thing.__code__.co_filename), thing.__code__.co_firstlineno)
            found.setdefault(key, []).append(thing)
    return found


def find(code, line):
    """The outermost function that begins at `line`; None when there is none."""
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            if constant.co_firstlineno == line and constant.co_flags & 2:  # CO_NEWLOCALS: no class body
                return constant
            inner = find(constant, line)
            if inner is not None:
                return inner
    return None


def twin(module):
    """Where this box has another copy of the module; empty when it has none."""
    for base in (*glob.glob("/usr/lib/python3*"), *glob.glob("/usr/local/lib/python3*")):
        for folder in ("", "dist-packages", "site-packages"):
            for name in (module, module + ".py"):
                path = os.path.join(base, folder, name)
                if os.path.exists(path):
                    return path
    return ""


def edited(data, edits):
    for start, end, text in sorted(edits, reverse=True):
        data = data[:start] + text.encode() + data[end:]
    return data


def apart(work, seconds):
    """The answer of `work` from a child of its own, which is killed when it takes too long."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(ours)
        try:
            answer = work()
        except BaseException as error:
            answer = {"refused": f"{type(error).__name__}: {str(error)[:200]}"}
        with open(theirs, "wb") as pipe:
            pipe.write(json.dumps(answer).encode() + b"\n")
        os._exit(0)
    os.close(theirs)
    data, deadline = bytearray(), time.monotonic() + seconds
    while not data.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
        if select.select([ours], [], [], left)[0]:
            part = os.read(ours, 1 << 20)
            if not part:
                break
            data += part
    os.close(ours)
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if data.endswith(b"\n"):
        return json.loads(data)
    return {"refused": "it crashed" if time.monotonic() < deadline else "it took too long"}


def main():
    order = json.loads(sys.stdin.buffer.read())
    channel, null = os.dup(1), os.open(NULL, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)

    def answer(what):
        data = json.dumps(what).encode() + b"\n"
        while data:
            data = data[os.write(channel, data) :]

    sys.path[:] = [path for path in sys.path if path]
    sys.path += [*order["libraries"], *(os.path.normpath(os.path.join(ROOT, path)) for path in order["paths"])]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    import pytest

    settings = [f"-p{name}" for name in order["plugins"]]
    for name, value in order["options"].items():
        settings += ["-o", f"{name}={value}"]
    if order["fresh"]:
        answer({})
        if len(order["jobs"]) > 1:
            sys.pycache_prefix = CACHE
            apart(lambda: compiled(order["files"], settings), COLLECT_SECONDS)
        for job in order["jobs"]:
            before = {}
            for change in job["changes"]:
                path = os.path.join(ROOT, change["file"])
                with open(path, "rb") as file:
                    before[path] = file.read(), os.stat(path).st_mtime
            answer(apart(lambda job=job: fresh(job, settings), job["seconds"]))
            for path, (data, changed) in before.items():
                write(path, data, changed)
    else:
        server = Server(order["jobs"], answer, twin(order["module"]))
        code = pytest.main(
            [*arguments(), "--continue-on-collection-errors", *settings, *order["files"]], plugins=[server]
        )
        if not server.items:
            answer({"collected": 0, "broken": server.broken, "code": int(code)})
    os._exit(0)


if __name__ == "__main__":
    main()
