"""Every random choice of the rollouts room, as a number: a hash of the run's seed and what the choice is for.

No generator state has to be saved: after a restart the same question gets the same answer.
"""

from __future__ import annotations

import hashlib


def derive(seed: int, *what: str | int) -> int:
    """A seed in [0, 2**48) for one purpose, e.g. `derive(run_seed, "sampling", task_id, member)`."""
    text = "\0".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
