"""What the orchestrator is told and cannot be: refused over HTTP with a sentence, and nothing of it is kept."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from stretto.records import EngineStatus, Outcome, Trained
from stretto.rollouts.census import census

from .peers import Client, Service
from .world import Desk, answer, configuration

RECEIPTS: dict[str, dict[str, Any]] = {
    "it must be finite": {"reward": math.nan},
    "reward is inf": {"reward": math.inf},
    "scale it down": {"reward": 1e300},
    "seconds is nan": {"seconds": math.nan},
    "turns is -1": {"turns": -1},
    "read is nan": {"behaviour": {"read": math.nan}},
    "11 sampled of 10 tokens": {"sampled": 11},
    "-1 sampled": {"sampled": -1},
    "no key": {"key": ""},
    "belongs to group": {"group": "g0000099"},
    "no range of policy versions": {"oldest_version": 3, "newest_version": 1},
    "versions -2 to 0": {"oldest_version": -2},
    "version 7 does not exist": {"newest_version": 7},
}


async def test_malformed_receipts_are_refused_at_receipt_and_leave_nothing(tmp_path):
    service = Service(configuration(max_staleness=0), tmp_path / "run")
    await service.start()
    client = Client(service)
    try:
        await client.json("POST", "/version", json={"version": 0, "chain": "a"})
        await client.engine(0)
        await client.json("POST", "/start", json={})
        lease = (await client.lease("w0", 1))[0]
        for sentence, wrong in RECEIPTS.items():
            status, body = await client.ask("POST", "/receipts", [answer(lease, **wrong)])
            assert status == 400 and sentence in body.decode(), (wrong, body)
        counts = census(service.run / "ledger.sqlite")
        assert counts is not None and counts["receipts"] == {} and counts["leases"]["out"] == 1
        assert await client.receipt(answer(lease)) == 200, "and the right one is taken"

        lease = {"worker": "w0", "slots": 1, "life": 1, "number": 1}
        evaluate = {"name": "e", "split": "heldout", "attempts": 1, "temperature": 0.0}
        for path, words, sentence in (
            ("/lease", {**lease, "slots": 0}, "a slot at least"),
            ("/lease", {**lease, "worker": ""}, "needs a name"),
            ("/lease", {"worker": "w0", "slots": 1}, "missing required field `life`"),
            ("/version", {"version": -1, "chain": "a"}, "the first one is 0"),
            ("/evaluate", {**evaluate, "attempts": 0}, "an attempt at least"),
            ("/evaluate", {**evaluate, "tasks": 0}, "at least"),
            ("/evaluate", {**evaluate, "name": "train"}, "cannot be named"),
            ("/evaluate", {**evaluate, "temperature": -1.0}, "temperature of 0 or more"),
        ):
            status, body = await client.ask("POST", path, json=words)
            assert status == 400 and sentence in body.decode(), (path, words, body)
        for record in (
            EngineStatus(url="http://e9", cluster="c", version=-1, fingerprint=""),
            EngineStatus(url="e9", cluster="c", version=0, fingerprint=""),
        ):
            status, body = await client.ask("POST", "/engine", record)
            assert status == 400 and b"a version of 0 or more" in body
        for version in ("x", "", "1.5"):
            status, body = await client.ask("GET", f"/batch?version={version}")
            assert status == 400 and b"a whole number" in body
        status, body = await client.ask("POST", "/trained", Trained(batch=0, version=5))
        assert status == 400 and b"batch 0 makes version 1, not 5" in body
        assert msgspec.json.decode((await client.ask("GET", "/health"))[1])["ready"]
    finally:
        await client.session.close()
        service.kill()


@pytest.mark.parametrize("outcome", [Outcome.SCORED, Outcome.FAULT])
def test_the_largest_rewards_there_are_make_finite_advantages(tmp_path, outcome):
    desk = Desk(tmp_path, configuration(max_staleness=0))
    desk.begin()
    for index, lease in enumerate(desk.flow.lease("w0", 100)):
        desk.flow.receive(answer(lease, outcome=outcome, reward=1e6 if index % 2 else -1e6))
    batch = desk.batch(0)
    assert batch is not None and batch.items and all(math.isfinite(item.advantage) for item in batch.items)
    desk.close()
