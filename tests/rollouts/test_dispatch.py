"""Who gets which lease: groups stay together on the least loaded engine, lagging engines get nothing, silent workers
and engines lose theirs, a slot nobody answers ends, and a stall is explained."""

from __future__ import annotations

import pytest

from stretto.records import Outcome
from stretto.rollouts import standing
from stretto.rollouts.engines import SILENCE_SECONDS as ENGINE_SILENCE
from stretto.rollouts.leases import SILENCE_SECONDS
from stretto.rollouts.refusals import Unknown
from stretto.watch.metrics import read

from .world import Desk, answer, configuration


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0))
    yield desk
    desk.close()


def events(desk):
    return [line["text"] for line in read(desk.folder / "metrics.jsonl") if line["kind"] == "event"]


def test_LED_5_nothing_flows_before_start_version_and_engine(desk):
    assert desk.flow.lease("w0", 9) == []
    desk.flow.set_version(0, "c")
    assert desk.flow.lease("w0", 9) == []
    desk.engine(0)
    assert desk.flow.lease("w0", 9) == []
    desk.flow.switch(True)
    assert len(desk.flow.lease("w0", 9)) == 9
    desk.flow.switch(False)
    assert desk.flow.lease("w0", 9) == []


def test_groups_go_whole_to_the_least_loaded_engine(desk):
    desk.begin()
    desk.engine(0, "http://e1", "c1")
    leases = desk.flow.lease("w0", 12)
    engines = {lease.group: set() for lease in leases}
    for lease in leases:
        engines[lease.group].add(lease.engine)
    assert all(len(used) == 1 for used in engines.values())
    counts = sorted(len([lease for lease in leases if lease.engine == url]) for url in ("http://e0", "http://e1"))
    assert counts == [4, 8]
    assert len({lease.sampling.seed for lease in leases}) == 12


def test_the_rest_of_a_group_follows_to_the_same_engine(desk):
    desk.begin()
    desk.engine(0, "http://e1", "c1")
    first = desk.flow.lease("w0", 2)
    rest = desk.flow.lease("w1", 2)
    assert {lease.group for lease in first + rest} == {"g0000000"}
    assert len({lease.engine for lease in first + rest}) == 1


def step(desk, version):
    """All groups of one step played and committed; engines are not told."""
    for lease in desk.flow.lease("w0", 100):
        desk.flow.receive(answer(lease))
    assert desk.flow.batch(version) is not None
    desk.commit(version)


def test_synchronous_excludes_a_lagging_engine_and_does_not_wait_for_it(desk):
    desk.begin()
    desk.engine(0, "http://e1", "c1")
    step(desk, 0)
    assert desk.flow.lease("w0", 100) == []  # nobody serves version 1
    desk.engine(1, "http://e1", "c1")
    leases = desk.flow.lease("w0", 100)
    assert len(leases) == 12
    assert {(lease.engine, lease.version) for lease in leases} == {("http://e1", 1)}


def test_an_engine_may_be_a_step_ahead_of_the_commit(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=0))
    desk.begin()
    for lease in desk.flow.lease("w0", 100):
        desk.flow.receive(answer(lease))
    assert desk.flow.batch(0) is not None
    desk.engine(1)  # published and swapped before the trainer's word arrives
    leases = desk.flow.lease("w0", 100)
    assert len(leases) == 12 and {lease.version for lease in leases} == {1}
    desk.close()


def test_lag_beyond_the_bound_gets_no_leases(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=2))
    desk.begin()
    for version in range(3):
        for lease in desk.flow.lease("w0", 100):
            desk.flow.receive(answer(lease))
        assert desk.flow.batch(version) is not None
        desk.commit(version)
    assert {e.version for e in desk.flow.engines.by_url.values()} == {0}  # three steps behind now
    assert desk.flow.lease("w0", 100) == []
    desk.engine(3)
    assert len(desk.flow.lease("w0", 100)) > 0
    desk.close()


def test_a_late_answer_counts_if_it_is_the_first(desk):
    desk.begin()
    lease = desk.flow.lease("w0", 1)[0]
    desk.clock.now = lease.deadline + 1
    desk.flow.heartbeat("w0")
    desk.flow.heartbeat("w1")
    desk.flow.tick()
    assert desk.flow.lease("w0", 1)[0].rollout != f"{lease.rollout}r1"  # not to the one that did not answer
    again = desk.flow.lease("w1", 1)[0]
    assert (again.rollout, again.sampling) == (f"{lease.rollout}r1", lease.sampling)
    assert desk.flow.receive(answer(lease))
    assert not desk.flow.receive(answer(again, "w1"))
    assert again.rollout not in desk.flow.leases.out
    assert any("lapsed (deadline)" in text and "w0" in text and lease.rollout in text for text in events(desk))


def test_a_silent_worker_loses_its_leases_before_their_deadline(desk):
    desk.begin()
    lost = desk.flow.lease("w0", 4)
    kept = desk.flow.lease("w1", 4)
    desk.clock.now += SILENCE_SECONDS - 1
    desk.flow.heartbeat("w1")
    desk.clock.now += 2
    desk.flow.tick()
    assert set(desk.flow.leases.out) == {lease.rollout for lease in kept}
    assert [lease.rollout for lease in desk.flow.lease("w1", 4)] == [f"{lease.rollout}r1" for lease in lost]


def test_the_rollouts_of_an_engine_that_leaves_go_on_at_another(desk):
    desk.begin()
    leases = desk.flow.lease("w0", 4)
    desk.flow.engine_left("http://e0")
    assert desk.flow.move(leases[0].rollout, "http://e0") is None  # there is no other: ask again
    desk.engine(0, "http://e1", "c1")
    moved = [desk.flow.move(lease.rollout, "http://e0") for lease in leases]
    assert moved == ["http://e1"] * 4
    assert [desk.flow.move(lease.rollout, "http://e0") for lease in leases] == moved  # a repeat is answered alike
    assert (desk.flow.leases.load("http://e0"), desk.flow.leases.load("http://e1")) == (0, 4)
    desk.reopen()
    assert desk.flow.leases.load("http://e1") == 4
    for lease in leases:
        assert desk.flow.receive(answer(lease, engine="http://e1"))
    assert desk.flow.training["g0000000"].finished
    with pytest.raises(Unknown, match="nobody waits"):
        desk.flow.move(leases[0].rollout, "http://e1")


def test_a_failed_engine_gets_nothing_until_its_follower_has_looked_at_it(desk):
    desk.begin()
    desk.engine(0)  # renewed: somebody looks after it
    lease = desk.flow.lease("w0", 1)[0]
    desk.flow.engine_failed("http://e0", "w0", lease.rollout)
    desk.clock.now += 10
    assert desk.flow.move(lease.rollout, "http://e0") is None and desk.flow.lease("w1", 4) == []
    assert any("engine http://e0 failed g0000000-00 of w0" in text for text in events(desk))
    desk.engine(0)
    assert desk.flow.move(lease.rollout, "http://e0") == "http://e0" and len(desk.flow.lease("w1", 3)) == 3


def test_nothing_moves_to_an_engine_that_would_make_its_group_older(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=2))
    desk.begin(1)
    lease = desk.flow.lease("w0", 1)[0]
    desk.engine(0, "http://behind", "c1")
    desk.flow.engine_left("http://e0")
    assert desk.flow.move(lease.rollout, "http://e0") is None
    desk.engine(1, "http://behind", "c1")
    assert desk.flow.move(lease.rollout, "http://e0") == "http://behind"
    desk.close()


def test_the_leases_of_a_worker_known_to_be_dead_return_at_once(desk):
    desk.begin()
    lost = desk.flow.lease("w0", 4)
    desk.flow.worker_left("w0")
    assert [lease.rollout for lease in desk.flow.lease("w1", 4)] == [f"{lease.rollout}r1" for lease in lost]
    assert all(slot.unanswered == 0 for slot in desk.flow.training["g0000000"].slots)


def test_a_worker_hears_what_nobody_waits_for(desk):
    desk.begin()
    leases = desk.flow.lease("w0", 4)
    held = [lease.rollout for lease in leases]
    desk.flow.receive(answer(leases[0]))
    desk.clock.now = leases[0].deadline + 1  # late, but it may still be the first to answer
    desk.flow.heartbeat("w1")
    desk.flow.tick()
    again = desk.flow.lease("w1", 1)[0]
    desk.flow.receive(answer(again, "w1"))
    answered = again.rollout.removesuffix("r1")
    assert desk.flow.heartbeat("w0", [*held, "never"]) == [held[0], answered, "never"]


def test_an_engine_whose_follower_falls_silent_has_left(desk):
    desk.begin()
    desk.engine(0, "http://e1", "c1")
    desk.engine(0, "http://e1", "c1")  # renewed, so it is expected to be renewed
    desk.clock.now += ENGINE_SILENCE + 1
    desk.flow.tick()
    assert set(desk.flow.engines.by_url) == {"http://e0"}  # announced once: somebody else looks after it


def test_a_slot_nobody_answers_ends_as_infra(desk):
    desk.begin()
    others = desk.flow.lease("w0", 4)[1:]
    for lease in others:
        desk.flow.receive(answer(lease))
    for attempt in range(3):
        desk.clock.now += 121
        desk.flow.heartbeat("w0")
        desk.flow.tick()
        assert len(desk.flow.lease("w0", 1)) == 1, attempt
    group = desk.flow.training["g0000000"]
    assert group.finished and len(group.survivors) == 3
    assert "3 leases went unanswered" in group.receipts[0].reason


def test_an_engine_that_fails_again_and_again_is_held(desk):
    desk.begin()
    for seconds in (1, 2, 4, 8, 16, 30, 30):
        for lease in desk.flow.lease("w0", 4):
            desk.flow.receive(answer(lease, outcome=Outcome.INFRA, reason="engine http://e0 does not answer"))
        assert desk.flow.lease("w0", 4) == []
        assert f"no leases for {seconds} s" in [text for text in events(desk) if "in a row" in text][-1]
        desk.clock.now += seconds
    leases = desk.flow.lease("w0", 4)
    assert len(leases) == 4
    desk.flow.receive(answer(leases[0]))  # and all is forgotten
    for lease in leases[1:]:
        desk.flow.receive(answer(lease, outcome=Outcome.INFRA))
    assert len(desk.flow.lease("w0", 4)) == 4


def test_a_dead_engine_does_not_draw_all_work(desk):
    desk.begin()
    desk.engine(0, "http://e1", "c1")
    served = 0
    for _ in range(50):
        leases = desk.flow.lease("w0", 4)
        served += sum(lease.engine == "http://e1" for lease in leases)
        for lease in leases:
            if lease.engine == "http://e0":
                desk.flow.receive(answer(lease, outcome=Outcome.INFRA))
    assert served == 12  # all of the step, on the engine that works
    assert desk.flow.next_ordinal <= 5


def test_evaluations_go_first_and_need_their_version(desk):
    desk.begin()
    step(desk, 0)
    desk.flow.evaluate("during", "heldout", 3, 2, 0.7)
    assert desk.flow.lease("w0", 100) == []  # engines still serve version 0
    desk.engine(1)
    leases = desk.flow.lease("w0", 8)
    assert [lease.purpose for lease in leases] == ["during"] * 6 + ["train"] * 2
    assert {lease.sampling.temperature for lease in leases[:6]} == {0.7}


def test_an_evaluation_tries_infra_again(desk):
    desk.begin()
    id = desk.flow.evaluate("e", "heldout", 1, 1, 0.0)
    for _ in range(2):
        lease = desk.flow.lease("w0", 1)[0]
        assert lease.purpose == "e"
        assert desk.flow.receive(answer(lease, outcome=Outcome.INFRA))
        assert not desk.flow.receive(answer(lease, outcome=Outcome.INFRA))
    assert desk.flow.receive(answer(desk.flow.lease("w0", 1)[0], solved=True))
    result = desk.flow.evaluations.progress(id)
    assert result["done"] and result["solved"] == [1] and result["outcomes"] == {"scored": 1}
    lines = [line for line in read(desk.folder / "metrics.jsonl") if line["kind"] == "eval"]
    assert len(lines) == 1 and lines[0]["name"] == "e" and lines[0]["solved"] == [1]


def test_a_resumed_trainer_gets_its_batches_again_and_no_new_work(desk):
    desk.begin()
    records = []
    for version in range(3):
        for lease in desk.flow.lease("w0", 100):
            desk.flow.receive(answer(lease))
        records.append(desk.flow.batch(version))
        desk.commit(version)
        desk.engine(version + 1)
    desk.flow.set_version(1, "chain-1")
    desk.engine(1)
    assert desk.flow.lease("w0", 100) == []
    for version in (1, 2):
        assert desk.flow.batch(version) == records[version]
        desk.commit(version)
    desk.engine(3)
    assert [lease.group for lease in desk.flow.lease("w0", 1)] == ["g0000009"]


def test_ASY_12_a_stall_names_who_has_not_answered(desk):
    watch = standing.StallWatch()

    def said(after: float = 30.0) -> str:
        desk.clock.now += after
        count = len(events(desk))
        watch.report(desk.flow)
        watch.report(desk.flow)
        assert len(events(desk)) <= count + 1
        return events(desk)[-1]

    desk.flow.switch(True)
    assert "no engine is registered" in said()
    desk.flow.set_version(0, "c")
    desk.engine(0)
    assert "no worker has asked for work" in said()
    leases = desk.flow.lease("w0", 12)
    text = said()
    assert "12 rollouts are out (w0 has 12)" in text and "http://e0" in text
    for lease in leases:
        desk.flow.receive(answer(lease))
    assert "the trainer has not asked for batch 0, which is ready" in said()
    assert desk.flow.batch(0) is not None
    assert "the trainer has not committed batch 0" in said()
    desk.commit(0)
    assert "no engine is fit for train, which needs version 1 (engines serve http://e0 of c0: 0)" in said()
    assert standing.status(desk.flow)["stall"]


def test_members_never_make_their_group_older(tmp_path):
    desk = Desk(tmp_path, configuration(max_staleness=2))
    desk.begin(1)
    desk.engine(0, "http://behind", "c1")
    assert {lease.engine for lease in desk.flow.lease("w0", 2)} == {"http://e0"}
    desk.flow.engine_left("http://e0")
    assert {lease.group for lease in desk.flow.lease("w0", 4)} == {"g0000001"}  # the first group waits for version 1
    desk.engine(1)
    assert [lease.group for lease in desk.flow.lease("w0", 2)] == ["g0000000"] * 2
    desk.close()
