"""The token history: streams equally long, ids append-only, routes joined without overlap or hole."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.harness.history import History, StreamError
from stretto.records import NOT_SAMPLED, GenerateResponse, RouteChunk, SupportChunk, unknown_expert
from stretto.support import Support

L, K = 2, 3


def row(position: int, bits: int) -> np.ndarray:
    """The routes of a position, recognisable."""
    return np.array([[(position + 5 * layer + k) % 50 for k in range(K)] for layer in range(L)], f"<u{bits // 8}")


def answer(history: History, ids: list[int], version: int = 0, bits: int = 8, routes_from: int | None = None):
    begin = history.rows if routes_from is None else routes_from
    whole = history.ids + ids
    rows = np.stack([row(p, bits) for p in range(min(begin, len(whole) - 1), len(whole) - 1)])
    return GenerateResponse(
        ids=ids,
        logprobs=np.full(len(ids), -0.5, "<f4").tobytes(),
        versions=np.full(len(ids), version, "<i4").tobytes(),
        support=None,
        routes=RouteChunk.seal(begin, np.array(whole[begin:-1], "<i4"), rows),
        route_shape=(L, K),
        route_bits=bits,
        finish="stop",
        cached=0,
    )


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 30),
    turns=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 3)), max_size=5),
    bits=st.sampled_from([8, 16]),
)
def test_RPL_1_streams_stay_equally_long_and_only_the_last_row_is_unknown(prompt, turns, bits):
    history = History(list(range(prompt)))
    sampled: list[int] = [NOT_SAMPLED] * prompt
    for count, observed, version in turns:
        before = list(history.ids)
        history.take(answer(history, list(range(count)), version, bits))
        assert history.ids[: len(before)] == before
        sampled += [version] * count
        history.segment().validate()
        history.give(list(range(observed)))
        sampled += [NOT_SAMPLED] * observed
    segment = history.segment()
    segment.validate()
    assert segment.versions_T.tolist() == sampled
    if turns:
        routes = segment.routes_TLK
        assert len(routes) == len(sampled)
        for position in range(history.rows):
            assert (routes[position] == row(position, bits)).all()
        assert (routes[history.rows :] == unknown_expert(bits)).all()
        assert history.rows == len(sampled) - turns[-1][1] - 1


@pytest.mark.parametrize(
    ("routes_from", "says"), [(2, "overlap those held: they start at position 2, not 5"), (7, "leave a hole")]
)
def test_RPL_1_chunks_of_routes_that_overlap_or_leave_a_hole_are_refused(routes_from, says):
    history = History([1, 2, 3])
    history.take(answer(history, [4, 5, 6]))
    history.give([7, 8])
    before = history.segment()
    with pytest.raises(StreamError, match=says):
        history.take(answer(history, [9, 10], routes_from=routes_from))
    assert history.segment() == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": b"\0" * 4}, "sampled 2 tokens but sent 1 log-probs and 2 versions"),
        ({"versions": b"\0" * 12}, "2 log-probs and 3 versions"),
        ({"logprobs": np.array([-1, np.nan], "<f4").tobytes()}, "not finite"),
        ({"versions": np.array([3, -1], "<i4").tobytes()}, "without a policy version"),
        ({"routes": RouteChunk.seal(0, np.array([1], "<i4"), row(0, 8)[None])}, "1 route rows for positions 0 to 4"),
        ({"routes": None}, "no routes"),
        ({"route_shape": (0, 0)}, r"sent routes and says their \(L, K\) is \(0, 0\)"),
        ({"route_bits": 32}, "32 bits"),
    ],
)
def test_ENG_14_an_answer_whose_streams_disagree_changes_nothing(change, says):
    history = History([1, 2, 3])
    with pytest.raises(StreamError, match=says):
        history.take(msgspec.structs.replace(answer(history, [4, 5]), **change))
    assert history.ids == [1, 2, 3] and history.rows == 0
    history.segment().validate()


def test_RPL_2_routes_made_for_other_tokens_are_refused():
    history = History([1, 2, 3])
    other = History([1, 2, 9])
    with pytest.raises(StreamError, match="positions 0 to 4 were made for other tokens"):
        history.take(answer(other, [4, 5]))
    assert history.ids == [1, 2, 3] and history.segment().routes == []


def support(*sets: set[int], vocab: int = 10) -> SupportChunk:
    return Support.of(np.array([[token in kept for token in range(vocab)] for kept in sets])).seal()


def test_supports_are_kept_as_they_came():
    history = History([1, 2, 3], truncated=True)
    first, second = support({4, 5}, {5}), support({1, 7, 8})
    history.take(msgspec.structs.replace(answer(history, [4, 5]), support=first))
    history.give([9])
    history.take(msgspec.structs.replace(answer(history, [7]), support=second))
    segment = history.segment()
    segment.validate()
    assert segment.support == [first, second]
    assert History([1]).segment().support is None


@pytest.mark.parametrize(
    ("truncated", "sent", "says"),
    [
        (True, None, "does not say from which tokens, though top-p or top-k is set"),
        (False, support({4}, {5}), "supports unasked"),
        (True, support({4}), "sampled 2 tokens but sent 1 supports"),
        (True, support({4}, {4}), "outside the set that it says it drew from"),
        (True, support({4}, {4}, vocab=5), "outside the set"),
        (True, SupportChunk(count=2, vocab=10, sets=b"?"), "can't be decompressed"),
    ],
)
def test_ENG_5_supports_that_do_not_fit_are_refused(truncated, sent, says):
    history = History([1, 2, 3], truncated)
    before = history.segment()
    with pytest.raises(StreamError, match=says):
        history.take(msgspec.structs.replace(answer(history, [4, 5]), support=sent))
    assert history.segment() == before


def test_the_layout_of_routes_may_not_change_within_a_rollout():
    history = History([1])
    history.take(answer(history, [2]))
    with pytest.raises(StreamError, match="changed"):
        history.take(answer(history, [3], bits=16))


def test_a_dense_model_has_no_routes():
    history = History([1])
    dense = msgspec.structs.replace(answer(history, [2, 3]), routes=None, route_shape=(0, 0))
    history.take(dense)
    segment = history.segment()
    segment.validate()
    assert segment.routes == [] and segment.ids_T.tolist() == [1, 2, 3] and history.rows == 0
