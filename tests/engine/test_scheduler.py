"""The scheduler alone, against a network that is a hash of the ids: every row's route and every token are known.

Whatever comes and goes, each response must be what the ids imply, no row may be used that other weights or other ids
made, and no request may wait for ever or be overtaken without end.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.scheduler import BadRequest, Ended, Job, Scheduler, Streamed
from stretto.engine.slots import MIN_SHARE, Routes
from stretto.records import GenerateRequest, GenerateResponse, Sampling

VOCAB = 50
LAYERS, PER_TOKEN = 2, 3


def digest(ids: np.ndarray, version: int) -> int:
    return zlib.crc32(np.asarray(ids, np.int32).tobytes() + bytes([version]))


class Fake:
    """Drives a scheduler. Each KV row is the digest of the ids up to it and of the version that made it."""

    def __init__(self, slots: int = 4, max_tokens: int = 120, prefill: int = 30):
        self.scheduler = Scheduler(slots, max_tokens, prefill, VOCAB, Routes(LAYERS, PER_TOKEN, 200))
        self.kv = np.zeros((slots, max_tokens), np.int64)
        self.made_by = np.full((slots, max_tokens), -1)
        self.version = 0
        self.computed = 0
        self.passes = 0
        self.ended: dict[int, Ended] = {}
        self.streamed: list[tuple[int, int]] = []
        self._key = 0

    def submit(self, ids: list[int], tokens: int = 5, session: str = "", **options) -> int:
        self._key += 1
        fields = {"stop": [], "sampling": Sampling(), "routes_from": 0} | options
        stream = fields.pop("stream", False)
        request = GenerateRequest(ids=ids, max_tokens=tokens, session=session, **fields)
        self.scheduler.check(request)
        self.scheduler.submit(Job(self._key, request, seed=0, stream=stream))
        return self._key

    def swap(self) -> None:
        self.version += 1
        self.scheduler.swapped()

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        slots = self.scheduler.slots
        for source, slot, rows in plan.copies:
            self.kv[slot, :rows], self.made_by[slot, :rows] = self.kv[source, :rows], self.made_by[source, :rows]
        assert sum(c.end - c.start for c in plan.chunks) <= self.scheduler.prefill_tokens
        assert len(plan.ids_T) == len(plan.slots_T) == len(plan.positions_T)
        assert len({*zip(plan.slots_T.tolist(), plan.positions_T.tolist())}) == len(plan.slots_T)
        for slot, position in zip(plan.slots_T, plan.positions_T):
            ids = slots.ids_SM[slot, : position + 1]
            for before in range(position):  # every row this one looks at is a row of these very ids
                assert self.kv[slot, before] == digest(ids[: before + 1], self.made_by[slot, before])
            self.kv[slot, position] = digest(ids, self.version)
            self.made_by[slot, position] = self.version
        rows = self.kv[plan.slots_T, plan.positions_T]
        routes_TLK = np.broadcast_to((rows % 200)[:, None, None], (len(rows), LAYERS, PER_TOKEN))
        self.computed += len(rows)
        self.passes += 1
        last = rows[plan.sampled_N]
        tokens = (last % VOCAB).astype(np.int32)
        for event in self.scheduler.commit(plan, routes_TLK, tokens, -(last % 7).astype(np.float32), self.version):
            self.take(event)
        return True

    def take(self, event: Ended | Streamed) -> None:
        if isinstance(event, Streamed):
            self.streamed.append((event.job.key, event.token))
        else:
            assert event.job.key not in self.ended
            self.ended[event.job.key] = event

    def run(self) -> None:
        for _ in range(500):
            if not self.step():
                break
        assert not self.scheduler.busy, "somebody waits for ever"

    def response(self, key: int) -> GenerateResponse:
        response = self.ended[key].response
        assert response is not None
        return response


def check(ids: list[int], response: GenerateResponse, version: int | None = None, rows_from: int = 0) -> None:
    """The response is what its ids imply. With `version` None, rows and tokens may come from any version up to now."""
    versions = np.frombuffer(response.versions, "<i4")
    scores = np.frombuffer(response.logprobs, "<f4")
    rows = np.frombuffer(response.routes, np.uint8).reshape(-1, LAYERS, PER_TOKEN)
    assert len(response.ids) == len(versions) == len(scores)
    assert len(rows) == len(ids) + len(response.ids) - 1 - response.routes_from
    whole = ids + response.ids
    for n, token in enumerate(response.ids):
        made = digest(whole[: len(ids) + n], int(versions[n]))
        assert (token, scores[n]) == (made % VOCAB, -(made % 7))
        assert version is None or versions[n] == version
    for position in range(max(response.routes_from, rows_from), len(whole) - 1):
        allowed = range(int(versions[-1]) + 1) if version is None else [version]
        row = rows[position - response.routes_from]
        assert np.ptp(row) == 0 and row[0, 0] in {digest(whole[: position + 1], v) % 200 for v in allowed}


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_a_long_prompt_is_computed_in_chunks_while_others_decode():
    fake = Fake(prefill=30)
    short = fake.submit(ids(0, 5), tokens=20)
    fake.step()
    long = fake.submit(ids(1, 100), tokens=2)
    for _ in range(4):
        fake.step()
    assert len(fake.scheduler.active) == 2
    job = next(job for job in fake.scheduler.active.values() if job.key == short)
    assert fake.scheduler.slots.known_S[job.slot] == 5 + 5  # one token in every pass
    fake.run()
    check(ids(0, 5), fake.response(short), 0)
    check(ids(1, 100), fake.response(long), 0)


def test_a_group_computes_its_prompt_once():
    fake = Fake(slots=16, prefill=64)
    prompt = ids(0, 100)
    keys = [fake.submit(prompt, tokens=3) for _ in range(16)]
    fake.run()
    assert fake.computed == 100 + 15 + 16 * 2  # the prompt, its last row for each other, and two steps for each
    assert fake.passes == 2 + 1 + 2
    for key in keys:
        check(prompt, fake.response(key), 0)


def test_a_short_common_prefix_is_not_waited_for():
    fake = Fake()
    for seed in range(4):
        fake.submit(ids(99, MIN_SHARE - 1) + ids(seed, 10), tokens=1)
    while fake.step():
        pass
    assert fake.passes == 4  # 4 x 25 rows, 30 a pass: nobody stood still


def test_first_come_first_served_when_slots_are_full():
    fake = Fake(slots=2)
    keys = [fake.submit(ids(n, 10), tokens=4) for n in range(8)]
    order: list[int] = []
    while fake.step():
        order += [key for key in fake.ended if key not in order]
    assert order == keys


def test_an_idle_session_keeps_its_slot_until_it_is_needed():
    fake = Fake(slots=3)
    history = ids(0, 20)
    key = fake.submit(history, tokens=5, session="a")
    fake.run()
    history = history + fake.response(key).ids + ids(1, 4)
    for n in range(4):  # others, one at a time, take the other two slots
        fake.submit(ids(10 + n, 20), tokens=2)
        fake.run()
    key = fake.submit(history, tokens=5, session="a", routes_from=24)
    fake.run()
    assert fake.response(key).cached == 24
    check(history, fake.response(key), 0)
    for n in range(3):  # three at once need all
        fake.submit(ids(20 + n, 20), tokens=2)
    fake.run()
    assert "a" not in fake.scheduler.slots.sessions


def test_the_least_recently_used_session_goes_first():
    fake = Fake(slots=3)
    for name in "abc":
        fake.submit(ids(ord(name), 20), tokens=2, session=name)
        fake.run()
    fake.submit(ids(ord("a"), 20), tokens=2, session="a")
    fake.run()
    fake.submit(ids(7, 20), tokens=2, session="d")
    fake.run()
    assert set(fake.scheduler.slots.sessions) == {"a", "c", "d"}


def test_a_new_request_that_meets_a_swap_starts_over():
    fake = Fake()
    prompt = ids(0, 100)
    keys = [fake.submit(prompt, tokens=3) for _ in range(3)]
    fake.step()
    fake.swap()
    fake.run()
    for key in keys:
        check(prompt, fake.response(key), version=1)


def test_an_aborted_leader_does_not_strand_its_followers():
    fake = Fake()
    prompt = ids(0, 100)
    keys = [fake.submit(prompt, tokens=3) for _ in range(3)]
    fake.step()
    assert fake.scheduler.abort(keys[0]).response.finish == "aborted"
    fake.run()
    for key in keys[1:]:
        check(prompt, fake.response(key), 0)


def test_what_was_never_computed_is_unknown_not_zero():
    fake = Fake(slots=1, prefill=30)
    fake.submit(ids(1, 100), tokens=3)  # leaves its routes in the slot
    fake.run()
    key = fake.submit(ids(0, 100), tokens=3, routes_from=10)
    fake.step()
    ended = fake.scheduler.abort(key)
    rows = np.frombuffer(ended.response.routes, np.uint8).reshape(-1, LAYERS, PER_TOKEN)
    assert len(rows) == 89
    assert (rows[20:] == 255).all() and (rows[:20] != 255).all()


def test_a_nan_ends_the_request_with_a_sentence():
    fake = Fake()
    key = fake.submit(ids(0, 10))
    plan = fake.scheduler.plan()
    routes = np.zeros((10, LAYERS, PER_TOKEN), np.uint8)
    (event,) = fake.scheduler.commit(plan, routes, np.zeros(1, np.int32), np.full(1, np.nan, np.float32), 3)
    assert (event.job.key, event.response, event.error) == (key, None, "version 3 gave logits that are not finite")


def test_a_stream_sees_each_token_before_the_end():
    fake = Fake()
    key = fake.submit(ids(0, 10), tokens=6, stream=True)
    fake.submit(ids(1, 10), tokens=9)
    fake.run()
    assert fake.streamed == [(key, token) for token in fake.response(key).ids]


def test_a_request_for_a_stop_token_outside_the_vocabulary_is_refused():
    with pytest.raises(BadRequest, match="stop holds a token outside"):
        Fake().submit(ids(0, 3), stop=[VOCAB])


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "turn", "turn", "step", "step", "swap", "abort", "release"]), st.integers(0, 5)
    ),
    min_size=5,
    max_size=60,
)


@given(ACTIONS, st.integers(1, 5), st.integers(3, 40))
@settings(max_examples=60, deadline=None)
def test_any_order_of_events_gives_right_answers(actions, slots, prefill):
    """Prompts that share prefixes, sessions that go on, swaps, aborts: `Fake.step` checks each row that is used."""
    fake = Fake(slots=slots, prefill=prefill)
    asked: dict[int, tuple[list[int], int]] = {}  # key -> history and the version when it was asked
    histories: dict[str, list[int]] = {}
    turn_of: dict[str, int] = {}
    for action, n in actions:
        session = f"s{n}"
        if action == "new":
            history = ids(n % 2, 25)[: 20 + n] + ids(50 + n, n)
            asked[fake.submit(history, tokens=1 + n, stop=[n])] = (history, fake.version)
        elif action == "turn":
            previous = turn_of.get(session)
            if previous in fake.ended:
                histories[session] = histories[session] + fake.response(previous).ids + ids(n, 2)
            elif previous is not None:
                continue
            history = histories.setdefault(session, ids(n % 2, 25))
            if len(history) < 100:
                turn_of[session] = fake.submit(history, tokens=4, session=session)
                asked[turn_of[session]] = (history, fake.version)
        elif action == "step":
            fake.step()
        elif action == "swap":
            fake.swap()
        elif action == "abort" and asked:
            if (ended := fake.scheduler.abort(list(asked)[n % len(asked)])) is not None:
                fake.take(ended)
        elif action == "release":
            for ended in fake.scheduler.release(session):
                fake.take(ended)
    fake.run()
    assert set(fake.ended) == set(asked)
    for key, (history, version) in asked.items():
        response = fake.response(key)
        if response.finish == "aborted":
            continue
        check(history, response, version if version == fake.version and not fake.ended[key].job.continuing else None)
