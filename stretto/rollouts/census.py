"""What the ledger holds, counted by state; read-only, so it works while a run goes on and long after."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from stretto.rollouts.groups import TRAIN

_TRAINING = f"(SELECT id FROM groups WHERE evaluation='{TRAIN}')"
_LEASES = """
SELECT CASE WHEN rollout IN (SELECT rollout FROM receipts) THEN 'answered'
            WHEN rollout IN (SELECT rollout FROM lapses) THEN 'lapsed'
            WHEN grp IN (SELECT grp FROM fates) THEN 'not needed'
            ELSE 'out' END AS state, COUNT(*) FROM leases GROUP BY state
"""


def census(ledger: Path) -> dict[str, Any] | None:
    """Counts per state; None when there is no ledger, or none that can be read.

    `ordinals`: every prompt that was opened is open, ready (finished, not cut), batched (cut, not trained), trained or
    dropped; these sum to `opened`. `receipts`: by outcome, training and evaluations together.
    """
    if not ledger.is_file():
        return None
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, timeout=5.0)) as db:
        try:
            return _count(db)
        except sqlite3.DatabaseError:
            return None


def _count(db: sqlite3.Connection) -> dict[str, Any]:
    def one(query: str, *values: object) -> int:
        return db.execute(query, values).fetchone()[0]

    def each(query: str, *values: object) -> dict[str, int]:
        return {str(name): count for name, count in db.execute(query, values)}

    row = db.execute("SELECT version FROM versions ORDER BY seq DESC LIMIT 1").fetchone()
    version = row[0] if row else 0
    opened = one("SELECT COUNT(*) FROM groups WHERE evaluation=?", TRAIN)
    trained = one("SELECT COUNT(*) FROM fates WHERE fate='batched' AND batch < ?", version)
    batched = one("SELECT COUNT(*) FROM fates WHERE fate='batched' AND batch >= ?", version)
    dropped = each("SELECT reason, COUNT(*) FROM fates WHERE fate='dropped' GROUP BY reason")
    ready = one(
        f"SELECT COUNT(*) FROM groups WHERE id IN {_TRAINING} AND id NOT IN (SELECT grp FROM fates) AND "
        "(id IN (SELECT grp FROM cuts) OR size = (SELECT COUNT(*) FROM receipts WHERE grp = groups.id))"
    )
    lapsed = each("SELECT reason, COUNT(*) FROM lapses GROUP BY reason ORDER BY reason")
    states = each(_LEASES)
    return {
        "version": version,
        "ordinals": {
            "opened": opened,
            "open": opened - ready - batched - trained - sum(dropped.values()),
            "ready": ready,
            "batched": batched,
            "trained": trained,
            "dropped": dropped,
        },
        "cut_short": one("SELECT COUNT(*) FROM cuts"),
        "leases": {
            "granted": one("SELECT COUNT(*) FROM leases"),
            **{state: states.get(state, 0) for state in ("out", "answered", "lapsed", "not needed")},
            "lapsed_by_reason": lapsed,
            "moved": one("SELECT COUNT(DISTINCT rollout) FROM moves"),
        },
        "receipts": each("SELECT outcome, COUNT(*) FROM receipts GROUP BY outcome ORDER BY outcome"),
        "batches": {
            "cut": one("SELECT COUNT(*) FROM batches"),
            "trained": one("SELECT COUNT(*) FROM batches WHERE version < ?", version),
        },
        "evaluations": {
            "asked": one("SELECT COUNT(*) FROM evaluations"),
            "done": one("SELECT COUNT(*) FROM evaluated"),
        },
    }
