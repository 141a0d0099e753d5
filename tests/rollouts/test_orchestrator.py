"""The orchestrator as a process, over HTTP: the bound under random delays, batches that do not change, leases
that expire, evaluations first, refusals with sentences, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

import msgspec

from stretto.records import PAUSED_HEADER, Outcome, Trained
from stretto.watch.metrics import read

from .peers import Client, Service, Trainer, Worker, launch
from .world import answer, configuration


@contextlib.asynccontextmanager
async def serving(tmp_path, **rollouts) -> AsyncIterator[Client]:
    service = Service(configuration(**rollouts), tmp_path / "run")
    await service.start()
    client = Client(service)
    try:
        yield client
    finally:
        await client.session.close()
        service.kill(signal.SIGTERM)


async def test_bound_under_random_delays(tmp_path):
    async with serving(tmp_path, max_staleness=2) as client:
        trainer = Trainer(client, seed=1, seconds=0.1)
        workers = [Worker(client, f"w{number}", number, seconds=0.05) for number in range(2)]
        await trainer.start()
        for worker in workers:
            worker.serving = trainer.serving.get
        running = [asyncio.create_task(worker.run()) for worker in workers]
        await trainer.steps(0, 12)
        status = await client.json("GET", "/status")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert status["version"] == 12
        assert status["groups"]["dropped"] == {}
        assert status["groups"]["trained"] == 36
        assert client.service.kill(signal.SIGTERM) == 0
        lines = read(client.service.run / "metrics.jsonl")
        assert len([line for line in lines if line["kind"] == "rollout"]) == sum(len(w.done) for w in workers)
        assert [line for line in lines if line["kind"] == "queue"]


async def test_leases_refusals_and_evaluations(tmp_path):
    async with serving(tmp_path, max_staleness=0, deadline_seconds=1.0) as client:
        assert await client.lease("w0", 4) == []  # nothing flows yet
        await client.json("POST", "/version", json={"version": 0, "chain": "a"})
        await client.engine(0)
        await client.json("POST", "/start", json={})
        leases = await client.lease("w0", 6)
        assert [lease.group for lease in leases] == ["g0000000"] * 4 + ["g0000001"] * 2
        assert {lease.version for lease in leases} == {0} and {lease.engine for lease in leases} == {"http://e0"}

        # Evaluations come before training.
        asked = {"name": "before", "split": "heldout", "tasks": 2, "attempts": 2, "temperature": 0.5}
        id = (await client.json("POST", "/evaluate", json=asked))["id"]
        assert (await client.json("POST", "/evaluate", json=asked))["id"] == id
        evaluation = await client.lease("w1", 5)
        assert [lease.purpose for lease in evaluation] == ["before"] * 4 + ["train"]
        for lease in evaluation[:4]:
            assert await client.receipt(answer(lease, "w1")) == 200
        result = await client.json("GET", f"/evaluate/{id}")
        assert result["done"] and result["finished"] == result["total"] == 4
        assert result["solved"] == [1, 1] and result["attempts"] == 2 and result["version"] == 0
        assert result["behaviour"] == {"read": 1.0} and result["outcomes"] == {"scored": 4}

        # An expired lease goes to another worker, under another id; the first answer to a slot is the one that counts.
        for lease in leases[1:]:
            assert await client.receipt(answer(lease)) == 200
        await client.receipt(answer(evaluation[4], "w1"))
        expired = leases[0]
        again = []
        for _ in range(40):
            again = [lease for lease in await client.lease("w1", 1) if lease.group == expired.group]
            if again:
                break
        assert again[0].rollout == f"{expired.rollout}r1"
        assert again[0].sampling == expired.sampling
        assert await client.receipt(answer(expired)) == 200
        assert await client.receipt(answer(again[0], "w1", outcome=Outcome.INFRA)) == 200  # too late: a no-op
        rows = [line for line in read(client.service.run / "metrics.jsonl") if line["kind"] == "rollout"]
        assert [row["rollout"] for row in rows if row["group"] == expired.group][-1] == expired.rollout

        # Whatever is wrong is said in a sentence.
        unknown = answer(expired, rollout="g9999999-00")
        status, body = await client.ask("POST", "/receipts", [unknown, answer(expired)])
        assert status == 200 and msgspec.json.decode(body) == {"unknown": ["g9999999-00"]}
        status, body = await client.ask("POST", "/receipts", json=[{"rollout": 3}])
        assert status == 400
        status, body = await client.ask("POST", "/receipts", [answer(expired, sampled=99), answer(expired)])
        assert status == 400 and b"99 sampled of 10" in body
        status, body = await client.ask("GET", "/batch?version=5")
        assert status == 409 and b"before batch 0" in body
        status, body = await client.ask("POST", "/trained", Trained(batch=0, version=1))
        assert status == 409
        status, body = await client.ask("POST", "/evaluate", json={**asked, "split": "nowhere"})
        assert status == 400 and b"heldout" in body
        assert (await client.ask("GET", "/evaluate/none"))[0] == 404


async def test_the_trainer_hears_whether_training_is_paused(tmp_path):
    async with serving(tmp_path, max_staleness=0) as client:
        await client.json("POST", "/version", json={"version": 0, "chain": "a"})

        async def ask(query: str = "&wait=1") -> tuple[int, bool]:
            async with client.session.get(f"{client.service.url}/batch?version=0{query}") as response:
                return response.status, PAUSED_HEADER in response.headers

        assert await ask("") == (204, True)
        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await client.json("POST", "/start", json={})
        assert await waiting == (204, True)  # it was paused while this request waited
        assert time.monotonic() - began < 2.0, "the start of training ends the wait for a batch at once"
        assert await ask("") == (204, False)


async def test_malformed_bodies_and_a_second_orchestrator(tmp_path):
    async with serving(tmp_path) as client:
        other = launch(client.service.run, 1)
        for where in ("/lease", "/heartbeat", "/version", "/evaluate", "/engine", "/trained", "/receipts"):
            for body in (b"", b"{", b"[1]", b'{"worker": 1}'):
                async with client.session.post(client.service.url + where, data=body) as response:
                    assert response.status == 400, (where, body)
                    assert await response.text()
        assert (await client.json("GET", "/health"))["role"] == "orchestrator"
        _, error = await asyncio.to_thread(other.communicate, timeout=20)
        assert other.returncode != 0
        assert "in use by another orchestrator" in error and error.count("\n") == 1
