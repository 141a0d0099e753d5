"""How old a token may be when it is trained. This file is the only place that decides it.

Age is counted in optimizer steps, from the version that sampled the oldest trained token to the version being
updated, queueing included. Admission (`admission.py`) paces work so that nothing gets too old; the cut of a batch
(`batches.py`) asks again, so that the bound holds whatever engines and workers did.
"""

from __future__ import annotations


def age(version: int, oldest_version: int) -> int:
    """Optimizer steps between the version that sampled the oldest token and `version`, which the step updates."""
    return version - oldest_version


def fits(version: int, oldest_version: int, max_staleness: int) -> bool:
    """May the step that updates `version` train tokens as old as `oldest_version`? Tokens of a later version than
    the one being updated do not fit either: they belong to a later step."""
    return 0 <= age(version, oldest_version) <= max_staleness


def last_step(oldest_version: int, max_staleness: int) -> int:
    """The last version whose update may still train tokens as old as `oldest_version`."""
    return oldest_version + max_staleness
