"""The ledger: one SQLite file that is the truth of a run. Everything else about rollouts is rebuilt from it.

Each hand-off (open, lease, move, lapse, receipt, cut, commit) is one transaction that adds rows; rows are never changed
or removed, and the primary keys make each of them happen once:

    groups ──1:n── leases ──1:1── lapses      a lease nobody answered, or not with a result
       │              │──1:n── moves          its engine failed, it went on at another
       │              └──1:1── receipts       unique per group and member: the first answer counts
       ├──1:1── cuts                          cut short at its deadline: no later answer counts
       └──1:1── fates ──n:1── batches         batched, dropped (with the reason) or evaluated: exactly one
    versions, switches: logs, the last row is the current state; evaluations, evaluated: asked for and done

WAL with synchronous=NORMAL survives the death of the process at any point. Cuts and commits are also synced to disk,
because the trainer acts on them: a power cut may lose receipts (their leases are given again), never a batch.

One process writes, from one thread; readers may open the file read-only at any time. What others announce again and
again (engines, workers) is not kept.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.records import Batch, Receipt, encode
from stretto.rollouts.groups import TRAIN, Evaluation, Grant, Group

FORMAT = 1
SCHEMA = {
    "facts": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "evaluations": "id TEXT PRIMARY KEY, name TEXT, split TEXT, version INTEGER, attempts INTEGER, temperature REAL, "
    "tasks TEXT",
    "evaluated": "evaluation TEXT PRIMARY KEY REFERENCES evaluations(id)",
    "groups": "id TEXT PRIMARY KEY, ordinal INTEGER, task TEXT, purpose TEXT, evaluation TEXT, size INTEGER, "
    "UNIQUE (evaluation, ordinal)",
    "leases": "rollout TEXT PRIMARY KEY, grp TEXT REFERENCES groups(id), member INTEGER, attempt INTEGER, worker TEXT, "
    "engine TEXT, version INTEGER, deadline REAL, UNIQUE (grp, member, attempt)",
    "lapses": "rollout TEXT PRIMARY KEY REFERENCES leases(rollout), reason TEXT",
    "moves": "seq INTEGER PRIMARY KEY, rollout TEXT REFERENCES leases(rollout), engine TEXT",
    "cuts": "grp TEXT PRIMARY KEY REFERENCES groups(id)",
    "receipts": "rollout TEXT PRIMARY KEY REFERENCES leases(rollout), grp TEXT, member INTEGER, outcome TEXT, "
    "reward REAL, solved INTEGER, oldest_version INTEGER, record BLOB, UNIQUE (grp, member)",
    "batches": "version INTEGER PRIMARY KEY, groups INTEGER, solve_rate REAL, staleness TEXT, record BLOB",
    "fates": "grp TEXT PRIMARY KEY REFERENCES groups(id), fate TEXT, batch INTEGER REFERENCES batches(version), "
    "reason TEXT",
    "versions": "seq INTEGER PRIMARY KEY, version INTEGER, cause TEXT, chain TEXT",
    "switches": "seq INTEGER PRIMARY KEY, flowing INTEGER",
}


class LedgerError(RuntimeError):
    """The ledger cannot be used as asked; a sentence."""

    final = True  # no restart heals it


class Ledger:
    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open or create. Raises LedgerError when another process has it, it is damaged, or of another format."""
        self._clock = clock
        self._depth = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 (held as long as the ledger is open)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise LedgerError(f"{path} is in use by another orchestrator; stop it first") from None
        self.db = sqlite3.connect(path, isolation_level=None)
        try:
            self.db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:  # no space left, no right to write: not the file's fault
            raise
        except sqlite3.DatabaseError as error:
            self.close()
            raise LedgerError(
                f"{path} is damaged ({error}), so this run can't go on: put a copy of it back, or start another run "
                f"from its last checkpoint with model.path"
            ) from None
        self.db.execute("PRAGMA foreign_keys=ON")
        self._sync("NORMAL")
        found = self.db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, FORMAT):
            self.close()
            raise LedgerError(f"{path} has ledger format {found}, this version of Stretto reads {FORMAT}")
        with self.transaction():
            for table, columns in SCHEMA.items():
                self.db.execute(f"CREATE TABLE IF NOT EXISTS {table} (at REAL NOT NULL, {columns})")
                for verb in ("UPDATE", "DELETE"):
                    self.db.execute(
                        f"CREATE TRIGGER IF NOT EXISTS {table}_{verb} BEFORE {verb} ON {table} "
                        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
                    )
            self.db.execute(f"PRAGMA user_version={FORMAT}")

    def close(self) -> None:
        self.db.close()
        self._lock.close()

    @contextmanager
    def transaction(self, synced: bool = False) -> Iterator[None]:
        """All rows written inside appear together or not at all. Joins an enclosing transaction."""
        if self._depth:
            yield
            return
        if synced:
            self._sync("FULL")
        self.db.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        else:
            self.db.execute("COMMIT")
        finally:
            self._depth = 0
            if synced:
                self._sync("NORMAL")

    # Transitions

    def pin(self, key: str, value: str, sentence: str) -> None:
        """Remember a fact about the run; a later, different value raises LedgerError with the sentence."""
        row = self.db.execute("SELECT value FROM facts WHERE key=?", (key,)).fetchone()
        if row is None:
            self._add("facts", (key, value))
        elif row[0] != value:
            raise LedgerError(sentence)

    def open(self, groups: Iterable[Group]) -> None:
        rows = [(g.id, g.ordinal, g.task, g.purpose, g.evaluation or TRAIN, len(g.slots)) for g in groups]
        self._add("groups", *rows)

    def lease(self, grants: Iterable[Grant]) -> None:
        self._add(
            "leases",
            *[(g.rollout, g.group, g.member, g.attempt, g.worker, g.engine, g.version, g.deadline) for g in grants],
        )

    def lapse(self, rollouts: Iterable[str], reason: str) -> None:
        self._add("lapses", *[(rollout, reason) for rollout in rollouts])

    def move(self, rollout: str, engine: str) -> None:
        self._add("moves", (None, rollout, engine))

    def cut_short(self, group: str) -> None:
        self._add("cuts", (group,))

    def receive(self, receipt: Receipt, member: int) -> bool:
        """True when this is the first receipt of its slot and the group still needs it."""
        with self.transaction():
            done = self.db.execute(
                "SELECT 1 FROM receipts WHERE grp=? AND member=? UNION ALL SELECT 1 FROM fates WHERE grp=? "
                "UNION ALL SELECT 1 FROM cuts WHERE grp=?",
                (receipt.group, member, receipt.group, receipt.group),
            ).fetchone()
            if done:
                return False
            row = (receipt.rollout, receipt.group, member, receipt.outcome.value, receipt.reward, receipt.solved)
            self._add("receipts", (*row, receipt.oldest_version, encode(receipt)))
            return True

    def cut(self, batch: Batch, groups: Iterable[Group]) -> None:
        """The batch and the fate of its groups, together and synced: from now on it is immutable."""
        ages = json.dumps(batch.staleness)
        with self.transaction(synced=True):
            self._add("batches", (batch.version, batch.groups, batch.solve_rate, ages, encode(batch)))
            self._add("fates", *[(group.id, "batched", batch.version, "") for group in groups])

    def drop(self, groups: Iterable[Group], reason: str) -> None:
        self._add("fates", *[(group.id, "dropped", None, reason) for group in groups])

    def version(self, version: int, cause: str, chain: str) -> None:
        with self.transaction(synced=True):
            self._add("versions", (None, version, cause, chain))

    def switch(self, flowing: bool) -> None:
        self._add("switches", (None, flowing))

    def evaluate(self, asked: Evaluation) -> None:
        row = (asked.id, asked.name, asked.split, asked.version, asked.attempts, asked.temperature)
        self._add("evaluations", (*row, json.dumps(asked.tasks)))

    def evaluated(self, id: str) -> None:
        """Ends an evaluation and its groups."""
        with self.transaction():
            self._add("evaluated", (id,))
            self.db.execute(
                "INSERT INTO fates SELECT ?, id, 'evaluated', NULL, '' FROM groups WHERE evaluation=?",
                (self._clock(), id),
            )

    def _add(self, table: str, *rows: tuple) -> None:
        if not rows:
            return
        now = self._clock()
        marks = ",".join("?" * (len(rows[0]) + 1))
        with self.transaction():
            self.db.executemany(f"INSERT INTO {table} VALUES ({marks})", [(now, *row) for row in rows])

    def _sync(self, level: str) -> None:
        self.db.execute(f"PRAGMA synchronous={level}")
