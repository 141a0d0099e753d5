"""Commands in a box behave as they would on a command line, and end in time with what they wrote."""

from __future__ import annotations

import pytest

from stretto.sandbox.box import Box
from stretto.sandbox.pool import BoxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("import os; os._exit(7)", 7),
        ("1 / 0", 1),
        ("def", 1),
        ("import os; os.kill(os.getpid(), 11)", 139),
        ("import sys; sys.excepthook = None; 1 / 0", 126),
    ],
)
async def test_exit_code(box: Box, source: str, code: int):
    result = await box.python(source)
    assert result.exit_code == code
    assert result.signal == (11 if code == 139 else 0)
    assert not result.timed_out and not result.oom


async def test_source_runs_as_main_in_the_workspace(pool: BoxPool):
    box = await pool.box({"solution.py": "def total(xs):\n    return sum(xs)\n", "pack/part.py": "X = 5\n"})
    result = await box.python(
        "import os, sys\nfrom solution import total\nfrom pack.part import X\n"
        "print(__name__, os.getcwd(), total([1, 2]), X, sys.argv, sys.stdin.read())",
        stdin=b"hello",
    )
    assert result.stdout == b"__main__ /workspace 3 5 ['-c'] hello\n", result.stderr
    assert (await box.exec(["ls"])).stdout == b"pack\nsolution.py\n"
    await box.stop()


async def test_traceback_shows_the_policy_its_own_lines_only(box: Box):
    await box.write("bad.py", b"def f():\n    return 1 / 0\n")
    text = (await box.python("import bad\nbad.f()")).stderr.decode()
    assert text.startswith('Traceback (most recent call last):\n  File "<string>", line 2, in <module>')
    assert "return 1 / 0" in text and text.endswith("ZeroDivisionError: division by zero\n")
    assert "inside" not in text


async def test_exit_handlers_threads_and_buffers_finish(box: Box):
    source = (
        "import atexit, threading, time, sys\n"
        "atexit.register(print, 'bye')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "print('main'); print('err', file=sys.stderr)"
    )
    result = await box.python(source)
    assert (result.stdout, result.stderr) == (b"main\nthread\nbye\n", b"err\n")


async def test_each_command_starts_afresh(box: Box):
    await box.python("import json, sys, os; json.x = 1; sys.path.append('/x'); os.environ['A'] = 'b'; X = 1")
    check = "import json, sys, os; print(hasattr(json, 'x'), '/x' in sys.path, 'A' in os.environ, 'X' in globals())"
    assert (await box.python(check)).stdout == b"False False False False\n"


async def test_order_of_sets_repeats_over_boxes(pool: BoxPool):
    outputs = set()
    for _ in range(3):
        box = await pool.box()
        outputs.add((await box.python("print({'a', 'b', 'c', 'd', 'e'})")).stdout)
        await box.stop()
    assert len(outputs) == 1


async def test_time_out_keeps_what_was_written(box: Box):
    result = await box.python("print('early', flush=True)\nwhile True: pass", seconds=0.2)
    assert result.timed_out and result.signal == 9 and result.exit_code == 137
    assert result.stdout == b"early\n"
    assert (await box.python("print(1)")).stdout == b"1\n"


async def test_sleeping_does_not_extend_the_time(box: Box):
    result = await box.python("import time; time.sleep(60)", seconds=0.2)
    assert result.timed_out and result.seconds < 1


async def test_long_output_is_cut_and_endless_output_ends_the_command(box: Box):
    result = await box.python("import sys; sys.stdout.write('x' * 100_000); sys.stderr.write('e' * 10)")
    assert result.exit_code == 0 and result.truncated
    assert 32700 < len(result.stdout) <= 32768 and result.stderr == b"e" * 10
    result = await box.python("while True: print('y' * 1000)", seconds=20)
    assert result.truncated and result.signal == 9 and not result.timed_out and result.seconds < 10


async def test_large_stdin_arrives_or_is_refused_by_the_reader(box: Box):
    data = bytes(range(256)) * 8192
    result = await box.python("import sys; print(len(sys.stdin.buffer.read()))", stdin=data)
    assert result.stdout == b"2097152\n"
    assert (await box.python("print('never reads')", stdin=data)).stdout == b"never reads\n"


async def test_programs(box: Box):
    result = await box.exec(["sh", "-c", "cat; echo err >&2; exit 4"], stdin=b"in")
    assert (result.exit_code, result.stdout, result.stderr) == (4, b"in", b"err\n")
    result = await box.exec(["no-such-program"])
    assert (result.exit_code, result.stderr) == (127, b"no-such-program: command not found\n")
