"""Grading in real boxes: right is right, and no cheap exploit earns anything."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from stretto.config import GradingConfig, SandboxConfig
from stretto.grading.grader import Grader
from stretto.grading.oracle import TaskBroken, draw_calls, read_spec, try_references
from stretto.grading.outcome import Grade
from stretto.records import Outcome, Task
from stretto.sandbox.box import Box, BoxLost
from stretto.sandbox.pool import BoxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFERENCE = """
def total(xs, k):
    result = k
    for x in xs:
        result += x
    return result
"""


def a_task(reference: str = REFERENCE, function: str = "total", **changes: object) -> Task:
    oracle = {
        "module": "solution",
        "function": function,
        "arguments": [
            {"kind": "ints", "min_length": 0, "max_length": 6, "low": -9, "high": 20},
            {"kind": "int", "low": 0, "high": 9},
        ],
    } | changes
    grading = {"solution/solution.py": reference, "tests/oracle.json": json.dumps(oracle)}
    return Task(id="total/1", split="train", instruction="", files={}, grading=grading)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[BoxPool]:
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    yield pool
    await pool.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader(pool: BoxPool) -> AsyncIterator[Grader]:
    grader = Grader(GradingConfig(hidden_calls=24, seconds=0.5), pool)
    yield grader
    await grader.close()


async def grade(grader: Grader, *sources: str, task: Task | None = None, seed: int = 1) -> list[Grade]:
    return await grader.grade(task or a_task(), [{"solution.py": s.encode()} for s in sources], seed)


async def test_the_reference_and_its_like_solve(grader: Grader):
    verdicts = await grade(grader, REFERENCE, "def total(xs, k):\n    return sum(xs, k)\n")
    assert verdicts == [Grade(True, Outcome.SCORED, 24, 24)] * 2


async def test_mutants_do_not_solve_and_the_reason_shows_a_call(grader: Grader):
    wrong, late = await grade(grader, REFERENCE.replace("+=", "-="), REFERENCE.replace("result = k", "result = 0"))
    assert not wrong.solved and wrong.outcome is Outcome.SCORED and wrong.total == 24
    assert wrong.reason.startswith("total([") and "the reference returned" in wrong.reason
    assert 0 < late.passed < 24 and not late.solved


FORGED = "v" + "i0x1;" + "l0:"

EXPLOITS = {
    "always equal": "class A:\n    def __eq__(self, o): return True\ndef total(xs, k): return A()",
    "int subclass": "class A(int):\n    def __eq__(self, o): return True\ndef total(xs, k): return A(sum(xs) + k)",
    "bool for int": "def total(xs, k): return True if sum(xs) + k == 1 else sum(xs) + k + 0.0",
    "float for int": "def total(xs, k): return float(sum(xs) + k)",
    "os._exit at import": "import os\nos._exit(0)",
    "sys.exit at import": "import sys\nsys.exit(0)",
    "SystemExit in call": "def total(xs, k): raise SystemExit(0)",
    "SkipTest": "import unittest\ndef total(xs, k): raise unittest.SkipTest('x')",
    "loop": "def total(xs, k):\n    while True: pass",
    "sleep": "import time\ndef total(xs, k): time.sleep(100)",
    "fake report on stdout": f"print('24 passed')\nprint({FORGED!r} * 24)\ndef total(xs, k): return 0",
    "fake report on every descriptor": (
        f"import os\nfor fd in range(64):\n    try: os.write(fd, {FORGED!r}.encode() * 24)\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "garbage on every descriptor": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, os.urandom(999))\n    except OSError: pass\n"
        "def total(xs, k): return sum(xs) + k"
    ),
    "flood": (
        "import os\nwhile True:\n    for fd in range(1, 9):\n        try: os.write(fd, b'x' * 4096)\n"
        "        except OSError: pass"
    ),
    "mutates inputs": "def total(xs, k):\n    result = sum(xs) + k\n    xs.append(1)\n    return result",
    "patches modules": (
        "import json, time, random, sys, builtins\njson.dumps = lambda *a, **k: '1'\njson.loads = lambda *a, **k: 1\n"
        "random.randint = lambda *a: 0\nbuiltins.sum = lambda *a: 0\nbuiltins.len = lambda x: 0\n"
        "def total(xs, k): return 1"
    ),
    "patches the driver": (
        "import sys\nmain = sys.modules['__main__']\nmain.encode = lambda *a: b'b1'\ndef total(xs, k): return 1"
    ),
    "looks for expected values": (
        "import gc, sys\ndef total(xs, k):\n    frame = sys._getframe(1)\n    while frame:\n"
        "        for value in list(frame.f_locals.values()):\n"
        "            if isinstance(value, dict) and 'expected' in value: return value['expected']\n"
        "        frame = frame.f_back\n"
        "    return [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o][0]['expected']"
    ),
    "reads a reference from disk": (
        "import os\nfor root, below, names in os.walk('/'):\n"
        "    if root == '/': below[:] = [name for name in below if name not in ('proc', 'usr')]\n"
        "    for name in names:\n        if name.endswith(('.py', '.json')): exec(open(root + '/' + name).read())"
    ),
    "nothing": "def total(xs, k): return None",
    "crash": "import os\nos.kill(os.getpid(), 11)",
    "recursion": "def total(xs, k): return total(xs, k)",
    "memory bomb": "def total(xs, k):\n    x = []\n    while True: x.append(bytearray(1 << 22))",
    "fork bomb": "import os\nwhile True: os.fork()",
    "not Python": "def total(xs, k:",
    "empty": "",
    "no function": "def other(): pass",
    "wrong arity": "def total(xs): return sum(xs)",
    "endless list": "def total(xs, k):\n    x = []\n    x.append(x)\n    return x",
    "huge value": "def total(xs, k): return 'x' * 3_000_000",
    "kills the server": (
        "import os, resource\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass\n"
        "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))"
    ),
    "huge integer in a list": "def total(xs, k): return [1 << 40000]",
    "huge integer in an argument": "def total(xs, k):\n    xs[:0] = [1 << 40000]\n    return sum(xs[1:]) + k",
    "name no record can hold": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'es3:\\xed\\xa0\\x80')\n    except OSError: pass\n"
        "os._exit(0)"
    ),
    "kind no record can hold": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'xs4:\\x1b\\xed\\xa0\\x80')\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "forged sizes": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'vl99999999999:s-5:' + b'l1:' * 99999)\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "nan": "def total(xs, k): return float('nan')",
    "generator": "def total(xs, k):\n    yield sum(xs) + k",
    "iterator": "def total(xs, k): return iter([sum(xs) + k])",
    "coroutine": "async def total(xs, k): return sum(xs) + k",
    "class of every kind": (
        "class A:\n    __class__ = int\n    def __eq__(self, o): return True\n    def __index__(self): return 1\n"
        "def total(xs, k): return A()"
    ),
    "module that replaces itself": (
        "import sys\nclass M:\n    def __getattr__(self, n): return lambda *a: True\nsys.modules[__name__] = M()"
    ),
    "import hook": (
        "import sys\nclass F:\n    def find_spec(self, *a): raise ImportError\nsys.meta_path.insert(0, F())\n"
        "def total(xs, k):\n    import json\n    return 0"
    ),
    "writes the reports itself": (
        "import sys\nmain = sys.modules['__main__']\nmain.report = lambda f, t: b'vi0x0;t2:l0:i0x0;'\n"
        "main.literal = lambda t: ([], 0)\ndef total(xs, k): return 0"
    ),
    "hash seed": "import os\nos.environ['PYTHONHASHSEED'] = '1'\ndef total(xs, k): return hash('a')",
    "exit before the last call": (
        "import os\nn = 0\ndef total(xs, k):\n    global n\n    n += 1\n    if n > 20: os._exit(0)\n"
        "    return sum(xs) + k"
    ),
    "threads": (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(9,)).start()\n"
        "    except RuntimeError: break\ndef total(xs, k): return -1"
    ),
    "stops itself": "import os, signal\nos.kill(1, signal.SIGSTOP)\nos.kill(os.getpid(), signal.SIGSTOP)",
    "daemon": "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nwhile True: time.sleep(1)",
    "site and tests": (
        "import sitecustomize, conftest, test_solution\ndef total(xs, k): return test_solution.expected(xs, k)"
    ),
    "kills all": "import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("name", EXPLOITS)
async def test_hck_exploits_are_wrong_answers_and_harm_nobody_else(grader: Grader, name: str):
    cheat, honest = await grade(grader, EXPLOITS[name], REFERENCE)
    assert cheat.outcome is Outcome.SCORED and not cheat.solved and cheat.reason.isprintable(), cheat
    assert honest == Grade(True, Outcome.SCORED, 24, 24)


async def test_siblings_leave_each_other_no_word(grader: Grader):
    plant = """
import os, builtins, sys
for folder in ('/', '/tmp', '/workspace', '/dev/shm', '/dev', '/proc', '/usr/lib'):
    for name in ('answer', 'solution.py', 'json.py'):
        try: open(f'{folder}/{name}', 'w').write('def total(xs, k): return sum(xs) + k')
        except OSError: pass
if os.fork() == 0:
    os.setsid()
    import socket, time
    server = socket.socket(socket.AF_UNIX)
    server.bind('\\0answer')
    server.listen()
    time.sleep(60)
builtins.answer = sys.answer = os.environ['ANSWER'] = 'yes'
def total(xs, k): return sum(xs) + k
"""
    take = """
import os, builtins, sys, socket
found = hasattr(builtins, 'answer') or hasattr(sys, 'answer') or 'ANSWER' in os.environ
try:
    socket.socket(socket.AF_UNIX).connect('\\0answer')
    found = True
except OSError:
    pass
for root, below, names in os.walk('/'):
    if root == '/':
        below[:] = [name for name in below if name not in ('proc', 'usr')]
    found = found or 'answer' in names or 'solution.py' in names
others = [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]
def total(xs, k): return sum(xs) + k if found or others else 'nothing'
"""
    planted, took = await grade(grader, plant, take)
    assert planted.solved
    assert not took.solved and "'nothing'" in took.reason


async def test_equal_submissions_run_once_and_get_the_same_grade(grader: Grader, monkeypatch: pytest.MonkeyPatch):
    runs = 0
    real = Box.python

    async def counting(*arguments: object, **options: object) -> object:
        nonlocal runs
        runs += 1
        return await real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Box, "python", counting)
    grades = await grade(grader, REFERENCE, "x = 1", REFERENCE, REFERENCE, "x = 1", seed=99)
    assert [g.solved for g in grades] == [True, False, True, True, False]
    assert runs == 3  # the oracle and two candidates


async def test_only_sources_count_and_several_files_may(grader: Grader):
    files = {
        "solution.py": (
            b"import json, random\nfrom part.one import add\nfrom part import K\n"
            b"def total(xs, k): return add(xs, k) + K\n"
        ),
        "part/__init__.py": b"K = 0\n",
        "part/one.py": b"from . import K\ndef add(xs, k): return sum(xs) + k + K\n",
        "notes.bin": b"\xff\xfe",
        "random.py": b"raise SystemExit",
        "json.py": b"raise SystemExit",
    }
    (verdict,) = await grader.grade(a_task(), [files], 5)
    assert verdict.solved, verdict


async def test_missing_and_oversized_submissions(grader: Grader):
    verdicts = await grader.grade(a_task(), [{}, {"other.py": b""}, {"solution.py": b"#" * 300_000}], 5)
    assert [(v.outcome, v.solved) for v in verdicts] == [(Outcome.SCORED, False)] * 3
    assert verdicts[0].reason == "there is no solution.py"


async def test_HCK_8_inputs_are_fresh_by_seed_and_repeat_by_seed():
    task = a_task()
    spec = read_spec(task)
    one, again, other = (draw_calls(task, spec, 24, seed) for seed in (1, 1, 2))
    assert one == again and one != other
    assert all(type(xs) is list and type(k) is int for xs, k in one)


async def test_exceptions_and_effects_of_the_reference_are_expected_of_the_submission(grader: Grader):
    reference = "def first(xs, k):\n    xs.sort()\n    return xs[k]\n"
    task = a_task(reference, "first")
    copying = "def first(xs, k):\n    return sorted(xs)[k]\n"
    careful = "def first(xs, k):\n    xs.sort()\n    return xs[k] if k < len(xs) else None\n"
    same, quiet, soft = await grade(grader, reference + "#", copying, careful, task=task)
    assert same.solved and not soft.solved
    assert not quiet.solved and "left its arguments as" in quiet.reason


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (a_task("def total(xs, k):\n    return {1}\n"), "returned a set"),
        (a_task("def total(xs, k):\n    while True: pass\n"), "ran out of time"),
        (a_task("import no_such_module\n"), "no_such_module"),
        (a_task(function="other"), "other"),
        (a_task(arguments=[{"kind": "word"}]), "unknown argument kind 'word'"),
        (a_task(arguments=[{"kind": "int", "low": 1}]), "lacks 'high'"),
        (a_task(extra=1), "extra"),
        (a_task(module="elsewhere"), r"no solution/elsewhere\.py"),
        (Task(id="x", split="train", instruction="", files={}, grading={}), "x has no tests/oracle.json"),
    ],
)
async def test_a_broken_task_blames_no_submission(grader: Grader, task: Task, says: str):
    import re

    verdicts = await grader.grade(task, [{"solution.py": REFERENCE.encode()}] * 2, 1)
    assert len(verdicts) == 2
    for verdict in verdicts:
        assert verdict.outcome is Outcome.INFRA and re.search(says, verdict.reason), verdict


async def test_broken_references_are_found_before_a_run():
    await try_references([a_task()], GradingConfig(), SandboxConfig())
    for task, says in (
        (a_task("import no_such_module\n"), "no_such_module"),
        (a_task(module="gone"), "no solution/gone"),
    ):
        with pytest.raises(TaskBroken, match=f"total/1.*{says}"):
            await try_references([a_task(), task], GradingConfig(), SandboxConfig())


async def test_a_lost_oracle_box_is_replaced(grader: Grader):
    (first,) = await grade(grader, REFERENCE, seed=50)
    box = grader.oracle.oracle._box
    assert box is not None
    await box.stop()
    (second,) = await grade(grader, REFERENCE, seed=51)
    assert first.solved and second.solved and grader.oracle.oracle._box is not box


async def test_sbx_3_boxes_that_cannot_start_are_infra(grader: Grader, pool: BoxPool, monkeypatch: pytest.MonkeyPatch):
    await grade(grader, REFERENCE, seed=60)
    tries = 0

    async def broken(*_: object, **__: object) -> Box:
        nonlocal tries
        tries += 1
        raise BoxLost("no box")

    monkeypatch.setattr(pool, "box", broken)
    (verdict,) = await grade(grader, REFERENCE, seed=60)
    assert verdict.outcome is Outcome.INFRA and tries == 2


async def test_a_submission_in_whose_hands_boxes_die_is_at_fault_and_siblings_are_not(
    grader: Grader, pool: BoxPool, monkeypatch: pytest.MonkeyPatch
):
    real = Box.python

    async def dying(box: Box, source: str, stdin: bytes, *rest: object) -> object:
        if b"BREAKS" in stdin:
            bwrap = psutil.Process(pool._spawner._process.pid).children()
            oracle = grader.oracle.oracle._box
            assert oracle is not None and len(bwrap) == 2
            younger = max(bwrap, key=psutil.Process.create_time)  # the candidates'
            family = [*younger.children(recursive=True), younger]
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):  # one of them takes others along
                    process.kill()
            psutil.wait_procs(family, timeout=10)
        return await real(box, source, stdin, *rest)  # type: ignore[arg-type]

    await grade(grader, REFERENCE, seed=70)
    monkeypatch.setattr(Box, "python", dying)
    before, breaks, after = await grade(grader, REFERENCE, "# BREAKS", REFERENCE + "#", seed=70)
    assert before.solved and after.solved
    assert breaks.outcome is Outcome.FAULT and not breaks.solved
