"""Kill anything, any time: 2N steps equal N + kill -9 + N, and every prompt is trained once or
accounted for with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

from .peers import Client, Service, Trainer, Worker
from .world import configuration


@contextlib.asynccontextmanager
async def crew(tmp_path, **rollouts):
    service = Service(configuration(**rollouts), tmp_path, train=7)
    await service.start()
    client = Client(service)
    trainer = Trainer(client, seed=1, seconds=0.03)
    workers = [Worker(client, f"w{number}", number, seconds=0.02) for number in range(2)]
    for worker in workers:
        worker.serving = trainer.serving.get
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield service, client, trainer
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await client.session.close()
        service.kill()


def account(run) -> dict[int, list[str]]:
    """Fates of every ordinal."""
    with contextlib.closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        rows = db.execute(
            "SELECT ordinal, fate, fates.reason FROM groups LEFT JOIN fates ON grp = id WHERE purpose = 'train'"
        )
        fates: dict[int, list[str]] = {}
        for ordinal, fate, _ in rows:
            fates.setdefault(ordinal, []).append(fate or "live")
    return fates


async def test_LED_1_synchronous_run_is_the_same_after_a_kill(tmp_path):
    async with crew(tmp_path / "whole", max_staleness=0) as (_, _, trainer):
        await trainer.start()
        await trainer.steps(0, 5)
        whole = trainer
    async with crew(tmp_path / "halves", max_staleness=0) as (service, client, trainer):
        await trainer.start()
        await trainer.steps(0, 3)
        await asyncio.sleep(0.02)  # leases of step 3 are out
        service.kill()
        await service.start()
        # The trainer died too, before its checkpoint of version 3: it goes on from 2 and gets the same batch again.
        await trainer.start(2, "chain-1")
        await trainer.steps(2, 5)
        assert trainer.batches[2] == trainer.batches[3]
        halves = trainer.batches[:3] + trainer.batches[4:]
        tasks = trainer.tasks[:3] + trainer.tasks[4:]
        assert (await client.json("GET", "/status"))["groups"]["dropped"] == {}
    assert tasks == whole.tasks

    def members(batch):
        return sorted((item.rollout.partition("r")[0], item.reward, item.advantage) for item in batch.items)

    assert [members(batch) for batch in halves] == [members(batch) for batch in whole.batches]


async def test_LED_3_asynchronous_run_loses_nothing(tmp_path):
    async with crew(tmp_path, max_staleness=2) as (service, _, trainer):
        await trainer.start()
        for first in (0, 3):
            await trainer.steps(first, first + 3)
            service.kill()
            await service.start()
            await trainer.start(first + 3, f"chain-{first}")
        await trainer.steps(6, 9)
    trained = [item.rollout for batch in trainer.batches for item in batch.items]
    assert len(trained) == len(set(trained))
    fates = account(tmp_path)
    assert sorted(fates) == list(range(len(fates)))  # no ordinal was skipped
    assert all(len(found) == 1 for found in fates.values())
    assert sum(found == ["batched"] for found in fates.values()) == sum(batch.groups for batch in trainer.batches)
    order = [task for tasks in trainer.tasks for task in tasks]
    assert set(order[:7]) <= {f"train/{number}" for number in range(7)}
