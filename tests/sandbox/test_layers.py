"""Snapshots and forks of a workspace: each box sees its own, at any turn, however deep the stack."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from stretto.sandbox.box import Box, BoxError
from stretto.sandbox.layers import STACK
from stretto.sandbox.pool import BoxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def sh(box: Box, script: str) -> str:
    result = await box.exec(["sh", "-ec", script])
    assert result.exit_code == 0, result
    return result.stdout.decode()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name in ("a.py", "b.py", "pack/one.py", "pack/two.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "run.sh").write_text("echo ran\n")
    (tmp_path / "run.sh").chmod(0o755)
    return tmp_path


async def changes(box: Box, path: str) -> None:
    """Somebody in the box goes on writing."""
    one = await box.read(path)
    async with asyncio.timeout(10):
        while await box.read(path) == one:
            await asyncio.sleep(0.02)


def layers_of(pool: BoxPool) -> list[Path]:
    return list((pool.carrier.folder / "layers").iterdir())


async def test_a_base_is_shared_and_stays_as_it_is(pool: BoxPool, base: Path):
    boxes = [await pool.box({"mine": str(number)}, base=base) for number in range(3)]
    for number, box in enumerate(boxes):
        await sh(box, f"echo {number} >> a.py; rm b.py; mv pack moved; ./run.sh")
    for number, box in enumerate(boxes):
        files = await box.files()
        assert files["a.py"] == f"a.py\n{number}\n".encode() and files["mine"] == b"%d" % number
        assert set(files) == {"a.py", "mine", "run.sh", "moved/one.py", "moved/two.py"}
    assert len(layers_of(pool)) == 1
    assert (base / "a.py").read_text() == "a.py\n" and (base / "b.py").exists()
    await asyncio.gather(*(box.stop() for box in boxes))


async def test_a_fork_begins_where_its_origin_is_and_they_part(pool: BoxPool, base: Path):
    origin = await pool.box(base=base)
    await sh(origin, "echo 1 > new; rm -r pack; mkdir pack; echo x > pack/three.py; chmod 600 a.py; ln -s a.py link")
    forks = await origin.fork(4)
    await sh(origin, "echo later > new")
    for number, fork in enumerate(forks):
        assert await sh(fork, "ls pack; cat new; readlink link; stat -c %a a.py") == "three.py\n1\na.py\n600\n"
        await sh(fork, f"echo {number} > own; rm -f b.py")
    assert [await fork.read("own") for fork in forks] == [b"%d\n" % number for number in range(4)]
    assert await origin.read("b.py") == b"b.py\n"
    await origin.stop()
    assert await forks[0].read("new") == b"1\n"
    await asyncio.gather(*(fork.stop() for fork in forks))
    assert len(layers_of(pool)) <= 2  # bases; the snapshot went with its last box


async def test_a_snapshot_without_a_base_holds_everything(pool: BoxPool):
    origin = await pool.box({"a/b.txt": "1", "c": "2"})
    snapshot = await origin.snapshot()
    await origin.stop()
    for _ in range(2):
        box = await pool.box({"d": "3"}, base=snapshot)
        assert await box.files() == {"a/b.txt": b"1", "c": b"2", "d": b"3"}
        await box.stop()
    await snapshot.close()
    await snapshot.close()
    with pytest.raises(ValueError, match="closed"):
        await pool.box(base=snapshot)


async def test_a_fork_of_a_fork_at_every_turn_is_right_and_the_stack_stays_low(pool: BoxPool, base: Path):
    """Deletions of a file that a lower layer has must outlive the merging of layers."""
    box = await pool.box(base=base)
    for turn in range(STACK + 4):
        await sh(box, f"echo {turn} > turn{turn}; echo {turn} >> a.py; rm -f turn{turn - 3}")
        if turn == 2:
            await sh(box, "rm b.py; rm -r pack")
        if turn == STACK + 1:
            await sh(box, "mkdir pack; echo back > pack/one.py")
        (fork,) = await box.fork(1)
        await box.stop()
        box = fork
        assert len(box.keeper.layers) <= STACK + 1  # pyright: ignore[reportAttributeAccessIssue]
    last = STACK + 3
    files = await box.files()
    assert files["a.py"] == b"a.py\n" + b"".join(b"%d\n" % turn for turn in range(last + 1))
    assert set(files) == {"a.py", "run.sh", "pack/one.py", *(f"turn{turn}" for turn in (last - 2, last - 1, last))}
    await box.stop()


async def test_limits_hold_on_a_base(pool: BoxPool, base: Path):
    box = await pool.box(base=base)
    script = """
made = 0
try:
    while made < 100_000:
        open(str(made), "w")
        made += 1
except OSError as error:
    print(made, error.errno)
"""
    made, number = (await box.python(script, seconds=20)).stdout.split()
    assert pool.limits.inodes // 2 < int(made) <= pool.limits.inodes and int(number) == errno.ENOSPC
    await sh(box, "rm -f [0-9]*")
    result = await box.exec(["sh", "-c", "cat /dev/zero > fill; stat -c %s fill"])
    assert int(result.stdout) <= pool.limits.disk and b"No space" in result.stderr
    with pytest.raises(BoxError, match="no space"):
        await box.write("more", b"x" * 100_000)
    await box.stop()


async def test_a_snapshot_is_taken_while_jobs_run_and_they_go_on(pool: BoxPool):
    box = await pool.box()
    shell = await box.shell()
    await shell.run("i=0; while :; do i=$((i+1)); echo $i > a.tmp; mv a.tmp a; cp a b; sleep 0.001; done &")
    for _ in range(3):
        snapshot = await box.snapshot()
        copy = await pool.box(base=snapshot)
        files = await copy.files()
        assert int(files.get("a", b"0") or 0) - int(files.get("b", b"0") or 0) in (0, 1, 2)
        await copy.stop()
        await snapshot.close()
    await changes(box, "a")
    await box.stop()


async def test_a_frozen_box_stands_still(pool: BoxPool):
    box = await pool.box()
    shell = await box.shell()
    await shell.run("sleep 100 & (while :; do date +%N > new; mv new now; done) &")
    await asyncio.sleep(0.1)
    await box.freeze()
    with pytest.raises(RuntimeError, match="thaw"):
        await box.read("now")
    before = await asyncio.to_thread(cpu_of, pool)
    await asyncio.sleep(0.2)
    assert await asyncio.to_thread(cpu_of, pool) - before < 0.05
    await box.thaw()
    await changes(box, "now")
    assert (await shell.run("jobs -p | wc -l")).stdout == b"2\n"
    await box.stop()


def cpu_of(pool: BoxPool) -> float:
    """Of everything below the spawners."""
    import psutil

    spent = 0.0
    for pid in pool.carrier.spawner_pids():
        for child in psutil.Process(pid).children(recursive=True):
            times = child.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
    return spent


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one uid to give")
async def test_a_snapshot_can_be_the_base_of_another_identity(pool: BoxPool, base: Path):
    origin = await pool.box(base=base)
    await sh(origin, "echo 1 > new; rm b.py; chmod 600 new")
    snapshot = await origin.snapshot()
    other = await pool.box(base=snapshot, identity=5)
    assert await sh(other, "cat new; ls") == "1\na.py\nnew\npack\nrun.sh\n"
    await sh(other, "echo 2 >> new; echo 3 >> a.py")
    assert await origin.read("new") == b"1\n"
    await asyncio.gather(origin.stop(), other.stop())
    await snapshot.close()


async def test_a_sealed_box_can_stand_on_a_base(pool: BoxPool, base: Path):
    origin = await pool.box(base=base)
    await sh(origin, "echo 1 > new")
    snapshot = await origin.snapshot()
    for under in (base, snapshot):
        box = await pool.box(sealed=True, base=under)
        assert await box.read("a.py") == b"a.py\n"
        with pytest.raises(BoxError, match="read-only"):
            await box.write("a.py", b"")
        await box.stop()
    await origin.stop()
    await snapshot.close()


async def test_what_is_not_there_is_a_sentence(pool: BoxPool, tmp_path: Path):
    with pytest.raises(ValueError, match="no-such-folder can't be the base"):
        await pool.box(base=tmp_path / "no-such-folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="can't be the base"):
        await pool.box(base=tmp_path / "file")
    with pytest.raises(ValueError, match="no-such-library is not installed"):
        await pool.box(libraries=["no-such-library"])
    with pytest.raises(ValueError, match="not the name of a Python distribution"):
        await pool.box(libraries=["../etc"])
    with pytest.raises(ValueError, match="identity"):
        await pool.box(identity=64)


async def test_libraries_are_there_with_what_they_require(pool: BoxPool):
    box = await pool.box({"test_it.py": "def test_it():\n    assert 1 + 1 == 2\n"}, libraries=["pytest"])
    source = (
        "import sys; sys.path.append('/opt/libraries'); import pytest; "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    )
    result = await box.python(source, seconds=20)
    assert result.exit_code == 0 and b"1 passed" in result.stdout, result
    assert (await box.exec(["touch", "/opt/libraries/x"])).exit_code == 1
    await box.stop()


async def test_other_limits_than_the_pools(pool: BoxPool):
    from dataclasses import replace

    box = await pool.box(limits=replace(pool.limits, disk=64 << 20, processes=4))
    assert await sh(box, "head -c 20000000 /dev/zero > big; stat -c %s big") == "20000000\n"
    many = await box.python("import os, time\nfor _ in range(9):\n    if os.fork() == 0: time.sleep(9)")
    assert b"BlockingIOError" in many.stderr
    await box.stop()
