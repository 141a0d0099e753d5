"""Trees a policy may have made are copied without leaving them; layers lie over each other as in overlayfs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from stretto.sandbox.tree import FOLDER, OPAQUE, Caps, TreeError, copy, open_beneath


def copied(source: Path, target: Path, entries: int = 1000, size: int = 1 << 20) -> Caps:
    target.mkdir(exist_ok=True)
    caps = Caps(entries, size)
    inner, outer = os.open(source, FOLDER), os.open(target, FOLDER)
    try:
        copy(inner, outer, caps)
    finally:
        os.close(inner)
        os.close(outer)
    return caps


def test_SBX_12_a_planted_link_is_not_opened(tmp_path: Path):
    (tmp_path / "secret").write_text("host")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to("../secret")
    (tree / "folder").symlink_to("..")
    (tree / "inner").mkdir()
    (tree / "inner" / "file").write_text("1")
    folder = os.open(tree, FOLDER)
    try:
        os.close(open_beneath(folder, "inner/file", os.O_RDONLY))
        for path, number in (("link", errno.ELOOP), ("folder/secret", errno.ELOOP), ("../secret", errno.EXDEV)):
            with pytest.raises(OSError) as raised:
                open_beneath(folder, path, os.O_RDONLY)
            assert raised.value.errno == number
        with pytest.raises(OSError):
            open_beneath(folder, "/etc/passwd", os.O_RDONLY)
    finally:
        os.close(folder)


def test_files_folders_links_modes_and_times_are_copied_and_nothing_else(tmp_path: Path):
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "run.sh").write_text("#!/bin/sh\n")
    (tree / "a" / "b" / "run.sh").chmod(0o750)
    (tree / "closed").mkdir(mode=0o500)
    (tree / "link").symlink_to("/etc/shadow")
    os.utime(tree / "a" / "b" / "run.sh", ns=(1, 1_000_000_001))
    os.mkfifo(tree / "fifo")
    (tree / b"odd\n\xff".decode("utf-8", "surrogateescape")).write_text("x")
    caps = copied(tree, tmp_path / "copy")
    copy_of = tmp_path / "copy" / "a" / "b" / "run.sh"
    assert copy_of.read_text() == "#!/bin/sh\n"
    assert stat.S_IMODE(copy_of.stat().st_mode) == 0o750 and copy_of.stat().st_mtime_ns == 1_000_000_001
    assert os.readlink(tmp_path / "copy" / "link") == "/etc/shadow"
    assert set(os.listdir(os.fsencode(tmp_path / "copy"))) == {b"a", b"closed", b"link", b"odd\n\xff"}
    assert caps.passed_over == 1


def test_holes_stay_holes(tmp_path: Path):
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree" / "sparse").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"island")
    copied(tmp_path / "tree", tmp_path / "copy")
    about = (tmp_path / "copy" / "sparse").stat()
    assert about.st_size == 1 << 40 and about.st_blocks <= 64
    with (tmp_path / "copy" / "sparse").open("rb") as file:
        file.seek(1 << 30)
        assert file.read(6) == b"island"


def test_more_than_the_caps_is_a_sentence(tmp_path: Path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in "abc":
        (tree / name).write_bytes(os.urandom(8192))
    with pytest.raises(TreeError, match="more files"):
        copied(tree, tmp_path / "one", entries=2)
    with pytest.raises(TreeError, match="more data"):
        copied(tree, tmp_path / "two", size=9000)
    deep = tmp_path / "deep"
    deep.mkdir()
    at = os.open(deep, FOLDER)
    for _ in range(150):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", FOLDER, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(TreeError, match="deep"):
        copied(deep, tmp_path / "three")


@pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts are made by root or in a user namespace")
def test_a_layer_over_another_is_what_overlayfs_would_show(tmp_path: Path):
    lower, upper, merged = (tmp_path / name for name in ("lower", "upper", "merged"))
    for name in ("kept", "changed", "gone", "replaced/old", "opaque/old", "joined/old", "file"):
        (lower / name).parent.mkdir(parents=True, exist_ok=True)
        (lower / name).write_text("lower")
    upper.mkdir()
    (upper / "changed").write_text("upper")
    os.mknod(upper / "gone", stat.S_IFCHR, 0)
    os.mknod(upper / "replaced", stat.S_IFCHR, 0)
    for name in ("opaque/new", "joined/new", "file/now a folder"):
        (upper / name).parent.mkdir(parents=True, exist_ok=True)
        (upper / name).write_text("upper")
    os.setxattr(upper / "opaque", OPAQUE, b"y")
    copied(lower, merged)
    copied(upper, merged)
    files = {str(path.relative_to(merged)): path.read_text() for path in merged.rglob("*") if path.is_file()}
    assert files == {
        "kept": "lower",
        "changed": "upper",
        "opaque/new": "upper",
        "joined/old": "lower",
        "joined/new": "upper",
        "file/now a folder": "upper",
    }
    assert stat.S_ISCHR((merged / "gone").stat().st_mode) and stat.S_ISCHR((merged / "replaced").stat().st_mode)
    assert os.getxattr(merged / "opaque", OPAQUE) == b"y" == os.getxattr(merged / "file", OPAQUE)
    assert OPAQUE not in os.listxattr(merged / "joined")
