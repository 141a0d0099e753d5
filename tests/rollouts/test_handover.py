"""What is on its way to a worker is not taken for lost, what is lost goes to another, and a worker is told from an
earlier one of its name."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.rollouts.handover import Call
from stretto.rollouts.leases import RECALL_SECONDS
from stretto.rollouts.refusals import Conflict
from stretto.watch.metrics import read

from .peers import Client, Service
from .world import Desk, answer, configuration


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0))
    desk.begin()
    desk.clock.now += RECALL_SECONDS + 1
    yield desk
    desk.close()


def ids(leases) -> list[str]:
    return [lease.rollout for lease in leases]


def test_what_is_on_its_way_is_not_lost_however_long_that_takes(desk):
    given = ids(desk.flow.lease("w0", 4, Call(1, 1)))
    for _ in range(8):
        desk.clock.now += 10
        assert desk.flow.heartbeat("w0", [], Call(1, 0)) == []
        desk.flow.tick()
    assert set(desk.flow.leases.out) == set(given)


def test_what_has_arrived_and_is_not_held_is_lost(desk):
    given = ids(desk.flow.lease("w0", 4, Call(1, 1)))
    desk.flow.heartbeat("w0", given[:1], Call(1, 1))
    assert set(desk.flow.leases.out) == {given[0]}
    assert ids(desk.flow.lease("w1", 3, Call(1, 1))) == [f"{rollout}r1" for rollout in given[1:]]


def test_a_repeated_request_is_answered_alike(desk):
    given = ids(desk.flow.lease("w0", 4, Call(1, 1)))
    assert ids(desk.flow.lease("w0", 4, Call(1, 1))) == given
    desk.flow.receive(answer(desk.flow.lease("w0", 4, Call(1, 1))[0]))
    assert ids(desk.flow.lease("w0", 4, Call(1, 1))) == given[1:], "what was answered is not given again"
    assert not set(ids(desk.flow.lease("w0", 4, Call(1, 2)))) & set(given)
    assert desk.flow.lease("w0", 4, Call(1, 1)) == [], "nobody reads the answer to an old request"


def test_a_heartbeat_older_than_what_has_arrived_takes_nothing_away(desk):
    first = ids(desk.flow.lease("w0", 4, Call(1, 1)))
    second = ids(desk.flow.lease("w0", 4, Call(1, 2)))  # so the first has arrived
    desk.flow.heartbeat("w0", [], Call(1, 0))  # sent before that, and late
    assert set(desk.flow.leases.out) == {*first, *second}
    desk.flow.heartbeat("w0", first, Call(1, 1))
    assert set(desk.flow.leases.out) == {*first, *second}
    desk.flow.heartbeat("w0", second, Call(1, 2))
    assert set(desk.flow.leases.out) == set(second)


def test_a_worker_that_started_anew_gives_everything_back_at_once(desk):
    given = ids(desk.flow.lease("w0", 4, Call(1, 5)))
    fresh = ids(desk.flow.lease("w0", 4, Call(2, 1)))
    assert not set(given) & set(desk.flow.leases.out) and set(fresh) <= set(desk.flow.leases.out)
    for late in (lambda: desk.flow.lease("w0", 4, Call(1, 6)), lambda: desk.flow.heartbeat("w0", given, Call(1, 5))):
        with pytest.raises(Conflict, match="another worker named 'w0' has started since"):
            late()
    assert set(fresh) <= set(desk.flow.leases.out)


def test_a_restart_waits_before_it_takes_anything_for_lost(desk):
    given = ids(desk.flow.lease("w0", 4, Call(1, 1)))
    desk.reopen()
    desk.flow.heartbeat("w0", [], Call(1, 1))
    assert set(desk.flow.leases.out) == set(given)
    desk.clock.now += RECALL_SECONDS + 1
    desk.flow.heartbeat("w0", given[:2], Call(1, 1))
    assert set(desk.flow.leases.out) == set(given[:2])


def test_whoever_falls_silent_or_dies_is_forgotten(desk):
    for worker in ("w0", "w1"):
        desk.flow.lease(worker, 2, Call(7, 1))
    desk.clock.now += 60
    desk.flow.tick()
    assert len(desk.flow.handover) == 0
    desk.flow.lease("w0", 2, Call(3, 1))  # its clock was set back: with nobody else there that is no matter
    desk.flow.worker_left("w0")
    desk.flow.lease("w0", 2, Call(2, 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["ask", "arrive", "lose", "beat", "late beat"]), max_size=30))
def test_nothing_a_worker_has_or_will_get_lapses(tmp_path_factory, events):
    """A worker that repeats what is not answered never loses a lease, in whatever order messages are delivered."""
    desk = Desk(tmp_path_factory.mktemp("handover"), configuration(max_staleness=0, groups_per_step=20))
    desk.begin()
    desk.clock.now += RECALL_SECONDS + 1
    held: list[str] = []
    answered, under_way, granted = 0, None, set()
    beats = [(held.copy(), Call(1, 0))]
    for event in events:
        if event == "ask":
            under_way = ids(desk.flow.lease("w0", 2, Call(1, answered + 1)))
            granted |= set(under_way)
        elif event == "arrive" and under_way is not None:
            held, answered, under_way = held + under_way, answered + 1, None
            beats.append((held.copy(), Call(1, answered)))
        elif event == "lose":
            under_way = None
        elif event == "beat":
            desk.flow.heartbeat("w0", *beats[-1])
        elif event == "late beat":
            desk.flow.heartbeat("w0", *beats[len(beats) // 2])
        assert set(desk.flow.leases.out) == granted
    desk.close()


async def test_ASY_9_an_answer_that_takes_long_starts_no_storm(tmp_path):
    """Over HTTP: the orchestrator stands still for longer than a worker waits, answers to nobody, and goes on."""
    service = Service(configuration(max_staleness=0, groups_per_step=8), tmp_path / "run")
    await service.start()
    client = Client(service)
    try:
        await client.json("POST", "/version", json={"version": 0, "chain": "a"})
        await client.engine(0)
        await client.json("POST", "/start", json={})
        await client.heartbeat("w0", [])
        await asyncio.sleep(RECALL_SECONDS + 0.5)
        assert service.process is not None
        service.process.send_signal(signal.SIGSTOP)
        words = {"worker": "w0", "slots": 16, "life": client.life, "number": 1}
        lost = asyncio.create_task(client.json("POST", "/lease", json=words))  # its answer is never read
        beat = {"worker": "w0", "rollouts": [], "life": client.life, "number": 0}
        beating = asyncio.create_task(client.json("POST", "/heartbeat", json=beat))
        await asyncio.sleep(2.0)
        lost.cancel()
        service.process.send_signal(signal.SIGCONT)
        await beating
        await client.json("POST", "/heartbeat", json=beat)
        given = await client.lease("w0", 16)
        assert len(given) == 16 and all("r" not in lease.rollout for lease in given)
        assert await client.heartbeat("w0", ids(given)) == []
        end = time.monotonic() + 5
        while (status := await client.json("GET", "/status"))["in_flight"] != 16:
            assert time.monotonic() < end, status
            await asyncio.sleep(0.05)
        said = [line["text"] for line in read(service.run / "metrics.jsonl") if line["kind"] == "event"]
        assert not any("lapsed" in text for text in said)
    finally:
        await client.session.close()
        service.kill()
