"""Memory, process and CPU limits of a whole box, where this machine lets us set them.

Resource limits count per process; a control group counts the tree, tmpfs included. Groups are made once and reused,
one set per running box. A box enters when only its PID 1 exists, before any policy code: 0.1 ms. Works with version 1
and 2 of the kernel's interface, below the group we run in (v1) or beside it (v2: a group with processes can't have
limited children). Where neither is writable, boxes have resource limits only, and `Slots.open` says so.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

NAME = "stretto"
NEEDED = ("memory", "pids")
CONTROLLERS = (*NEEDED, "cpu")
PERIOD = 100_000
"""Microseconds over which a share of the CPU is counted."""
WEIGHT = 8
"""All boxes of a pool together compete for the CPU like so many ordinary programs: a group counts as one."""
PATIENCE = 10.0
"""Seconds that closing waits for killed processes to leave their groups, on a busy machine."""
OPENED = itertools.count()
ROOT = Path("/sys/fs/cgroup")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    memory: int  # bytes
    processes: int  # threads included, PID 1 not
    cpus: float  # of one core
    disk: int = 8 << 20  # bytes of the workspace, and of home, /tmp and /dev/shm together (`rooms.py`)
    inodes: int = 8192  # of each of the two


@dataclass
class Slot:
    """The control groups of one box: controller -> folder. Version 2 has one folder for all."""

    folders: dict[str, Path]
    limits: Limits | None = None
    kills: int = 0
    peak: int = -1  # descriptor of version 2's memory.peak, which counts from when it was last written

    @property
    def unified(self) -> bool:
        return len(set(self.folders.values())) == 1

    def limit(self, limits: Limits) -> None:
        """Set the limits of the next box. Raises OSError."""
        if limits != self.limits:
            memory, pids, cpu = (self.folders.get(name) for name in CONTROLLERS)
            assert memory and pids
            self._limit_memory(memory, limits.memory)
            (pids / "pids.max").write_text(str(limits.processes + 1))
            quota = round(limits.cpus * PERIOD)
            if cpu and self.unified:
                (cpu / "cpu.max").write_text(f"{quota} {PERIOD}")
            elif cpu:
                (cpu / "cpu.cfs_quota_us").write_text(str(quota))
            self.limits = limits

    def _limit_memory(self, folder: Path, size: int) -> None:
        limit, swap, most = (
            ("memory.max", "memory.swap.max", 0)
            if self.unified
            else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", size)
        )
        with contextlib.suppress(OSError):  # absent without swap accounting; version 1 wants it above the other limit
            (folder / swap).write_text(str(most) if self.unified else "-1")
        (folder / limit).write_text(str(size))
        with contextlib.suppress(OSError):
            (folder / swap).write_text(str(most))

    def admit(self, pid: int) -> None:
        """Move a process in; its later children are born there. Raises OSError."""
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))
        self.kills = self.count_kills()
        with contextlib.suppress(OSError):
            if self.unified:
                if self.peak < 0:
                    self.peak = os.open(self.folders["memory"] / "memory.peak", os.O_RDWR | os.O_CLOEXEC)
                os.pwrite(self.peak, b"0", 0)  # Linux 6.12
            else:
                (self.folders["memory"] / "memory.max_usage_in_bytes").write_text("0")

    def killed(self) -> bool:
        """Whether the kernel killed a process of the box for memory since this was last asked."""
        before, self.kills = self.kills, self.count_kills()
        return self.kills > before

    def count_kills(self) -> int:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (self.folders["memory"] / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def memory_peak(self) -> int | None:
        """Bytes, since the box was started. None where the kernel doesn't tell."""
        with contextlib.suppress(OSError):
            if self.unified:
                return int(os.pread(self.peak, 64, 0)) if self.peak >= 0 else None
            return int((self.folders["memory"] / "memory.max_usage_in_bytes").read_bytes())
        return None

    def process_peak(self) -> int | None:
        """Processes and threads at once, PID 1 included, since the box was started. None where not counted per box."""
        if self.unified:
            return None
        with contextlib.suppress(OSError):
            return int((self.folders["pids"] / "pids.peak").read_bytes())
        return None

    def renew(self) -> None:
        """Make the group anew whose peak can't be reset. Raises OSError while a process is left in it."""
        if not self.unified and (self.folders["pids"] / "pids.peak").exists():
            self.folders["pids"].rmdir()
            self.folders["pids"].mkdir()
            self.limits = None

    def remove(self) -> None:
        if self.peak >= 0:
            os.close(self.peak)
            self.peak = -1
        for folder in set(self.folders.values()):
            remove(folder)


@dataclass
class Slots:
    """Pool of control groups. Not thread-safe."""

    folders: dict[str, Path]
    free: list[Slot] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    @classmethod
    def open(cls) -> Slots | None:
        """None, and a warning, where control groups can't be made. Removes what dead workers left."""
        for places in candidates():
            if slots := cls._open(places):
                if missing := [name for name in CONTROLLERS if name not in slots.folders]:
                    LOG.warning("no writable control group for %s: boxes have no such limit", ", ".join(missing))
                return slots
        LOG.warning(
            "no writable control groups: the memory of boxes is limited per process, their processes per user, and "
            "their CPU not at all. Run as root, or in a delegated group (`systemd-run --user --scope -p Delegate=yes`)"
        )
        return None

    @classmethod
    def _open(cls, places: dict[str, Path]) -> Slots | None:
        name = f"{NAME}-{os.getpid()}-{next(OPENED)}"
        made: dict[str, Path] = {}
        for controller, place in places.items():
            try:
                clean(place)
                (place / name).mkdir(exist_ok=True)
                made[controller] = place / name
            except OSError:
                if controller in NEEDED:
                    break
        slots = cls(made)
        try:
            if len(set(made.values())) == 1:
                slots.folders = delegate(next(iter(made.values())))
            if not all(controller in slots.folders for controller in NEEDED):
                raise OSError("a controller is missing")
            for name, unit in (("cpu.shares", 1024), ("cpu.weight", 100)):
                if (file := slots.folders.get("cpu", Path("/nowhere")) / name).exists():
                    file.write_text(str(WEIGHT * unit))
            slots.release(slots.take(Limits(1 << 27, 32, 1.0)))
        except OSError:
            for folder in made.values():
                remove(folder)
            return None
        return slots

    def take(self, limits: Limits) -> Slot:
        """A slot for one box. Raises OSError."""
        if not self.free:
            name = f"box-{len(self.slots) + 1}"
            slot = Slot({controller: folder / name for controller, folder in self.folders.items()})
            self.slots.append(slot)
            for folder in set(slot.folders.values()):
                folder.mkdir()
            self.free.append(slot)
        slot = self.free[-1]
        slot.limit(limits)
        return self.free.pop()

    def release(self, slot: Slot) -> None:
        """Give back the slot of a box whose processes are gone."""
        with contextlib.suppress(OSError):  # its peak of processes is then that of two boxes
            slot.renew()
        self.free.append(slot)

    def close(self) -> None:
        for slot in self.slots:
            slot.remove()
        for folder in set(self.folders.values()):
            remove(folder, PATIENCE)


def candidates(root: Path = ROOT, own: str | None = None) -> list[dict[str, Path]]:
    """Controller -> folder below which groups might be made, of version 1, then 2. `own` is as /proc/self/cgroup."""
    groups = {}
    for line in (own if own is not None else Path("/proc/self/cgroup").read_text()).splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path.lstrip("/")
    first = {name: root / name / groups[name] for name in CONTROLLERS if name in groups}
    found = [first] if all(name in first for name in NEEDED) else []
    if "" in groups:
        for mount in (root, root / "unified"):
            beside = (mount / groups[""]).parent if groups[""] else mount
            if (beside / "cgroup.controllers").exists():  # else it is not version 2 that is mounted there
                found.append(dict.fromkeys(CONTROLLERS, beside))
    return [{controller: folder for controller, folder in places.items() if folder.is_dir()} for places in found]


def delegate(folder: Path) -> dict[str, Path]:
    """Version 2: let children of `folder` have what controllers there are; controller -> folder."""
    for control in (folder.parent / "cgroup.subtree_control", folder / "cgroup.subtree_control"):
        for controller in CONTROLLERS:
            with contextlib.suppress(OSError):
                control.write_text(f"+{controller}")
    there = (folder / "cgroup.subtree_control").read_text().split()
    return {controller: folder for controller in CONTROLLERS if controller in there}


def clean(folder: Path) -> None:
    """Remove groups of workers that no longer exist."""
    for left in folder.glob(f"{NAME}-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            remove(left)


def remove(folder: Path, patience: float = 0.0) -> None:
    """A group can be removed once empty, which it is a little after its last process was killed; one that is not within
    `patience` seconds is left for the next start."""
    deadline = time.monotonic() + patience
    while True:
        try:
            for slot in folder.glob("box-*"):
                slot.rmdir()
            folder.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                return
        time.sleep(0.005)
