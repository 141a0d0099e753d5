"""The ways to carry boxes, by the name in `sandbox.backend`, and what each can do.

| | bubblewrap | gvisor | docker, podman | swerex |
|---|---|---|---|---|
| runs on | this machine | this machine | this machine | wherever its server is |
| base shared, copy on write; fork | yes | no, copied | no, copied | no, copied |
| shell, long-lived processes | yes | no | no | no |
| memory, processes, CPU of the whole box | with control groups | no | yes | its server's matter |
| another uid per identity | as root | no | no | no |
"""

from __future__ import annotations

from collections.abc import Iterable

from stretto.config import SandboxConfig
from stretto.sandbox.capabilities import Capabilities
from stretto.sandbox.carrier import Carrier
from stretto.sandbox.cgroup import Limits

CONTAINER = Capabilities(
    network_off=True, disk_limit=True, inode_limit=True, memory_limit=True, process_limit=True, cpu_limit=True
)
TABLE = {
    "bubblewrap": Capabilities(
        overlay=True,
        fork=True,
        freeze=True,
        shell=True,
        network_off=True,
        disk_limit=True,
        inode_limit=True,
        memory_limit=True,
        process_limit=True,
        cpu_limit=True,
        identities=True,
        libraries=True,
    ),
    "gvisor": Capabilities(network_off=True, disk_limit=True, libraries=True),
    "docker": CONTAINER,
    "podman": CONTAINER,
    "swerex": Capabilities(),
}
"""What each can do at best; a started pool knows what it can here."""


def demand(config: SandboxConfig, needs: Iterable[str], why: str) -> None:
    """ValueError when the configured backend never has one of the capabilities `needs`; `why` is who wants them."""
    if missing := TABLE[config.backend].missing(*needs):
        able = [name for name, can in TABLE.items() if not can.missing(*missing)]
        raise ValueError(
            f"sandbox.backend is {config.backend}, which has no {' and no '.join(missing)}, but {why} needs it; "
            f"use {' or '.join(able)}"
        )


def carrier_of(config: SandboxConfig, limits: Limits) -> Carrier:
    if config.backend == "bubblewrap":
        from stretto.sandbox.bubblewrap import Bubblewrap

        return Bubblewrap(config, limits)
    if config.backend == "swerex":
        from stretto.sandbox.swerex import Swerex

        return Swerex(config)
    from stretto.sandbox.containers import Containers

    return Containers(config, limits)
