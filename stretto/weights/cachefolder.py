"""The follower's folder: versions as files that its engines load, and from which it starts again.

    <chain>-v000007-<root>.safetensors    a whole version, for engines that join, and for a restart
    <chain>-v000008-<root>.patch          what the version before has to be given, for engines that serve it

A whole file costs a copy of the weights, so there is one only where somebody needs it, and now and then for a restart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from stretto.weights import patchfile
from stretto.weights.patchfile import Change
from stretto.weights.rebuild import State
from stretto.weights.state import fingerprint
from stretto.weights.tensorfile import save, unpack

KEEP_FILES = 2
"""Files of each kind that are kept."""


class CacheFolder:
    """Files of one chain. Nothing in it is trusted: names promise a root, and whoever loads a file checks it."""

    def __init__(self, folder: Path, chain: str) -> None:
        self.folder, self._chain = folder.absolute(), chain  # engines have other working folders

    def open(self) -> State | None:
        """The newest whole version that still has the bits its name promises; others are deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in reversed(self._files("safetensors")):
            with suppress(ValueError):
                tensors, tags = unpack(path.read_bytes())
                root = fingerprint(tensors)
                if path.stem.endswith(root[:16]):
                    return State(_version_of(path), root, tensors, tags)
            path.unlink()
        return None

    def path(self, version: int, root: str, kind: str = "safetensors") -> Path:
        return self.folder / f"{self._chain}-v{version:06d}-{root[:16]}.{kind}"

    def whole(self, state: State) -> Path:
        """The file of a version, written unless it is there. OSError when it cannot be."""
        path = self.path(state.version, state.root)
        if not path.exists():
            save(path, state.tensors, state.tags)
        return path

    def patch(self, state: State, changes: Sequence[Change]) -> Path:
        path = self.path(state.version, state.root, "patch")
        patchfile.save(path, changes, state.tags)
        return path

    def drop(self, root: str) -> None:
        """Forget the files of a root that somebody found to be wrong."""
        for kind in ("safetensors", "patch"):
            for path in self._files(kind):
                if path.stem.endswith(root[:16]):
                    path.unlink(missing_ok=True)

    def prune(self, in_use: Collection[Path]) -> None:
        """Older versions go, but never a file that an engine was told to load and has not answered for."""
        for kind in ("safetensors", "patch"):
            for path in self._files(kind)[:-KEEP_FILES]:
                if path not in in_use:
                    path.unlink(missing_ok=True)

    def _files(self, kind: str) -> list[Path]:
        """Of this chain, oldest version first."""
        pattern = re.compile(re.escape(self._chain) + r"-v\d{6,}-[0-9a-f]{16}\." + kind)
        return sorted((path for path in self.folder.iterdir() if pattern.fullmatch(path.name)), key=_version_of)


def _version_of(path: Path) -> int:
    return int(path.stem.rsplit("-", 2)[1].removeprefix("v"))
