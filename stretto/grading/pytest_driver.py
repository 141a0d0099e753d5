"""Runs inside a grading box: pytest on the required tests, each outcome told over a descriptor of our own.

pytest and all it needs are imported before anything of the tree, no plugin but this one is loaded, and nothing but the
command line configures it. The tree's folders are at the end of sys.path, so that they shadow nothing. Still, tests and
the policy's code share this process, so that what it tells is a claim: `modes/pytest.py` says how claims are checked.

stdin: JSON `{"mark", "ids", "paths", "plugins", "package", "options", "stop"}`; `stop`: at the first failure.
stdout: lines of `mark` and JSON `[test id, phase, outcome]`; `["", "opened", path]` where other code than pytest and
the tests themselves opens a file with required tests; `["", "end", exit code]` is the last.
"""

import json
import os
import sys

ROOT, LIBRARIES = "/workspace", "/opt/libraries"


def listener(tests, ours, tell):
    """An audit hook that tells of each opening of a file in `tests` on behalf of anybody but us and those files."""
    places = (os.path.dirname(os.__file__), LIBRARIES, "<frozen")
    names, events = {os.path.basename(path) for path in tests}, {"open", "os.link", "os.rename", "os.symlink"}
    basename, realpath, decoded, frame_of = os.path.basename, os.path.realpath, os.fsdecode, sys._getframe

    def listen(event, arguments):
        if event not in events or not isinstance(arguments[0], (str, bytes)):
            return
        path = decoded(arguments[0])
        if basename(path) not in names and realpath(path) not in tests:
            return
        frame = frame_of(1)
        while frame is not None and frame.f_globals is not ours and frame.f_code.co_filename.startswith(places):
            frame = frame.f_back
        if frame is not None and frame.f_globals is not ours and frame.f_code.co_filename not in tests:
            tell("", "opened", path[-200:])

    return listen


def main():
    order = json.loads(sys.stdin.buffer.read())
    channel, null = os.dup(1), os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    mark, write, spell = order["mark"].encode(), os.write, json.JSONEncoder().encode

    def tell(*what):
        write(channel, mark + spell(what).encode() + b"\n")

    ids = set(order["ids"])
    files = dict.fromkeys(id.split("::")[0] for id in order["ids"])
    sys.path[:] = [path for path in sys.path if path]
    sys.path.append(LIBRARIES)
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": LIBRARIES}
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONSTARTUP"):
        os.environ.pop(name, None)
    import pytest

    class Tell:
        @pytest.hookimpl(trylast=True)
        def pytest_runtest_logreport(self, report):
            phase = report.when if type(report) is pytest.TestReport else "subtest"
            tell(report.nodeid, phase, "xfail" if hasattr(report, "wasxfail") else report.outcome)

        @pytest.hookimpl(trylast=True)
        def pytest_collectreport(self, report):
            if report.failed:
                tell(report.nodeid, "collect", str(report.longrepr)[-500:])

        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self):
            sys.path += [os.path.normpath(os.path.join(ROOT, path)) for path in order["paths"]]

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items):
            items[:] = [item for item in items if item.nodeid in ids]

        @pytest.hookimpl(trylast=True)
        def pytest_collection_finish(self, session):
            if order["package"]:
                __import__(order["package"])
                where = getattr(sys.modules[order["package"]], "__file__", None) or ""
                tell(order["package"], "imported", where)

    arguments = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:junitxml", "-p", "no:pastebin"]
    arguments += ["-c", "/dev/null", f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "--import-mode=append"]
    arguments += ["-q", "--no-header", "--tb=line", "--color=no", "--show-capture=no"]
    arguments += ["--assert=plain"]  # the text of a failure is for nobody, and rewriting is most of a collection
    arguments += ["--maxfail=1"] * order["stop"]
    for name, value in order["options"].items():
        arguments += ["-o", f"{name}={value}"]
    for name in order["plugins"]:
        arguments += ["-p", name]
    os.chdir(ROOT)
    sys.addaudithook(listener({os.path.join(ROOT, path) for path in files}, globals(), tell))
    code = pytest.main([*arguments, *filter(os.path.isfile, files)], plugins=[Tell()])
    tell("", "end", int(code))
    os._exit(0)


if __name__ == "__main__":
    main()
