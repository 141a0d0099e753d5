"""The grading desk: who waits for whom, and who pays when grading itself goes wrong."""

from __future__ import annotations

import asyncio
import time

import pytest

from stretto.grading.outcome import Grade
from stretto.records import Lease, Outcome, Sampling, Task
from stretto.rollouts.desk import GradingDesk
from stretto.sandbox.box import BoxLost

TASK = Task(id="t", split="train", instruction="", files={}, grading={})


class Recording:
    """Stands where the grader stands: keeps what it is asked, and can be told to fail."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.seeds: list[int] = []
        self.error: Exception | None = None

    async def grade(self, task: Task, submissions: list[dict[str, bytes]], seed: int) -> list[Grade]:
        self.asked.append([files["a"] for files in submissions])
        self.seeds.append(seed)
        if self.error is not None and b"bad" in self.asked[-1]:
            raise self.error
        return [Grade(solved=files["a"] == b"good", outcome=Outcome.SCORED, passed=0, total=0) for files in submissions]


@pytest.fixture
def grader() -> Recording:
    return Recording()


@pytest.fixture
def desk(grader) -> GradingDesk:
    return GradingDesk(grader, patience=0.1)  # type: ignore[arg-type]


def lease(rollout: str, group: str = "g") -> Lease:
    return Lease(
        rollout=rollout,
        group=group,
        purpose="train",
        task=TASK,
        sampling=Sampling(),
        engine="",
        version=0,
        deadline=time.time() + 9,
    )


async def test_a_whole_group_is_graded_at_once(desk, grader):
    members = [lease(name) for name in "abc"]
    for member in members:
        desk.expect(member)
    first = asyncio.create_task(desk.grade(members[0], {"a": b"good"}))
    second = asyncio.create_task(desk.grade(members[1], {"a": b"no"}))
    await asyncio.sleep(0.02)
    assert grader.asked == []
    desk.absent(members[2])
    assert [(await first).solved, (await second).solved] == [True, False]
    assert grader.asked == [[b"good", b"no"]]


async def test_a_slow_member_holds_nobody_up_for_long(desk, grader):
    for name in "ab":
        desk.expect(lease(name))
    assert (await asyncio.wait_for(desk.grade(lease("a"), {"a": b"good"}), 1)).solved
    assert not (await desk.grade(lease("b"), {"a": b"no"})).solved
    assert grader.asked == [[b"good"], [b"no"]] and grader.seeds[0] != grader.seeds[1]


async def test_groups_do_not_wait_for_each_other(desk, grader):
    desk.expect(lease("a", "g"))
    desk.expect(lease("b", "h"))
    started = time.monotonic()
    await desk.grade(lease("a", "g"), {"a": b"good"})
    assert time.monotonic() - started < 0.09


async def test_an_infrastructure_failure_is_infra_for_all_it_met(desk, grader):
    grader.error = BoxLost("the box died")
    for name in "ab":
        desk.expect(lease(name))
    grades = await asyncio.gather(desk.grade(lease("a"), {"a": b"bad"}), desk.grade(lease("b"), {"a": b"good"}))
    assert [grade.outcome for grade in grades] == [Outcome.INFRA, Outcome.INFRA]
    assert "the box died" in grades[0].reason


async def test_whoever_breaks_the_grader_pays_alone(desk, grader):
    """An error that is not proven to be ours must not take a submission out of the batch."""
    grader.error = KeyError("what")
    for name in "abc":
        desk.expect(lease(name))
    said = [b"good", b"bad", b"no"]
    grades = await asyncio.gather(*(desk.grade(lease(n), {"a": s}) for n, s in zip("abc", said, strict=True)))
    assert [(grade.outcome, grade.solved) for grade in grades] == [
        (Outcome.SCORED, True),
        (Outcome.FAULT, False),
        (Outcome.SCORED, False),
    ]
    assert "KeyError" in grades[1].reason


async def test_a_cancelled_member_disturbs_nobody(desk, grader):
    for name in "ab":
        desk.expect(lease(name))
    gone = asyncio.create_task(desk.grade(lease("a"), {"a": b"good"}))
    await asyncio.sleep(0)
    gone.cancel()
    assert not (await desk.grade(lease("b"), {"a": b"no"})).solved


async def test_ASY_10_a_grader_that_hangs_has_a_deadline_and_holds_up_no_abort(desk, grader, monkeypatch):
    monkeypatch.setattr("stretto.rollouts.desk.GRADING_SECONDS", 0.4)

    async def hang(task: Task, submissions: list[dict[str, bytes]], seed: int) -> list[Grade]:
        await asyncio.sleep(60)
        raise AssertionError("nobody waited so long")

    monkeypatch.setattr(grader, "grade", hang)
    members = [lease("a"), lease("b")]
    for member in members:
        desk.expect(member)
    waiting = [asyncio.create_task(desk.grade(member, {"a": b"good"})) for member in members]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert time.monotonic() - began < 0.2, "who is told to stop does not wait for the grade"
    grade = await asyncio.wait_for(waiting[1], 5)
    assert grade.outcome is Outcome.INFRA and "no grade within 0.4 s" in grade.reason


async def test_a_group_has_the_same_hidden_inputs_however_often_it_is_graded(grader):
    desk = GradingDesk(grader, patience=0.01, draw=len)  # type: ignore[arg-type]
    first, second = lease("a", "group"), lease("b", "group")
    desk.expect(first)
    desk.expect(second)
    await desk.grade(first, {"a": b"good"})
    await desk.grade(second, {"a": b"good"})
    assert grader.seeds == [5, 5]
