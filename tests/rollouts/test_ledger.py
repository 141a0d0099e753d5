"""The ledger is the only memory: killed at any statement and reopened, the run has the same end."""

from __future__ import annotations

import os
import signal
import sqlite3
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.records import Outcome, Receipt, decode
from stretto.rollouts import recall
from stretto.rollouts.ledger import FORMAT, Ledger, LedgerError
from stretto.rollouts.refusals import Conflict

from .world import Desk, answer, configuration

CONFIG = configuration(max_staleness=0, groups_per_step=2, group_size=2)


def drive(desk: Desk, steps: int = 2) -> None:
    """To the end from wherever the ledger stands: an evaluation, then `steps` steps, one member of them infra."""
    flow = desk.flow
    if flow.version is None:
        flow.set_version(0, "chain-0")
    assert flow.version is not None
    flow.worker_left("w0")  # this one is new: it holds nothing that was leased to another of its name
    desk.engine(flow.version)
    if flow.version == 0 and flow.next_step == 0:
        flow.evaluate("before", "heldout", 2, 2, 0.0)
    flow.switch(True)
    while flow.version < steps or flow.evaluations.tallies:
        for lease in flow.lease("w0", 3):
            infra = lease.group == "g0000001" and "-01" in lease.rollout
            flow.receive(answer(lease, outcome=Outcome.INFRA if infra else Outcome.SCORED))
        desk.clock.now += 31
        flow.heartbeat("w0")
        if flow.version < steps and flow.batch(flow.version) is not None:
            version = flow.version
            desk.commit(version)
            desk.engine(version + 1)


def end(desk: Desk) -> dict[str, Any]:
    """What matters of a finished run; which attempt answered does not."""
    records = [recall.batch(desk.ledger, version) for version in range(desk.flow.next_step)]
    batches = [
        [(item.rollout.partition("r")[0], item.reward, item.advantage) for item in batch.items] if batch else None
        for batch in records
    ]
    ids = [asked.id for asked in recall.evaluations(desk.ledger, finished=True)]
    versions = [row[0] for row in desk.ledger.db.execute("SELECT version FROM versions ORDER BY seq")]
    evaluations = [desk.flow.evaluations.progress(id) for id in ids]
    return {"batches": batches, "fates": desk.fates(), "versions": versions, "evaluations": evaluations}


def killed_at(folder, statement: int) -> bool:
    """Drive in a child that kills itself before the given SQL statement; False when it came to the end."""
    child = os.fork()
    if child == 0:
        count = 0

        def trace(sql: str) -> None:
            nonlocal count
            count += 1
            if count == statement:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            desk = Desk(folder, CONFIG)
            desk.ledger.db.set_trace_callback(trace)
            drive(desk)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_LED_4_killed_before_any_statement(tmp_path):
    desk = Desk(tmp_path / "whole", CONFIG)
    drive(desk)
    whole = end(desk)
    desk.close()
    assert whole["versions"] == [0, 1, 2] and len(whole["evaluations"]) == 1
    statement, kills = 1, 0
    while killed_at(tmp_path / f"{statement}", statement):
        desk = Desk(tmp_path / f"{statement}", CONFIG)
        desk.clock.now += 2000
        drive(desk)
        assert end(desk) == whole, f"killed before statement {statement}"
        desk.close()
        kills += 1
        statement += 4
    assert kills > 30


def snapshot(desk: Desk) -> dict[str, Any]:
    flow = desk.flow

    def groups(found):
        return {
            group.id: (
                group.ordinal,
                group.task,
                group.missing,
                group.oldest_version,
                [(s.attempts, s.unanswered, s.lease, s.worker, s.version, s.receipt) for s in group.slots],
            )
            for group in found.values()
        }

    return {
        "training": groups(flow.training),
        "evaluating": groups(flow.evaluations.groups),
        "tallies": {id: tally.result() for id, tally in flow.evaluations.tallies.items()},
        "leases": flow.leases.out,
        "load": {url: flow.leases.load(url) for url in ("http://e0", "http://e1")},
        "counters": (flow.version, flow.chain, flow.next_step, flow.next_ordinal, flow.flowing),
        "capacity": [flow.capacity(version) for version in range(4)],
        "fates": {fate: count for fate, count in flow.fates.items() if count},
        "steps": list(flow.steps),
    }


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ASY_3_a_restart_changes_nothing(tmp_path_factory, data):
    desk = Desk(tmp_path_factory.mktemp("run"), configuration(max_staleness=1, groups_per_step=1, group_size=2))
    desk.begin()
    out = []
    for _ in range(data.draw(st.integers(5, 40))):
        version = desk.flow.version or 0
        event = data.draw(st.sampled_from(["lease", "receipt", "receipt", "step", "expire", "evaluate", "lost engine"]))
        if event == "lease":
            out += desk.flow.lease("w0", data.draw(st.integers(1, 5)))
        elif event == "receipt" and out:
            lease = out.pop(data.draw(st.integers(0, len(out) - 1)))
            infra = data.draw(st.integers(0, 5)) == 0
            desk.flow.receive(answer(lease, outcome=Outcome.INFRA if infra else Outcome.SCORED))
        elif event == "step":
            if desk.flow.batch(version) is not None and data.draw(st.booleans()):
                desk.commit(version)
                desk.engine(version + 1)
        elif event == "expire":
            desk.clock.now += 130
            desk.flow.tick()
        elif event == "evaluate":
            desk.flow.evaluate(f"at-{desk.flow.version}", "heldout", 2, 2, 1.0)
        elif event == "lost engine":
            desk.flow.engine_left("http://e0")
            desk.engine(version)
    before = snapshot(desk)
    desk.reopen()
    assert snapshot(desk) == before
    desk.reopen()
    assert snapshot(desk) == before
    desk.close()


def test_a_batch_is_cut_once(tmp_path):
    desk = Desk(tmp_path, CONFIG)
    drive(desk, steps=1)
    record = desk.flow.batch(0)
    desk.reopen()
    assert desk.flow.batch(0) == record
    with pytest.raises(Conflict, match="before batch 1"):
        desk.flow.batch(2)
    desk.commit(0)  # a repeat
    assert desk.flow.version == 1
    desk.close()


def test_rows_are_never_changed(tmp_path):
    desk = Desk(tmp_path, CONFIG)
    drive(desk, steps=1)
    for table in ("groups", "leases", "receipts", "batches", "fates", "versions"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            desk.ledger.db.execute(f"DELETE FROM {table}")
    receipt = decode(desk.ledger.db.execute("SELECT record FROM receipts").fetchone()[0], Receipt)
    assert not desk.ledger.receive(receipt, 0)
    desk.close()


def test_one_orchestrator_at_a_time(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(LedgerError, match="another orchestrator"):
        Ledger(tmp_path / "ledger.sqlite")
    ledger.close()
    Ledger(tmp_path / "ledger.sqlite").close()


def test_a_damaged_file_is_a_sentence_and_stays_as_it_is(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"\x07" * 8192)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite is damaged .* start another run"):
        Ledger(tmp_path / "ledger.sqlite")
    assert (tmp_path / "ledger.sqlite").read_bytes() == b"\x07" * 8192


def test_other_formats_are_refused(tmp_path):
    Ledger(tmp_path / "ledger.sqlite").close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute(f"PRAGMA user_version={FORMAT + 1}")
    with pytest.raises(LedgerError, match="format"):
        Ledger(tmp_path / "ledger.sqlite")


def test_other_tasks_are_refused(tmp_path):
    desk = Desk(tmp_path, CONFIG, task_count=5)
    desk.ledger.close()
    desk.task_count = 6
    with pytest.raises(LedgerError, match="prompt order"):
        desk.open()


def test_half_a_transaction_is_none(tmp_path):
    desk = Desk(tmp_path, CONFIG)
    desk.begin()
    with pytest.raises(RuntimeError), desk.ledger.transaction():
        desk.ledger.version(7, "set", "x")
        raise RuntimeError
    desk.reopen()
    assert desk.flow.version == 0
    desk.close()
