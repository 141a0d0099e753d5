"""The asynchronous flow where public frameworks broke: deadlocks at staleness 0, starving tasks, idle slots, surplus,
stuck rollouts, blocked loops, ends that hang. In virtual time where that is enough, else with real processes."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.records import Lease, Outcome
from stretto.rollouts import standing
from stretto.rollouts.census import census
from stretto.rollouts.watchdog import Watchdog
from stretto.watch.metrics import read

from .peers import Client, Service, Trainer, Worker
from .world import Desk, World, answer, configuration


def play(desk: Desk, leases: list[Lease], **changes) -> None:
    for lease in leases:
        desk.flow.receive(answer(lease, **changes))


def events(desk: Desk) -> list[str]:
    return [line["text"] for line in read(desk.folder / "metrics.jsonl") if line["kind"] == "event"]


def test_ASY_2_staleness_0_goes_on_while_engines_take_30_s_to_update(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0))
    desk.begin()
    for version in range(5):
        leases = desk.flow.lease("w0", 100)
        assert len(leases) == 12 and {lease.version for lease in leases} == {version}
        play(desk, leases)
        batch = desk.batch(version)
        assert batch is not None and set(batch.staleness) == {0}
        desk.commit(version)
        for _ in range(30):  # the version has moved, no engine serves it yet
            desk.clock.now += 1.0
            desk.flow.tick()
            desk.engine(version)
            assert desk.flow.lease("w0", 100) == []
        desk.engine(version + 1)
    desk.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bound=st.integers(0, 3),
    lead=st.sampled_from(["bound", 0, 1]),
    events=st.lists(st.sampled_from(["lease", "answer", "train", "engine", "restart"]), min_size=20, max_size=60),
)
def test_ASY_3_capacity_is_the_same_after_a_restart(tmp_path_factory, bound, lead, events):
    lead = "bound" if lead == "bound" or lead > bound else lead
    desk = Desk(tmp_path_factory.mktemp("run"), configuration(max_staleness=bound, lead=lead))
    desk.begin()
    out: list[Lease] = []
    for event in events:
        if event == "lease":
            out += desk.flow.lease("w0", 8)
        elif event == "answer":
            play(desk, out[:6])
            out = out[6:]
        elif event == "train":
            version = desk.flow.version or 0
            if desk.batch(version) is not None:
                desk.commit(version)
        elif event == "engine":
            desk.engine(desk.flow.version or 0)
        else:
            serving = {engine.url: engine.version for engine in desk.flow.engines.by_url.values()}
            before = [desk.flow.capacity(version) for version in range(8)]
            desk.reopen()
            assert [desk.flow.capacity(version) for version in range(8)] == before
            for url, version in serving.items():  # followers say it again
                desk.engine(version, url)
        newest = max(desk.flow.version or 0, *(engine.version for engine in desk.flow.engines.by_url.values()))
        live = len(desk.flow.training)
        ahead = bound if lead == "bound" else lead
        assert live <= (ahead + newest + 1 - desk.flow.next_step) * 3 + 3 or live <= (bound + 1) * 3
    desk.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_ASY_5_every_task_ends_when_many_are_slow(tmp_path, seed):
    """A third of the rollouts takes ten times longer: none is cancelled to start again, none is passed over."""
    desk = Desk(tmp_path, configuration(max_staleness=2, deadline_seconds=70.0))
    world = World(desk, seed, slow=0.3)
    world.run(steps=15)
    reasons = desk.ledger.db.execute("SELECT DISTINCT reason FROM lapses").fetchall()
    oldest = min(desk.flow.training, default="g9999999")
    ended = {ordinal for ordinal in desk.fates() if ordinal < int(oldest[1:])}
    assert reasons == [("infra",)] and len(ended) == int(oldest[1:])
    assert not any(fate == "dropped" for fate, _, _ in desk.fates().values())
    assert desk.flow.next_ordinal - int(oldest[1:]) <= 4 * 3, "a slow group holds its place, not the run"
    desk.close()


def test_ASY_6_all_slots_are_filled_by_one_request_after_a_step(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=1))
    desk.begin()
    play(desk, desk.flow.lease("w0", 100))
    assert desk.batch(0) is not None
    desk.commit(0)
    desk.engine(1)
    assert len(desk.flow.lease("w0", 100)) == 12, "all that the new version admits, not a group at a time"
    desk.close()


def test_ASY_7_what_is_in_flight_is_what_can_be_trained_and_surplus_feeds_the_next_batch(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=2))
    desk.begin()
    leases = desk.flow.lease("w0", 1000)
    assert len(leases) == 3 * 3 * 4, "three steps of three groups of four, whatever the worker has free"
    play(desk, leases)
    seen = []
    for version in range(3):
        batch = desk.batch(version)
        assert batch is not None and batch.groups == 3
        seen += [item.group for item in batch.items]
        desk.commit(version)
    assert sorted(set(seen)) == [f"g{ordinal:07d}" for ordinal in range(9)] and len(seen) == 36
    desk.close()


def test_ASY_8_nothing_starts_that_cannot_be_trained_and_an_empty_batch_is_legal(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0, groups_per_step=1))
    desk.begin(3)
    desk.flow.engine_left("http://e0")
    desk.engine(2)
    assert desk.flow.lease("w0", 100) == [], "a rollout of version 2 would be too old for the step that updates 3"
    desk.engine(3)
    for _ in range(4):
        play(desk, desk.flow.lease("w0", 100), reward=1.0)
    batch = desk.batch(3)
    assert batch is not None and batch.items == [] and batch.groups == batch.dropped_equal == 4
    desk.commit(3)
    desk.close()


def slow_packer(seconds: float) -> None:
    time.sleep(seconds)


async def test_ASY_9_a_loop_that_stands_still_is_alarmed_and_what_holds_it_is_named():
    said: list[str] = []
    watchdog = Watchdog(said.append, limit=0.3)
    await asyncio.sleep(0.5)
    assert said == []
    slow_packer(1.0)
    await asyncio.sleep(0.2)
    watchdog.close()
    assert len(said) == 1 and "stood still for 0.3 s" in said[0] and "slow_packer" in said[0]


async def test_ASY_9_a_stand_still_of_the_orchestrator_is_nobody_elses_silence(tmp_path):
    service = Service(configuration(max_staleness=0), tmp_path / "run")
    await service.start()
    client = Client(service)
    try:
        await client.json("POST", "/version", json={"version": 0, "chain": "a"})
        await client.engine(0)
        await client.json("POST", "/start", json={})
        for lease in await client.lease("w0", 100):
            await client.receipt(answer(lease))
        assert service.process is not None
        service.process.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(client.batch(0))
        await asyncio.sleep(7.0)
        service.process.send_signal(signal.SIGCONT)
        assert await waiting is not None
        began = time.monotonic()
        await client.heartbeat("w0", [])
        assert time.monotonic() - began < 1.0
        said = [line["text"] for line in read(service.run / "metrics.jsonl") if line["kind"] == "event"]
        assert any("stood still" in text for text in said) and not any("silent" in text for text in said)
    finally:
        await client.session.close()
        service.kill(signal.SIGTERM)


def test_ASY_12_a_group_is_cut_at_its_deadline_and_the_step_goes_on(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0, groups_per_step=2, group_seconds=90.0))
    desk.begin()
    *leases, stuck = desk.flow.lease("w0", 8)
    play(desk, leases)
    assert desk.batch(0) is None
    desk.clock.now += 91.0
    desk.flow.heartbeat("w0")
    desk.flow.tick()
    batch = desk.batch(0)
    assert batch is not None and len(batch.items) == 7 and batch.rollouts == 7
    (text,) = [text for text in events(desk) if "cut at its deadline" in text]
    assert "3 of 4 members" in text and f"{stuck.rollout} by w0 (engine http://e0)" in text
    assert desk.flow.heartbeat("w0", [stuck.rollout]) == [stuck.rollout], "the worker may stop playing it"
    assert not desk.flow.receive(answer(stuck)), "and what it has to say comes too late"
    desk.reopen()
    assert not desk.flow.receive(answer(stuck)) and desk.flow.next_step == 1
    desk.close()


def test_ASY_12_a_group_with_too_few_answers_is_dropped_at_its_deadline_with_their_lengths(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0, groups_per_step=1, group_seconds=90.0))
    desk.begin()
    first = desk.flow.lease("w0", 4)[0]
    play(desk, [first], tokens=77)
    desk.clock.now += 91.0
    desk.reopen()  # the deadline is in the ledger, not in memory
    desk.flow.tick()
    assert desk.fates() == {0: ("dropped", None, "deadline")}
    assert any("dropped as deadline" in text and "77 to 77 tokens" in text for text in events(desk))
    desk.engine(0)
    assert {lease.group for lease in desk.flow.lease("w0", 4)} == {"g0000001"}
    desk.close()


async def test_ASY_13_a_run_without_latency_ends_cleanly_and_its_last_evaluation_is_recorded(tmp_path):
    service = Service(configuration(max_staleness=1), tmp_path / "run")
    await service.start()
    client = Client(service)
    trainer = Trainer(client, seed=1, seconds=0.0)
    worker = Worker(client, "w0", 0, seconds=0.0)
    running = asyncio.create_task(worker.run())
    try:
        await trainer.start()
        await trainer.steps(0, 20)
        await client.json("POST", "/pause", json={})
        worker.seconds = 0.5  # the last evaluation is slow
        asked = {"name": "after", "split": "heldout", "tasks": 3, "attempts": 2, "temperature": 0.0}
        id = (await client.json("POST", "/evaluate", json=asked))["id"]
        end = time.monotonic() + 30
        while not (await client.json("GET", f"/evaluate/{id}"))["done"]:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.session.close()
        code = service.kill(signal.SIGTERM)
    assert code == 0
    assert [line["name"] for line in read(service.run / "metrics.jsonl") if line["kind"] == "eval"] == ["after"]


def test_ASY_15_memory_holds_what_is_live_and_no_more(tmp_path):
    """Sizes of all that a long run could pile up."""
    desk = Desk(tmp_path, configuration(max_staleness=1))
    world = World(desk, seed=5, dies=0.02)
    world.run(steps=40)
    flow = desk.flow
    most = (1 + 1 + 1) * 3 * 4  # leases of two steps, and of one more when all have equal rewards
    held = (sum(map(len, flow.leases.by_worker.values())), sum(map(len, flow.leases.by_engine.values())))
    assert max(len(flow.leases.out), *held) <= most and world.most_in_flight <= most / 4
    assert len(flow.leases.heard) == len(flow.leases.by_worker) == 2 and len(flow.leases.by_engine) == 2
    assert len(flow.evaluations.groups) == 0 and len(flow.steps) <= 4 and len(flow.recent) <= 16
    gauge = standing.queue(flow)
    assert gauge["in_flight"] == len(flow.leases.out) and gauge["ready_groups"] <= len(flow.training)
    desk.close()


@pytest.mark.parametrize("outcome", [Outcome.INFRA, Outcome.FAULT, Outcome.TRUNCATED, Outcome.VOID])
def test_ASY_11_every_end_is_an_outcome_that_is_counted(tmp_path, outcome):
    desk = Desk(tmp_path, configuration(max_staleness=0))
    desk.begin()
    lease = desk.flow.lease("w0", 1)[0]
    assert desk.flow.receive(answer(lease, outcome=outcome, reason="it broke"))
    lines = [line for line in read(tmp_path / "metrics.jsonl") if line["kind"] == "rollout"]
    assert [(line["rollout"], line["outcome"], line["reason"]) for line in lines] == [
        (lease.rollout, outcome.value, "it broke")
    ]
    desk.close()


def test_LED_5_a_restart_leases_nothing_before_an_engine_has_said_what_it_serves(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0))
    desk.begin()
    play(desk, desk.flow.lease("w0", 100))
    assert desk.batch(0) is not None
    desk.commit(0)
    desk.reopen()
    assert desk.flow.lease("w0", 100) == []
    desk.engine(0)  # the weights it started with
    assert desk.flow.lease("w0", 100) == []
    desk.engine(1)
    assert {lease.version for lease in desk.flow.lease("w0", 100)} == {1}
    desk.close()


def test_LED_6_opened_trained_and_dropped_are_counted_apart(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0, groups_per_step=2, group_seconds=50.0))
    desk.begin()
    leases = desk.flow.lease("w0", 8)
    play(desk, [lease for lease in leases if lease.group == "g0000000"])
    desk.clock.now += 51.0
    desk.flow.heartbeat("w0")
    desk.flow.tick()  # the other group had no answer: it is dropped, and its place is filled by the next prompt
    play(desk, desk.flow.lease("w1", 8))
    assert desk.batch(0) is not None
    counts = census(tmp_path / "ledger.sqlite")
    assert counts is not None
    expected = {"opened": 3, "open": 0, "ready": 0, "batched": 2, "trained": 0, "dropped": {"deadline": 1}}
    assert counts["ordinals"] == expected
    desk.commit(0)
    counts = census(tmp_path / "ledger.sqlite")
    assert counts is not None
    assert counts["ordinals"] == expected | {"batched": 0, "trained": 2}
    assert counts["leases"]["granted"] == 12 and counts["leases"]["answered"] == 8
    assert counts["leases"]["lapsed_by_reason"] == {"group deadline": 4} and counts["receipts"] == {"scored": 8}
    assert desk.flow.next_ordinal == 3, "the stream goes on from what was opened, whatever became of it"
    desk.close()
