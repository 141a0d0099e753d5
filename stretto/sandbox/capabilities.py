"""What a backend of boxes can do. Who needs one of these asks before the first box, and says so when it isn't there."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Capabilities:
    overlay: bool = False
    """A base folder is shared, copy on write; otherwise it is copied into every box."""
    fork: bool = False
    """`snapshot` and `fork` of a workspace."""
    memory_snapshot: bool = False
    """A fork's processes run on; nowhere yet."""
    freeze: bool = False
    shell: bool = False
    """`shell` and `open`: processes that stay."""
    network_off: bool = False
    disk_limit: bool = False
    inode_limit: bool = False
    memory_limit: bool = False
    """Of the whole box, not of one process."""
    process_limit: bool = False
    cpu_limit: bool = False
    identities: bool = False
    """`identity` is another uid on the host too."""
    libraries: bool = False

    def missing(self, *names: str) -> list[str]:
        """Those of `names` that are not there. ValueError for a name that is none."""
        known = {field.name for field in fields(self)}
        if strays := set(names) - known:
            raise ValueError(
                f"no capability is called {', '.join(sorted(strays))}; there are {', '.join(sorted(known))}"
            )
        return [name for name in names if not getattr(self, name)]
