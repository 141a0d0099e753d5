"""What lets another runner of Harbor tasks run an exported `pytest` task: a Dockerfile and `tests/test.sh`.

The script is one plain run of the required tests: each must be seen and passed, and none skipped. It has no twins, no
second run and no oracle, so that code which forges reports inside of pytest is paid: weaker than Stretto's own grading,
which does not read it. Oracle tasks are not exported like this: their guarantee is that no expected value and no
comparison is in reach of the code under test, which a script in its box can't give.
"""

from __future__ import annotations

from stretto.records import Task
from stretto.tasks.header import WORKSPACE

TEST = "tests/test.sh"
MARK = "#!/bin/bash\n# Written by Stretto for other runners of Harbor tasks; Stretto itself grades by pytest.json.\n"
SCRIPT = (
    MARK
    + """# Weaker than that: one run, whose process the code under test shares.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /app || exit 1
python3 -I - <<'END'
import glob, json, os, shutil, sys

spec = json.load(open("/tests/pytest.json"))
for pattern in spec.get("remove", []):
    for path in glob.glob(os.path.join("/app", pattern), recursive=True):
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
if os.path.isdir("/tests/tree"):
    shutil.copytree("/tests/tree", "/app", dirs_exist_ok=True)
END
python3 - <<'END'
import json, os, sys

sys.path[:] = [path for path in sys.path if path]
import pytest

spec = json.load(open("/tests/pytest.json"))
required = {*spec["fail_to_pass"], *spec.get("pass_to_pass", [])}


class Seen:
    passed, others = set(), set()

    def pytest_runtest_logreport(self, report):
        good = report.outcome == "passed" and not hasattr(report, "wasxfail")
        if not good:
            self.others.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)


sys.path += [os.path.normpath(os.path.join("/app", path)) for path in spec.get("paths", ["."])]
options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=/app", "--confcutdir=/app"]
options += ["--import-mode=append"]
for name, value in spec.get("options", {}).items():
    options += ["-o", f"{name}={value}"]
for name in spec.get("plugins", []):
    options += ["-p", name]
seen = Seen()
pytest.main([*options, *sorted({id.partition("::")[0] for id in required})], plugins=[seen])
sys.exit(75 if required <= seen.passed - seen.others else 1)
END
if [ $? -eq 75 ]; then
    echo 1 > /logs/verifier/reward.txt
fi
"""
)


def files(task: Task) -> dict[str, str]:
    """Path in the task's folder -> text; nothing for modes other than `pytest`."""
    if task.mode != "pytest" or TEST in task.grading:
        return {}
    libraries = " ".join(dict.fromkeys(["pytest", *task.libraries]))
    source = f"{WORKSPACE}/" if task.environment else "."
    docker = f"FROM python:3.11-slim\nRUN pip install --no-cache-dir {libraries}\nWORKDIR /app\nCOPY {source} /app/\n"
    return {
        TEST: SCRIPT,
        "environment/Dockerfile": docker,
        "environment/.dockerignore": "Dockerfile\n.dockerignore\n",
    }


def ours(path: str, text: str) -> bool:
    """Whether this file of `tests/` was written here, and is none of the task's own."""
    return path == TEST and text.startswith(MARK)
