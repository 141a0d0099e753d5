"""What a restart reads back from the ledger. Finished history stays on disk; memory holds only what is live."""

from __future__ import annotations

import json

from stretto.records import Batch, Receipt, decode
from stretto.rollouts.groups import TRAIN, Evaluation, Grant, Group, Slot
from stretto.rollouts.ledger import Ledger


def live_groups(ledger: Ledger) -> list[Group]:
    """Groups without a fate, in the order they were opened, with their leases, lapses and receipts."""
    return _groups(ledger, "NOT EXISTS (SELECT 1 FROM fates WHERE grp = groups.id)")


def evaluation_groups(ledger: Ledger, id: str) -> list[Group]:
    return _groups(ledger, "evaluation = ?", id)


def _groups(ledger: Ledger, where: str, *values: str) -> list[Group]:
    groups: dict[str, Group] = {}
    columns = "id, ordinal, task, purpose, evaluation, size, at"
    for id, ordinal, task, purpose, evaluation, size, opened in ledger.db.execute(
        f"SELECT {columns} FROM groups WHERE {where} ORDER BY rowid", values
    ):
        owner = None if evaluation == TRAIN else evaluation
        groups[id] = Group(id, ordinal, task, purpose, owner, [Slot() for _ in range(size)], opened=opened)
    events = ledger.db.execute(
        f"SELECT {_LEASE}, lapses.reason, receipts.record FROM leases LEFT JOIN lapses USING (rollout) "
        f"LEFT JOIN receipts USING (rollout) WHERE leases.grp IN (SELECT id FROM groups WHERE {where}) "
        "ORDER BY leases.rowid",
        values,
    )
    receipts = []
    for *lease, reason, record in events:
        grant = Grant(*lease)
        groups[grant.group].leased(grant)
        if reason is not None:
            groups[grant.group].lapsed(grant.member, reason)
        if record is not None:
            receipts.append((grant, decode(record, Receipt)))
    for grant, receipt in receipts:
        groups[grant.group].closed(grant.member, receipt)
    for (id,) in ledger.db.execute(f"SELECT grp FROM cuts WHERE grp IN (SELECT id FROM groups WHERE {where})", values):
        groups[id].cut_short()
    return list(groups.values())


def leases_out(ledger: Ledger, groups: list[Group]) -> list[Grant]:
    """Leases of these groups that wait for an answer, the next deadline first."""
    out = {slot.lease for group in groups for slot in group.slots if slot.lease is not None}
    rows = ledger.db.execute(
        f"SELECT {_LEASE} FROM leases WHERE NOT EXISTS (SELECT 1 FROM receipts WHERE rollout = leases.rollout) "
        "AND NOT EXISTS (SELECT 1 FROM lapses WHERE rollout = leases.rollout)"
    )
    return sorted((Grant(*row) for row in rows if row[0] in out), key=lambda grant: grant.deadline)


_ENGINE = "COALESCE((SELECT engine FROM moves WHERE rollout=leases.rollout ORDER BY seq DESC LIMIT 1), leases.engine)"
_LEASE = ", ".join(
    _ENGINE if name == "engine" else f"leases.{name}"
    for name in ("rollout", "grp", "member", "attempt", "worker", "engine", "version", "deadline")
)


def grant_of(ledger: Ledger, rollout: str) -> Grant | None:
    row = ledger.db.execute(f"SELECT {_LEASE} FROM leases WHERE rollout=?", (rollout,)).fetchone()
    return None if row is None else Grant(*row)


def batch_record(ledger: Ledger, version: int) -> bytes | None:
    row = ledger.db.execute("SELECT record FROM batches WHERE version=?", (version,)).fetchone()
    return None if row is None else row[0]


def batch(ledger: Ledger, version: int) -> Batch | None:
    record = batch_record(ledger, version)
    return None if record is None else decode(record, Batch)


def batches_cut(ledger: Ledger) -> int:
    """One more than the version of the latest batch; 0 before the first."""
    return ledger.db.execute("SELECT COALESCE(MAX(version) + 1, 0) FROM batches").fetchone()[0]


def last_steps(ledger: Ledger, count: int) -> list[tuple[float, list[int]]]:
    """(solve rate, ages) of the latest batches, oldest first."""
    rows = ledger.db.execute("SELECT solve_rate, staleness FROM batches ORDER BY version DESC LIMIT ?", (count,))
    return [(rate, json.loads(ages)) for rate, ages in rows][::-1]


def next_ordinal(ledger: Ledger) -> int:
    row = ledger.db.execute("SELECT COALESCE(MAX(ordinal) + 1, 0) FROM groups WHERE evaluation=?", (TRAIN,))
    return row.fetchone()[0]


def current_version(ledger: Ledger) -> tuple[int | None, str]:
    """(version, chain)"""
    row = ledger.db.execute("SELECT version, chain FROM versions ORDER BY seq DESC LIMIT 1").fetchone()
    return row or (None, "")


def flowing(ledger: Ledger) -> bool:
    row = ledger.db.execute("SELECT flowing FROM switches ORDER BY seq DESC LIMIT 1").fetchone()
    return bool(row and row[0])


_EVALUATION = "SELECT id, name, split, version, attempts, temperature, tasks FROM evaluations"


def evaluations(ledger: Ledger, finished: bool) -> list[Evaluation]:
    which = "EXISTS" if finished else "NOT EXISTS"
    rows = ledger.db.execute(
        f"{_EVALUATION} WHERE {which} (SELECT 1 FROM evaluated WHERE evaluation = id) ORDER BY rowid"
    )
    return [_evaluation(row) for row in rows]


def evaluation(ledger: Ledger, id: str) -> Evaluation | None:
    row = ledger.db.execute(f"{_EVALUATION} WHERE id=?", (id,)).fetchone()
    return None if row is None else _evaluation(row)


def _evaluation(row: tuple) -> Evaluation:
    id, name, split, version, attempts, temperature, tasks = row
    return Evaluation(id, name, split, version, attempts, temperature, json.loads(tasks))


def fates(ledger: Ledger) -> dict[str, int]:
    """Training groups per fate: `batched`, `dropped:<reason>`."""
    rows = ledger.db.execute("SELECT fate, reason, COUNT(*) FROM fates WHERE fate != 'evaluated' GROUP BY fate, reason")
    return {f"{fate}:{reason}" if reason else fate: count for fate, reason, count in rows}


def groups_below(ledger: Ledger, version: int) -> int:
    """Groups in the batches that made `version` and those before it."""
    row = ledger.db.execute("SELECT COALESCE(SUM(groups), 0) FROM batches WHERE version < ?", (version,))
    return row.fetchone()[0]


def recent_keys(ledger: Ledger, count: int) -> list[str]:
    """Object keys of the latest rollouts, oldest first."""
    rows = ledger.db.execute("SELECT record FROM receipts ORDER BY rowid DESC LIMIT ?", (count,))
    return [key for (record,) in rows if (key := decode(record, Receipt).key)][::-1]
