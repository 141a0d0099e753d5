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

from stretto.engine.contract import BadRequest
from stretto.engine.scheduler import Ended, Job, Scheduler, Streamed
from stretto.engine.slots import MIN_SHARE, Routes
from stretto.harness.history import History
from stretto.records import NOT_SAMPLED, GenerateRequest, GenerateResponse, Sampling
from stretto.support import Support

VOCAB = 50
LAYERS, PER_TOKEN = 2, 3


def digest(ids: np.ndarray, version: int) -> int:
    return zlib.crc32(np.asarray(ids, np.int32).tobytes() + bytes([version]))


def kept(row: int) -> np.ndarray:
    """The set that the token drawn from a row comes from: recognisable, and never without the token."""
    kept_V = (np.arange(VOCAB) * 7 + row) % 5 == 0
    kept_V[row % VOCAB] = True
    return kept_V


class Fake:
    """Drives a scheduler. Each KV row is the digest of the ids up to it and of the version that made it."""

    def __init__(self, slots: int = 4, max_tokens: int = 120, prefill: int = 30):
        self.scheduler = Scheduler(slots, max_tokens, prefill, VOCAB, Routes(LAYERS, PER_TOKEN, 200))
        self.kv = np.zeros((slots, max_tokens), np.int64)
        self.made_by = np.full((slots, max_tokens), -1)
        self.version = self.oldest = 0  # the live weights; the oldest ones whose rows may be looked at
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

    def swap(self, recompute: bool = False) -> None:
        self.version += 1
        self.oldest = self.version if recompute else self.oldest
        self.scheduler.swapped(recompute)

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
                assert self.made_by[slot, before] >= self.oldest
            self.kv[slot, position] = digest(ids, self.version)
            self.made_by[slot, position] = self.version
        for source, slot, rows in plan.twins:
            self.kv[slot, :rows], self.made_by[slot, :rows] = self.kv[source, :rows], self.made_by[source, :rows]
        rows = self.kv[plan.slots_T, plan.positions_T]
        routes_TLK = np.broadcast_to((rows % 200)[:, None, None], (len(rows), LAYERS, PER_TOKEN))
        self.computed += len(rows)
        self.passes += 1
        last = rows[plan.sampled_N]
        tokens, scores = (last % VOCAB).astype(np.int32), -(last % 7).astype(np.float32)
        support = self.support(plan.samplers_N, last)
        for event in self.scheduler.commit(plan, routes_TLK, tokens, scores, self.version, support):
            self.take(event)
        return True

    def support(self, slots_N: np.ndarray, last_N: np.ndarray) -> Support | None:
        """What the sampler would say: sets where top-k is set, all tokens elsewhere, nothing if it is set nowhere."""
        cut_N = np.array([self.scheduler.active[slot].request.sampling.truncated for slot in slots_N.tolist()], bool)
        if not cut_N.any():
            return None
        return Support.of(
            np.stack([kept(int(row)) if cut else np.ones(VOCAB, bool) for row, cut in zip(last_N, cut_N)])
        )

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
    whole = ids + response.ids
    first = response.routes.start
    rows = response.routes.open(np.array(whole[first:-1], "<i4"), (LAYERS, PER_TOKEN), 8)
    assert len(response.ids) == len(versions) == len(scores)
    for n, token in enumerate(response.ids):
        made = digest(whole[: len(ids) + n], int(versions[n]))
        assert (token, scores[n]) == (made % VOCAB, -(made % 7))
        assert version is None or versions[n] == version
        before = len(ids) + n - 1  # the row this token was sampled from: of the same pass as its log-prob
        assert before < first or rows[before - first, 0, 0] == made % 200
    for position in range(max(first, rows_from), len(whole) - 1):
        allowed = range(int(versions[-1]) + 1) if version is None else [version]
        row = rows[position - first]
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
    assert fake.computed == 100 + 16 * 2  # the prompt, and two steps for each
    assert fake.passes == 2 + 2
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


def test_ENG_15_a_new_request_that_meets_a_swap_starts_over():
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


def test_RPL_6_what_was_never_computed_is_unknown_not_zero():
    fake = Fake(slots=1, prefill=30)
    fake.submit(ids(1, 100), tokens=3)  # leaves its routes in the slot
    fake.run()
    key = fake.submit(ids(0, 100), tokens=3, routes_from=10)
    fake.step()
    ended = fake.scheduler.abort(key)
    rows = ended.response.routes.open(np.array(ids(0, 100)[10:99], "<i4"), (LAYERS, PER_TOKEN), 8)
    assert (rows[20:] == 255).all() and (rows[:20] != 255).all()


def test_ENG_13_a_token_keeps_the_version_of_its_pass():
    """Not the one at admission, nor the one at the response."""
    fake = Fake()
    key = fake.submit(ids(0, 20), tokens=6)
    for _ in range(2):
        fake.step()
    fake.swap()
    for _ in range(3):
        fake.step()
    fake.swap()
    fake.run()
    fake.swap()
    check(ids(0, 20), fake.response(key))  # each log-prob and row of the very version it is labelled with
    assert np.frombuffer(fake.response(key).versions, "<i4").tolist() == [0, 0, 1, 1, 1, 2]


def test_ENG_14_recomputing_changes_nothing_that_was_recorded():
    """Keys are made again before the next token; ids, log-probs, versions and routes stay those of the first pass."""
    fake = Fake()
    key = fake.submit(ids(0, 20), tokens=6, session="a")
    for _ in range(3):
        fake.step()
    fake.swap(recompute=True)
    before = fake.computed
    fake.step()
    assert fake.computed == before + 20 + 3  # all there was, and the last token's own row
    fake.run()
    response = fake.response(key)
    check(ids(0, 20), response)
    assert np.frombuffer(response.versions, "<i4").tolist() == [0] * 3 + [1] * 3
    rows = response.routes.open(np.array(ids(0, 20) + response.ids[:-1], "<i4"), (LAYERS, PER_TOKEN), 8)
    made_by = [0] * 22 + [1] * 3
    whole = ids(0, 20) + response.ids
    assert rows[:, 0, 0].tolist() == [digest(whole[: n + 1], version) % 200 for n, version in enumerate(made_by)]
    fake.swap(recompute=True)  # idle sessions too
    history = whole + ids(5, 3)
    key = fake.submit(history, tokens=2, session="a", routes_from=25)
    fake.run()
    assert fake.response(key).cached == 0
    check(history, fake.response(key), 2)
    other = fake.submit(history, tokens=2)  # nobody else uses keys whose routes are of another pass
    fake.run()
    check(history, fake.response(other), 2)


def test_while_holding_nothing_new_begins():
    fake = Fake()
    first = fake.submit(ids(0, 10), tokens=8)
    fake.step()
    fake.scheduler.holding = True
    second = fake.submit(ids(1, 10), tokens=2)
    while fake.step():
        pass
    assert list(fake.ended) == [first]
    fake.swap()
    fake.scheduler.holding = False
    fake.run()
    check(ids(0, 10), fake.response(first), 0)
    check(ids(1, 10), fake.response(second), 1)


def test_RPL_6_a_prefix_hit_brings_the_rows_of_the_pass_that_made_its_keys():
    fake = Fake(slots=3)
    prompt = ids(0, 40)
    first = fake.submit(prompt, tokens=3)
    fake.run()
    computed = fake.computed
    second = fake.submit(prompt, tokens=3)
    fake.run()
    assert fake.response(second).cached == 39 and fake.computed == computed + 3
    check(prompt, fake.response(second), 0)
    assert fake.response(second).routes == fake.response(first).routes


def test_ENG_15_no_new_request_hits_keys_of_another_version():
    fake = Fake(slots=3)
    prompt = ids(0, 40)
    fake.submit(prompt, tokens=3)
    fake.run()
    fake.swap()
    key = fake.submit(prompt, tokens=3)
    fake.run()
    assert fake.response(key).cached == 0
    check(prompt, fake.response(key), version=1)


def turn(fake: Fake, history: History, session: str, tokens: int = 5, steps: int = 0) -> GenerateResponse:
    """One turn of a conversation, aborted after `steps` passes if there are any."""
    key = fake.submit(history.ids, tokens=tokens, session=session, routes_from=history.rows)
    for _ in range(steps):
        fake.step()
    if steps:
        fake.take(fake.scheduler.abort(key))
    fake.run()
    response = fake.response(key)
    if response.ids:
        check(list(history.ids), response)
    history.take(response)
    return response


def test_ENG_14_a_conversation_whose_keys_were_lost_keeps_what_it_was_told():
    """Eviction and new weights between two turns: the prompt is computed again, and nothing said before changes."""
    fake = Fake(slots=2)
    history = History(ids(0, 20))
    turn(fake, history, "a")
    before = history.segment()
    for n in range(3):
        fake.submit(ids(n + 1, 20), tokens=2, session=f"other{n}")
    fake.run()
    assert "a" not in fake.scheduler.slots.sessions
    fake.swap()
    history.give(ids(9, 3))
    assert turn(fake, history, "a").cached == 0
    after = history.segment()
    after.validate()
    held = len(before.ids_T) - 1
    assert (after.routes_TLK[:held] == before.routes_TLK[:held]).all()
    assert (after.logprobs_T[20:25] == before.logprobs_T[20:25]).all()
    assert after.versions_T.tolist() == [NOT_SAMPLED] * 20 + [0] * 5 + [NOT_SAMPLED] * 3 + [1] * 5


def test_RPL_1_an_aborted_turn_goes_on_without_overlap_or_hole():
    """Also when the weights change in between: the row of the last token is made by the pass that goes on from it."""
    fake = Fake()
    history = History(ids(0, 20))
    assert turn(fake, history, "a", tokens=9, steps=3).finish == "aborted"
    assert history.rows == 22 and len(history) == 23
    fake.swap()
    going_on = turn(fake, history, "a", tokens=6)
    assert going_on.routes.start == 22 and going_on.cached == 22
    segment = history.segment()
    segment.validate()
    assert (segment.routes_TLK[:-1] != 255).all() and (segment.routes_TLK[-1] == 255).all()
    assert segment.routes_TLK[22, 0, 0] == digest(segment.ids_T[:23], 1) % 200


def test_ENG_14_an_answer_is_whole_or_not_there():
    """Aborted before its first token, it has no ids, no streams, and leaves the history as it was."""
    fake = Fake(prefill=30)
    history = History(ids(0, 100))
    response = turn(fake, history, "a", steps=1)
    assert (response.ids, response.logprobs, response.versions) == ([], b"", b"")
    assert len(history) == 100 and history.rows == 0
    turn(fake, history, "a")
    assert history.rows == 104


def test_supports_go_to_those_whose_distribution_is_cut():
    fake = Fake()
    cut = [fake.submit(ids(n, 20), tokens=4 + n, sampling=Sampling(top_k=9)) for n in range(2)]
    full = fake.submit(ids(2, 20), tokens=5)
    for _ in range(3):
        fake.step()
    fake.take(fake.scheduler.abort(cut[1]))
    fake.run()
    assert fake.response(full).support is None
    for n, count in ((0, 4), (1, 2)):
        response = fake.response(cut[n])
        whole = ids(n, 20) + response.ids
        support = Support.open(response.support)
        assert len(support) == len(response.ids) == count
        wanted = [kept(digest(whole[: 20 + step], 0)) for step in range(count)]
        assert (support.mask(0, count) == np.stack(wanted)).all()


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
        st.sampled_from(["new", "new", "turn", "turn", "step", "step", "swap", "recompute", "abort", "release"]),
        st.integers(0, 5),
    ),
    min_size=5,
    max_size=60,
)


@given(ACTIONS, st.integers(1, 5), st.integers(3, 40))
@settings(max_examples=60, deadline=None)
def test_ENG_14_ENG_15_any_order_of_events_gives_right_answers(actions, slots, prefill):
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
        elif action in ("swap", "recompute"):
            fake.swap(action == "recompute")
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
