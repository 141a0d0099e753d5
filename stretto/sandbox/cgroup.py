"""Memory and process limits of a whole box, where this machine lets us set them.

Resource limits count per process; a control group counts the tree, tmpfs included. Groups are made once and reused,
one per running box. A box enters when only its PID 1 exists, before any policy code: 0.1 ms. Works with version 1
and 2 of the kernel's interface, below the group we run in (v1) or beside it (v2: a group with processes can't have
limited children). Where neither is writable, boxes have resource limits only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

NAME = "stretto"
OPENED = itertools.count()


@dataclass
class Slot:
    """The control groups of one box. `memory` and `pids` are the same folder in version 2."""

    memory: Path
    pids: Path
    kills: int = 0

    def admit(self, pid: int) -> None:
        """Move a process in; its later children are born there. Raises OSError."""
        for folder in {self.memory, self.pids}:
            (folder / "cgroup.procs").write_text(str(pid))
        self.kills = self.count_kills()

    def killed(self) -> bool:
        """Whether the kernel killed a process of the box for memory since this was last asked."""
        before, self.kills = self.kills, self.count_kills()
        return self.kills > before

    def count_kills(self) -> int:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (self.memory / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0


@dataclass
class Slots:
    """Pool of control groups with equal limits. Not thread-safe."""

    memory: Path
    pids: Path
    memory_bytes: int
    processes: int
    free: list[Slot] = field(default_factory=list)
    made: int = 0

    @classmethod
    def open(cls, memory_bytes: int, processes: int) -> Slots | None:
        """None where control groups can't be made. Removes what dead workers left."""
        for memory, pids in candidates():
            with contextlib.suppress(OSError):
                clean(memory)
                clean(pids)
                name = f"{NAME}-{os.getpid()}-{next(OPENED)}"
                slots = cls(memory / name, pids / name, memory_bytes, processes)
                for folder in {slots.memory, slots.pids}:
                    folder.mkdir()
                if slots.memory == slots.pids:
                    (slots.memory / "cgroup.subtree_control").write_text("+memory +pids")
                slots.release(slots.take())
                return slots
        return None

    def take(self) -> Slot:
        if self.free:
            return self.free.pop()
        self.made += 1
        slot = Slot(self.memory / f"box-{self.made}", self.pids / f"box-{self.made}")
        for folder in {slot.memory, slot.pids}:
            folder.mkdir()
        version_2 = slot.memory == slot.pids
        limit = "memory.max" if version_2 else "memory.limit_in_bytes"
        (slot.memory / limit).write_text(str(self.memory_bytes))
        with contextlib.suppress(OSError):  # absent without swap accounting
            swap = ("memory.swap.max", 0) if version_2 else ("memory.memsw.limit_in_bytes", self.memory_bytes)
            (slot.memory / swap[0]).write_text(str(swap[1]))
        (slot.pids / "pids.max").write_text(str(self.processes))
        return slot

    def release(self, slot: Slot) -> None:
        """Give back the slot of a box whose processes are gone."""
        self.free.append(slot)

    def close(self) -> None:
        for folder in {self.memory, self.pids}:
            remove(folder)


def candidates() -> list[tuple[Path, Path]]:
    """Folders below which groups for (memory, pids) might be made: version 1, then version 2."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path.lstrip("/")
    root = Path("/sys/fs/cgroup")
    found = []
    if "memory" in own and "pids" in own:
        found.append((root / "memory" / own["memory"], root / "pids" / own["pids"]))
    if "" in own:
        beside = (root / own[""]).parent if own[""] else root
        found.append((beside, beside))
    return [pair for pair in found if pair[0].is_dir() and pair[1].is_dir()]


def clean(folder: Path) -> None:
    """Remove groups of workers that no longer exist."""
    for left in folder.glob(f"{NAME}-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            remove(left)


def remove(folder: Path) -> None:
    """A group can be removed once empty; one that is not yet is left for the next start."""
    with contextlib.suppress(OSError):
        for slot in folder.glob("box-*"):
            slot.rmdir()
        folder.rmdir()
