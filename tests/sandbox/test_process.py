"""A program that stays can be talked to, ends when told, and is known to have ended."""

from __future__ import annotations

import asyncio

import pytest

from stretto.sandbox.box import Box, BoxError
from stretto.sandbox.pool import BoxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVER = "import sys\nfor line in sys.stdin:\n    print(eval(line), flush=True)\nsys.exit(4)"


async def test_questions_and_answers_while_other_commands_run(box: Box):
    process = await box.open(["python3", "-c", SERVER])
    for number in range(5):
        await process.write(b"%d * 2\n" % number)
        assert await process.line() == b"%d\n" % (number * 2)
        assert (await box.python("print(1)")).stdout == b"1\n"
    assert process.exit_code is None
    process.close_stdin()
    assert await process.wait(5) == 4 and await process.line() == b""
    with pytest.raises(BrokenPipeError):
        await process.write(b"1\n")
    await process.close()
    await process.close()


async def test_large_data_both_ways(box: Box):
    process = await box.open(["cat"])
    data = bytes(range(256)) * 4096
    writing = asyncio.create_task(process.write(data))
    got = b""
    while len(got) < len(data):
        got += await process.read()
    await writing
    assert got == data
    await process.close()


async def test_what_it_started_ends_with_it(box: Box):
    process = await box.open(["sh", "-c", "sleep 100 & setsid sleep 100 & echo up; wait"])
    assert await process.line() == b"up\n"
    assert (await box.stats()).processes >= 4
    await process.close()
    assert (await box.stats()).processes == 1 and process.exit_code == 137


async def test_a_program_that_is_not_there_or_never_answers(box: Box):
    process = await box.open(["no-such-program"])
    assert await process.wait(5) == 127 and await process.stderr_text() == b"no-such-program: command not found\n"
    await process.close()
    process = await box.open(["sleep", "100"])
    with pytest.raises(TimeoutError):
        await process.line(seconds=0.1)
    with pytest.raises(TimeoutError):
        await process.write(b"x" * 1_000_000, seconds=0.2)
    await process.close()


async def test_output_streams_can_be_opened_by_name(box: Box):
    process = await box.open(["sh", "-c", "echo one > /dev/stdout; echo two > /dev/stderr"])
    assert await process.wait(5) == 0
    assert (await process.line(), await process.stderr_text()) == (b"one\n", b"two\n")
    await process.close()


async def test_a_box_that_stops_takes_its_residents_along(pool: BoxPool):
    box = await pool.box()
    process = await box.open(["sleep", "100"])
    waiting = asyncio.create_task(process.wait())
    await asyncio.sleep(0.05)
    await box.stop()
    assert await waiting == -1
    with pytest.raises((BoxError, BrokenPipeError)):
        await process.write(b"x")


async def test_many_come_and_go(box: Box):
    before = len(await asyncio.to_thread(lambda: __import__("os").listdir("/proc/self/fd")))
    for _ in range(10):
        process = await box.open(["true"])
        assert await process.wait(5) == 0
        await process.close()
    assert len(await asyncio.to_thread(lambda: __import__("os").listdir("/proc/self/fd"))) <= before
    assert (await box.stats()).processes == 1


async def test_a_command_that_kills_it_leaves_the_box_alive(pool: BoxPool):
    """Both may be collected in one go, and nobody is left then."""
    box = await pool.box()
    for _ in range(12):
        process = await box.open(["sleep", "100"])
        assert (await box.exec(["kill", "-9", str(process.pid)])).exit_code == 0
        assert await process.wait(5) == 137
        await process.close()
    await box.stop()
