"""What travels between processes: streams that belong together, and payloads that lack one."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.records import (
    NOT_SAMPLED,
    RouteChunk,
    Sampling,
    Segment,
    SupportChunk,
    decode,
    encode,
    route_bits,
    unknown_expert,
)


def routes(tokens: int, experts: int, layers: int = 3, k: int = 2, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, experts, (tokens, layers, k)).astype(f"<u{route_bits(experts) // 8}")


def segment(ids: np.ndarray, chunks: list[RouteChunk], bits: int = 8) -> Segment:
    versions = np.full(len(ids), 4, "<i4")
    versions[:2] = NOT_SAMPLED
    return Segment(
        ids=ids.astype("<i4").tobytes(),
        logprobs=np.where(versions < 0, np.nan, -1).astype("<f4").tobytes(),
        versions=versions.tobytes(),
        support=None,
        routes=chunks,
        route_shape=(3, 2),
        route_bits=bits,
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from([8, 256, 384]), st.integers(0, 3))
def test_RPL_1_chunks_join_to_one_row_per_token(sizes, experts, behind):
    """What no chunk reaches, as the last sampled token, is unknown."""
    total = sum(sizes)
    ids, rows = np.arange(100, 100 + total + behind), routes(total, experts)
    cuts = np.cumsum([0, *sizes])
    chunks = [RouteChunk.seal(int(a), ids[a:b], rows[a:b]) for a, b in itertools.pairwise(cuts)]
    bits = route_bits(experts)
    found = decode(encode(segment(ids, chunks, bits)), Segment).routes_TLK
    assert (found[:total] == rows).all() and (found[total:] == unknown_expert(bits)).all() and len(found) == len(ids)


def test_RPL_5_the_width_of_an_id_fits_the_number_of_experts():
    """384 experts (Kimi-K2) need 16 bits; their high bytes, nearly all equal, cost next to nothing."""
    assert [route_bits(experts) for experts in (8, 128, 255, 256, 384)] == [8, 8, 8, 16, 16]
    assert unknown_expert(8) == 255 and unknown_expert(16) == 65535
    ids, rows = np.arange(200, dtype="<i4"), routes(200, 384, layers=60, k=8)
    chunk = RouteChunk.seal(0, ids, rows)
    assert (chunk.open(ids, (60, 8), 16) == rows).all() and rows.max() > 255
    assert len(chunk.rows) < 0.65 * rows.nbytes


@pytest.mark.parametrize("experts", [8, 384])
def test_RPL_2_a_shift_by_one_token_is_noticed(experts):
    ids, rows = np.arange(50, dtype="<i4"), routes(49, experts)
    bits = route_bits(experts)
    chunk = RouteChunk.seal(0, ids[:-1], rows)
    assert (segment(ids, [chunk], bits).routes_TLK[:-1] == rows).all()
    for wrong in (np.roll(ids, 1), np.concatenate([ids[1:], ids[:1]]), np.where(ids == 30, 31, ids)):
        with pytest.raises(ValueError, match="positions 0 to 49 were made for other tokens"):
            _ = segment(wrong, [chunk], bits).routes_TLK
    moved = RouteChunk.seal(0, ids[:-1], np.roll(rows, 1, axis=0))
    with pytest.raises(ValueError, match="other tokens"):  # rows of another token under the seal of this one
        _ = segment(ids, [msgspec.structs.replace(moved, digest=chunk.digest)], bits).routes_TLK


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"start": 2}, "positions 2 to 11 after those up to 0"),
        ({"start": -1}, "positions -1 to 8"),
        ({"count": 30}, "positions 0 to 30"),
        ({"count": 8}, "take 54 bytes, not 48"),
        ({"rows": b"x"}, "can't be decompressed"),
    ],
)
def test_RPL_1_holes_overlaps_and_damage_are_refused(change, says):
    ids = np.arange(12, dtype="<i4")
    chunk = RouteChunk.seal(0, ids[:9], routes(9, 8))
    with pytest.raises(ValueError, match=says):
        _ = segment(ids, [msgspec.structs.replace(chunk, **change)]).routes_TLK
    with pytest.raises(ValueError, match="positions 0 to 9 after those up to 9"):
        _ = segment(ids, [chunk, chunk]).routes_TLK


@pytest.mark.parametrize("stream", ["support", "routes", "logprobs"])
def test_a_payload_without_a_stream_is_refused_by_name(stream):
    """An old payload must not pass as one whose tokens were sampled from the full distribution."""
    fields = msgspec.msgpack.decode(encode(segment(np.arange(5), [])))
    del fields[stream]
    with pytest.raises(msgspec.ValidationError, match=f"missing required field `{stream}`"):
        decode(msgspec.msgpack.encode(fields), Segment)


def test_every_sampled_token_has_its_support_or_none_has():
    whole = segment(np.arange(5), [])
    whole.validate()
    with pytest.raises(ValueError, match="3 of them sampled, but 2 supports"):
        msgspec.structs.replace(whole, support=[SupportChunk(count=2, vocab=9, sets=b"")]).validate()


def test_what_truncates():
    assert not Sampling().truncated and not Sampling(temperature=0, top_p=0.5, top_k=3).truncated
    assert Sampling(top_p=0.99).truncated and Sampling(temperature=0.7, top_k=40).truncated
