"""Every backend gives the same boxes: what a caller sees is the same, and what is missing is said beforehand.

gVisor and SWE-ReX are tried for real where `runsc` and the package are installed. Docker and Podman can't run here:
their command line is played by a program that checks what it is told, and then puts the box into bubblewrap.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stretto.config import ConfigError, SandboxConfig, parse
from stretto.launch.local import free_port
from stretto.sandbox.backends import TABLE, demand
from stretto.sandbox.box import Box, BoxError, BoxLost
from stretto.sandbox.check import SandboxUnavailable, find_bwrap
from stretto.sandbox.pool import BoxPool

CLI = """#!{python}
import os, shutil, sys, tempfile
told = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(" ".join(told[:1] + [word for word in told if word.startswith("box-")]) + "\\n")
if told[0] == "rm":
    sys.exit(0)
flags, at = {{}}, 1
while told[at].startswith("--"):
    name = told[at]
    alone = name in ("--rm", "--interactive", "--read-only")
    flags.setdefault(name, []).append("" if alone else told[at + 1])
    at += 1 if alone else 2
image, command = told[at], [flags["--entrypoint"][0], *told[at + 1 :]]
if image == "broken":
    sys.exit("no such image: broken")
assert flags["--network"] == ["none"] and flags["--cap-drop"] == ["ALL"] and "--read-only" in flags
assert flags["--user"] == ["1000:1000"] and flags["--security-opt"] == ["no-new-privileges"]
assert int(flags["--memory"][0]) == int(flags["--memory-swap"][0]) == 128 << 20 and flags["--pids-limit"] == ["33"]
words = "--unshare-all --die-with-parent --as-pid-1 --new-session --uid 1000 --gid 1000 --clearenv --proc /proc".split()
words += "--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64".split()
words += ["--dev", "/dev"]
for place in flags["--tmpfs"]:
    path, _, options = place.partition(":")
    size = dict(word.partition("=")[::2] for word in options.split(","))["size"]
    words += ["--size", size, "--tmpfs", path]
    words += ["--remount-ro", path] if options.startswith("ro") else []
for setting in flags["--env"]:
    words += ["--setenv", *setting.split("=", 1)]
os.execv({bwrap!r}, [{bwrap!r}, *words, "--remount-ro", "/", "--", *command])
"""


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `docker` and `podman`."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("docker", "podman"):
        program = folder / name
        program.write_text(CLI.format(python=sys.executable, bwrap=str(find_bwrap()), log=str(folder / "log")))
        program.chmod(0o755)
    return folder


def wanted(backend: str) -> SandboxConfig:
    image = "python:3.12" if backend in ("docker", "podman") else ""
    return SandboxConfig(backend=backend, image=image, warm=0, seconds=10.0)  # pyright: ignore[reportArgumentType]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["bubblewrap", "docker", "podman", "gvisor", "swerex"]
)
async def pool(request: pytest.FixtureRequest, cli: Path) -> AsyncIterator[BoxPool]:
    backend, server = request.param, None
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{cli}:{path}"
    if backend == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("no runsc here")
    config = wanted(backend) if backend != "swerex" else None
    if config is None:
        if importlib.util.find_spec("swerex") is None:
            pytest.skip("swe-rex is not installed")
        port = free_port("127.0.0.1", 0)
        program = [
            sys.executable,
            "-m",
            "swerex.server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--auth-token",
            "k",
        ]
        server = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.environ["SWEREX_TOKEN"] = "k"
        config = SandboxConfig(backend="swerex", server=f"http://127.0.0.1:{port}", warm=0, seconds=10.0)
    pool = BoxPool(config)
    for _ in range(100):
        try:
            await pool.start()
            break
        except SandboxUnavailable:
            if server is None:
                raise
            await asyncio.sleep(0.1)  # it starts
    yield pool
    await pool.close()
    os.environ["PATH"] = path
    if server:
        server.kill()
        server.wait()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_box_is_a_box(pool: BoxPool, tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.sh").write_text("#!/bin/sh\necho ran $1\n")
    (tmp_path / "sub" / "run.sh").chmod(0o755)
    box = await pool.box({"a.py": "def f():\n    return 7\n"}, base=tmp_path)
    result = await box.python("import a, sys; print(a.f(), sys.stdin.read()); sys.exit(3)", stdin=b"in")
    assert (result.stdout, result.exit_code, result.stderr) == (b"7 in\n", 3, b"")
    result = await box.exec(["./sub/run.sh", "1"])
    assert (result.stdout, result.exit_code) == (b"ran 1\n", 0), result
    assert (await box.exec(["no-such-program"])).exit_code == 127
    await box.write("deep/er/b.bin", bytes(range(256)))
    assert await box.read("deep/er/b.bin") == bytes(range(256))
    assert set(await box.files()) == {"a.py", "deep/er/b.bin", "sub/run.sh"}
    assert [entry.path for entry in await box.listing("sub")] == ["run.sh"]
    with pytest.raises(BoxError, match="no such file"):
        await box.read("missing")
    await box.exec(["ln", "-s", "/etc/passwd", "link"])
    with pytest.raises(BoxError, match="symbolic link"):
        await box.read("link")
    await ends(pool, box)


async def ends(pool: BoxPool, box: Box) -> None:
    await box.stop()
    await box.stop()
    with pytest.raises(BoxLost):
        await box.python("pass")
    assert not pool.carrier.alive


@pytest.mark.asyncio(loop_scope="module")
async def test_commands_end_in_time_and_floods_are_cut(pool: BoxPool):
    box = await pool.box()
    result = await box.python("print('early', flush=True)\nimport time; time.sleep(60)", seconds=1.0)
    assert result.timed_out and result.exit_code == 137 and result.stdout == b"early\n"
    result = await box.python("for n in range(3000): print(n)", keep=1000)
    assert result.truncated and result.stdout.startswith(b"0\n1\n") and result.stdout.endswith(b"\n2999\n")
    result = await box.python("while True: print('y' * 1000)", seconds=20, keep=4096)
    assert result.truncated and result.exit_code and not result.timed_out and len(result.stdout) <= 4096
    await ends(pool, box)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_it_can_not_do_is_said(pool: BoxPool):
    box = await pool.box()
    can = pool.capabilities
    for name, ask in (("fork", lambda: box.fork(1)), ("freeze", box.freeze), ("shell", box.shell)):
        if can.missing(name):
            with pytest.raises(ValueError, match=f"has no {name}"):
                await ask()
    if not can.libraries:
        with pytest.raises(ValueError, match="libraries"):
            await pool.box(libraries=["pytest"])
    await ends(pool, box)


async def test_an_engine_that_fails_is_ours(cli: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{cli}:{os.environ['PATH']}")
    pool = BoxPool(SandboxConfig(backend="docker", image="broken", warm=0))
    await pool.start()
    with pytest.raises(BoxLost, match="docker could not start a box: no such image: broken"):
        await pool.box()
    assert (cli / "log").read_text().splitlines()[-1].startswith("rm box-")
    await pool.close()


async def test_an_engine_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="no `podman` on PATH"):
        await BoxPool(wanted("podman")).start()
    with pytest.raises(SandboxUnavailable, match="no `runsc` on PATH"):
        await BoxPool(wanted("gvisor")).start()


@pytest.mark.parametrize(
    ("sandbox", "says"),
    [
        ({"backend": "docker"}, "needs sandbox.image"),
        ({"backend": "swerex"}, "needs sandbox.server"),
        ({"image": "python:3.12"}, "goes with docker or podman"),
        ({"backend": "vmware"}, "bubblewrap"),
    ],
)
def test_a_configuration_that_can_not_be_is_refused(sandbox: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        parse({"sandbox": sandbox})


def test_a_capability_that_is_missing_is_named_with_who_has_it():
    with pytest.raises(ValueError, match=r"docker, which has no shell, but the tool `run` needs it; use bubblewrap$"):
        demand(wanted("docker"), ["shell", "network_off"], "the tool `run`")
    demand(wanted("bubblewrap"), ["shell", "fork"], "nobody")
    with pytest.raises(ValueError, match="no capability is called teleport"):
        demand(wanted("docker"), ["teleport"], "nobody")
    assert all(not can.memory_snapshot for can in TABLE.values())
