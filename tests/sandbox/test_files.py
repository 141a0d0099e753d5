"""Files go in and out of a box safely whatever the policy made of its workspace."""

from __future__ import annotations

import errno
import time
from dataclasses import replace

import pytest

from stretto.sandbox.box import Box, BoxError
from stretto.sandbox.pool import BoxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_written_files_are_read_back(box: Box):
    await box.write("a.txt", b"one")
    await box.write("/workspace/deep/er/b.bin", bytes(range(256)))
    await box.write("./a.txt", b"2")
    assert await box.read("a.txt") == b"2"
    assert await box.files(10, 1000) == {"a.txt": b"2", "deep/er/b.bin": bytes(range(256))}
    assert (await box.python("print(open('deep/er/b.bin', 'rb').read()[3])")).stdout == b"3\n"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", ".", "x\0y", "/workspace/../tmp/x", "\ud800"])
async def test_paths_outside_are_refused(box: Box, path: str):
    with pytest.raises(BoxError):
        await box.read(path)
    with pytest.raises(BoxError):
        await box.write(path, b"")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ("os.symlink('/usr/bin/python3', 'x')", "symbolic link"),
        ("os.symlink('loop', 'x')", "symbolic link"),
        ("os.mkfifo('x')", "not a regular file"),
        ("os.mkdir('x')", "regular file|is a folder"),
        ("import socket; socket.socket(socket.AF_UNIX).bind('x')", "not a regular file"),
    ],
)
async def test_SBX_12_planted_things_are_refused_at_once(box: Box, make: str, says: str):
    result = await box.python(f"import os; {make}")
    assert result.exit_code == 0, result.stderr
    with pytest.raises(BoxError, match=says):
        await box.read("x")
    with pytest.raises(BoxError, match=says):
        await box.write("x", b"data")
    assert await box.files() == {}


async def test_a_link_in_the_middle_of_a_path_is_not_followed(box: Box):
    await box.python("import os; os.mkdir('/tmp/there'); os.symlink('/tmp/there', 'here')")
    with pytest.raises(BoxError):
        await box.write("here/x", b"data")
    assert (await box.python("import os; print(os.listdir('/tmp/there'))")).stdout == b"[]\n"


async def test_missing_and_large_files_are_sentences(box: Box):
    with pytest.raises(BoxError, match=r"nothing\.py: no such file"):
        await box.read("nothing.py")
    await box.write("big", b"x" * 2000)
    with pytest.raises(BoxError, match="2000 bytes, more than the 1000"):
        await box.read("big", limit=1000)


async def test_deleted_and_closed_workspaces_still_work(box: Box):
    await box.write("a/b.py", b"1")
    await box.exec(["sh", "-c", "rm -rf /workspace /workspace/* ; chmod 000 /workspace"])
    with pytest.raises(BoxError):
        await box.read("a/b.py")
    await box.write("a/c.py", b"2")
    assert await box.files() == {"a/c.py": b"2"}
    assert (await box.python("import os; print(os.listdir())")).stdout == b"['a']\n"


async def test_a_file_closed_by_its_owner_is_passed_over(box: Box):
    await box.write("shut", b"1")
    await box.write("open", b"2")
    await box.python("import os; os.chmod('shut', 0)")
    assert await box.files() == {"open": b"2"}
    with pytest.raises(BoxError, match="permission denied"):
        await box.read("shut")


async def test_a_full_workspace_is_an_error_and_bounded(box: Box):
    source = "f = open('fill', 'wb')\ntry:\n    while True: f.write(b'x' * 65536)\nexcept OSError as e: print(e.errno)"
    assert (await box.python(source)).stdout == b"%d\n" % errno.ENOSPC
    with pytest.raises(BoxError, match="no space"):
        await box.write("more", b"y" * 1000)
    assert (await box.python("import os; os.remove('fill')")).exit_code == 0
    await box.write("more", b"y" * 1000)


async def test_collecting_is_capped(box: Box):
    await box.python("for i in range(20): open(f'f{i}', 'w').write('x' * 100)")
    assert len(await box.files(20, 2000)) == 20
    with pytest.raises(BoxError, match="too many files"):
        await box.files(19, 2000)
    with pytest.raises(BoxError, match="more than"):
        await box.files(20, 1900)


async def test_deep_and_wide_trees_and_odd_names(box: Box):
    await box.python("import os\nfor i in range(200): os.mkdir('d'); os.chdir('d')")
    with pytest.raises(BoxError, match="deep"):
        await box.files()
    await box.exec(["rm", "-rf", "d"])
    await box.python("import os\nfor i in range(5000): os.symlink('x', f'/workspace/{i}')")
    with pytest.raises(BoxError, match="4096 entries"):
        await box.files(64, 1)
    await box.exec(["sh", "-c", "rm -f *"])
    await box.python("for i in range(5000): open(f'/workspace/{i}', 'w')")
    assert len(await box.files(6000, 1)) == 5000
    assert len(await box.listing(max_entries=6000)) == 5000
    with pytest.raises(BoxError, match="more than 4096"):
        await box.listing()
    await box.exec(["sh", "-c", "rm -f *"])
    await box.python(r"open(b'\xff', 'w'); open('ü\n', 'w').write('x')")
    assert await box.files() == {"ü\n": b"x"}
    await box.python("import os; os.makedirs('closed/inner'); open('closed/x', 'w'); os.chmod('closed', 0o600)")
    assert {entry.path for entry in await box.listing()} == {"closed", "ü\n"}


async def test_a_large_tree_goes_in_and_out(pool: BoxPool):
    """Fifty megabytes at once: no request may cost the square of its size."""
    box = await pool.box(limits=replace(pool.limits, disk=80 << 20, memory=400 << 20))
    tree = {f"part{number % 40}/{number}": bytes([number % 256]) * 33_333 for number in range(1500)}
    begun = time.monotonic()
    await box.write_all(tree)
    assert await box.files(1500, 1 << 26) == tree
    assert time.monotonic() - begun < 15
    await box.stop()


async def test_a_sealed_box_has_no_writable_path(pool: BoxPool):
    box = await pool.box(sealed=True)
    source = """
import os
tried = []
for folder, below, _ in os.walk('/'):
    if folder == '/':
        below[:] = [name for name in below if name not in ('proc', 'usr')]
    for make in (lambda p: open(p, 'w'), os.mkdir, lambda p: os.symlink('x', p)):
        try:
            make(folder + '/planted')
            print('wrote in', folder)
        except OSError:
            tried.append(folder)
print({'/workspace', '/tmp', '/dev/shm', '/dev', '/'} <= set(tried))
"""
    assert (await box.python(source)).stdout == b"True\n"
    with pytest.raises(BoxError, match="read-only"):
        await box.write("x", b"")
    await box.stop()
