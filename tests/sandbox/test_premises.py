"""What a pool has on disk goes with it; what a killed one left goes with the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stretto.sandbox import premises
from stretto.sandbox.premises import close_folder, open_folder


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Not among the folders of pools that live on this machine."""
    monkeypatch.setattr(premises, "ABOVE", tmp_path)
    return tmp_path


def test_a_folder_is_passable_but_not_readable_and_goes_when_closed():
    folder, lock = open_folder()
    assert folder.stat().st_mode & 0o777 == 0o711 and "stretto" not in folder.name
    (folder / "layers" / "1").mkdir(parents=True)
    (folder / "layers" / "1" / "closed").mkdir(mode=0o000)
    close_folder(folder, lock)
    assert not folder.exists()


def test_SBX_1_the_next_pool_removes_what_a_killed_one_left(elsewhere: Path):
    living, lock = open_folder()
    dead, other = open_folder()
    (dead / "layers").mkdir()
    os.close(other)  # as the kernel does for a killed process
    unrelated = elsewhere / "boxes"
    unrelated.mkdir()
    (elsewhere / "boxes-link").symlink_to(unrelated)
    new, third = open_folder()
    assert living.exists() and new.exists() and not dead.exists() and unrelated.exists()
    assert (elsewhere / "boxes-link").is_symlink()
    for folder, held in ((living, lock), (new, third)):
        close_folder(folder, held)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own another's folder")
def test_a_folder_of_somebody_else_is_left_alone(elsewhere: Path):
    theirs = elsewhere / "boxes-theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    close_folder(*open_folder())
    assert theirs.exists()
