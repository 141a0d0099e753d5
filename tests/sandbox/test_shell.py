"""A resident shell is like a terminal: state lasts, jobs live on, commands end in time, output is cut in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import time

import psutil
import pytest

from stretto.config import SandboxConfig
from stretto.sandbox.box import Box, BoxBroken, BoxError, BoxLost
from stretto.sandbox.pool import BoxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_state_lasts(box: Box):
    shell = await box.shell()
    await shell.run("cd /tmp; X=5; export Y=6; f() { echo f $1; }; alias ll='echo aliased'; set -o pipefail")
    result = await shell.run("pwd; echo $X $Y; f 1; ll; false | true")
    assert (result.stdout, result.exit_code) == (b"/tmp\n5 6\nf 1\naliased\n", 1)
    assert (await shell.run("echo $?")).stdout == b"1\n" and shell.cwd == "/tmp"
    assert (await shell.run("cat")).stdout == b""  # stdin is empty, not ours
    assert (await shell.run("python3 -c 'import os; print(os.environ[\"Y\"])'")).stdout == b"6\n"


async def test_both_outputs_are_one_stream_in_order(box: Box):
    shell = await box.shell()
    result = await shell.run("echo 1; echo 2 >&2; echo 3; nosuch; echo 4 > /dev/stderr")
    assert result.stdout == b"1\n2\n3\nbash: line 1: nosuch: command not found\n4\n" and result.stderr == b""


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("kill -9 $$", 137), ("set -e; false", 1), ("exec true", 0)],
)
async def test_a_shell_that_ends_begins_anew(box: Box, command: str, code: int):
    shell = await box.shell()
    await shell.run("cd /tmp; X=1")
    result = await shell.run(command)
    assert (result.exit_code, result.restarted, result.timed_out) == (code, True, False)
    assert (await shell.run("echo $X; pwd")).stdout == b"\n/workspace\n"


@pytest.mark.parametrize("command", ["if", "echo 'open", "cat <<EOF\nx", "(", "echo $(", "}"])
async def test_a_broken_command_is_an_error_and_the_shell_goes_on(box: Box, command: str):
    shell = await box.shell()
    await shell.run("X=1")
    result = await shell.run(command)
    assert result.exit_code in (0, 1, 2) and not result.timed_out and not result.restarted
    assert (await shell.run("echo $X")).stdout == b"1\n"


async def test_long_and_many_lined_commands(box: Box):
    shell = await box.shell()
    text = "".join(f"line {number}\n" for number in range(20_000))
    result = await shell.run(f"cat > big <<'END'\n{text}END\nwc -l < big", seconds=20)
    assert result.stdout == b"20000\n"
    with pytest.raises(BoxError, match="NUL"):
        await shell.run("echo \0")


async def test_background_jobs_live_on_over_commands_of_every_kind(box: Box):
    shell = await box.shell()
    await shell.run("(while :; do date +%N > beat; sleep 0.01; done) & echo $! > pid")
    await box.python("import os\nif os.fork() == 0:\n    import time; time.sleep(60)")
    await box.exec(["sh", "-c", "setsid sleep 60 & echo"])
    assert (await shell.run("sleep 30", seconds=0.2)).timed_out
    assert (await shell.run("kill -0 $(cat pid); echo $?; jobs -p | wc -l")).stdout.endswith(b"0\n1\n")
    one = await box.read("beat")
    async with asyncio.timeout(10):
        while await box.read("beat") == one:
            await asyncio.sleep(0.02)
    names = (await box.exec(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout.split()
    assert names.count(b"python3") <= 1 and names.count(b"sleep") <= 1  # the job's own
    await shell.close()
    assert (await box.stats()).processes == 1


async def test_output_of_jobs_shows_with_the_next_command(box: Box):
    shell = await box.shell()
    await shell.run("(sleep 0.1; echo from the job) &")
    async with asyncio.timeout(10):
        while b"job" not in shell._kept.data:
            await asyncio.sleep(0.02)
    assert (await shell.run("echo now")).stdout == b"from the job\nnow\n"


async def test_time_out_ends_the_command_and_keeps_the_state(box: Box):
    shell = await box.shell()
    await shell.run("cd /tmp; X=1")
    result = await shell.run("echo early; sleep 60", seconds=0.2)
    assert result.timed_out and result.exit_code == 137 and result.stdout.startswith(b"early\n") and result.seconds < 2
    assert not result.restarted
    assert (await shell.run("echo $X; pwd")).stdout == b"1\n/tmp\n"
    result = await shell.run("while :; do :; done", seconds=0.2)
    assert result.timed_out and result.restarted
    assert (await shell.run("echo [$X]; pwd")).stdout == b"[]\n/tmp\n"


async def test_a_program_that_ignores_signals_and_daemons_end_with_the_time(box: Box):
    shell = await box.shell()
    script = "trap '' INT TERM HUP; setsid sh -c 'trap \"\" TERM; sleep 61 & sleep 62'"
    assert (await shell.run(script, seconds=0.3)).timed_out
    await shell.run("true")
    assert (await box.stats()).processes == 2  # the server and bash


async def test_long_output_keeps_both_ends_and_a_flood_ends(box: Box):
    shell = await box.shell()
    result = await shell.run("seq 1 20000", keep=1000)
    assert len(result.stdout) <= 1000 and result.truncated
    assert result.stdout.startswith(b"1\n2\n") and result.stdout.endswith(b"\n20000\n")
    assert b" bytes left out ...]\n" in result.stdout
    begun = time.monotonic()
    result = await shell.run("yes", seconds=30, keep=1000)
    assert result.truncated and not result.timed_out and time.monotonic() - begun < 20
    assert (await shell.run("printf '\\377\\000x'")).stdout.endswith(b"\xff\x00x")


async def test_a_command_can_not_answer_for_bash(box: Box):
    """It has no descriptor of ours; and when it takes bash's own, it fools nobody but itself."""
    shell = await box.shell()
    forge = "for n in 0 1 2 3 4 5 6 7 8 9 250 251; do printf '9 0 /x\\0' >&$n; done 2>/dev/null; ls /proc/self/fd"
    result = await shell.run(forge)
    assert b"250" not in result.stdout and b"251" not in result.stdout
    result = await shell.run("printf '99 0 /x\\0' > /proc/$$/fd/251; sleep 0.1; exit 7")
    assert result.exit_code == 7
    assert (await shell.run("echo fine")).stdout == b"fine\n"


async def test_no_answer_is_ever_missed(box: Box):
    """An answer that comes while nobody looks must not wait for the time-out."""
    shell = await box.shell()
    begun = time.monotonic()
    for _ in range(150):
        assert (await shell.run("/usr/bin/env echo x", seconds=100)).stdout == b"x\n"
    assert time.monotonic() - begun < 60


async def test_what_a_job_starts_is_not_the_commands(box: Box):
    """A server in the background may fork while a command runs out of time."""
    shell = await box.shell()
    await shell.run("(while :; do sleep 0.3; echo died=$?; done) > log 2>&1 &")
    assert (await shell.run("sleep 30", seconds=0.4)).timed_out
    async with asyncio.timeout(10):
        while b"died=0" not in await box.read("log"):
            await asyncio.sleep(0.02)
    assert b"died=1" not in await box.read("log")


async def test_a_command_given_up_does_not_answer_for_the_next(box: Box):
    shell = await box.shell()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await shell.run("sleep 1; echo old", seconds=60)
    assert (await shell.run("echo new")).stdout == b"new\n"


async def test_SBX_11_a_box_that_dies_while_a_shell_lives_in_it_is_the_policys_doing():
    """Else a background job could take the box down between two commands, and the rollout out of its batch."""
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    boxes = [await pool.box({"a": "1"}) for _ in range(2)]
    shell = await boxes[0].shell()
    await shell.run("sleep 100 &")
    family = psutil.Process(pool._spawner._process.pid).children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # one of them takes others along
            process.kill()
    psutil.wait_procs(family, timeout=10)
    with pytest.raises(BoxBroken, match="while a command ran in it"):
        await boxes[0].read("a")
    with pytest.raises(BoxLost):
        await boxes[1].read("a")
    await asyncio.gather(*(box.stop() for box in boxes))
    await pool.close()


async def test_two_shells_and_a_stopped_box(pool: BoxPool):
    box = await pool.box()
    one, two = await box.shell(), await box.shell()
    await one.run("X=1; sleep 100 &")
    assert (await two.run("echo [$X]")).stdout == b"[]\n"
    both = await asyncio.gather(one.run("sleep 0.1; echo 1"), two.run("sleep 0.1; echo 2"))
    assert [result.stdout for result in both] == [b"1\n", b"2\n"]
    await two.close()
    assert (await one.run("jobs -p | wc -l")).stdout == b"1\n"
    waiting = asyncio.create_task(one.run("sleep 60", seconds=60))
    await asyncio.sleep(0.1)
    await box.stop()
    with pytest.raises((BoxLost, BoxError)):
        await waiting
    with pytest.raises(BoxLost):
        await one.run("true")
