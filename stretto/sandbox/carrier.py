"""What the pool asks of whatever carries its boxes: bubblewrap, containers, a remote service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stretto.sandbox.box import Box
from stretto.sandbox.capabilities import Capabilities
from stretto.sandbox.cgroup import Limits
from stretto.sandbox.layers import Base


@dataclass(frozen=True)
class Kind:
    """What boxes can differ in."""

    sealed: bool = False
    base: Base | None = None
    libraries: tuple[str, ...] = ()
    identity: int = 0
    limits: Limits | None = None
    """None: the pool's."""


class Carrier(Protocol):
    capabilities: Capabilities
    alive: set[Box]
    """Boxes that were begun and have not ended."""

    async def open(self, trusted: bool) -> None:
        """Get ready; SandboxUnavailable where boxes can't be begun or (unless `trusted`) would not hold."""
        ...

    async def box(self, kind: Kind) -> Box:
        """Begin one. BoxLost when that fails, ValueError when a base or library is not there."""
        ...

    async def close(self) -> None:
        """After the last box has ended."""
        ...
