"""Pins how a rollout becomes a sample, and that each malformed one is refused by name."""

import msgspec
import numpy as np
import pytest

from stretto.records import Outcome, RouteChunk
from stretto.support import Support
from stretto.trainer.samples import UNKNOWN, BatchError


def changed(data, **fields):
    """The batch with one field of the first rollout's first segment replaced."""
    segment = msgspec.structs.replace(data.rollouts[0].segments[0], **fields)
    data.rollouts[0] = msgspec.structs.replace(data.rollouts[0], segments=[segment])
    return data


def test_a_sample_predicts_exactly_the_sampled_tokens(maker):
    data = maker.batch()
    sample = maker.prepare(data).samples[0]
    segment = data.rollouts[0].segments[0]
    where = np.flatnonzero(segment.sampled_T)
    assert sample.tokens == where[-1]  # the last sampled token is a target only
    assert (sample.predict_N == where - 1).all()
    assert (sample.targets_N == segment.ids_T[where]).all()
    assert (sample.behaviour_N == segment.logprobs_T[where]).all()
    assert (sample.routes_TLK == segment.routes_TLK[: where[-1]]).all()


def test_segments_of_one_rollout_weigh_one_together(maker):
    data = maker.batch(segments=3, groups=1, size=2)
    samples = maker.prepare(data, normalizer="sequence").samples
    assert len(samples) == 6
    for name in {s.rollout for s in samples}:
        total = sum(s.share * len(s.targets_N) for s in samples if s.rollout == name)
        assert total == pytest.approx(1 / 2)


def test_unknown_rows_become_minus_one(maker):
    data = maker.batch()
    segment = data.rollouts[0].segments[0]
    routes = segment.routes_TLK.copy()
    routes[:3] = 255
    sample = maker.prepare(changed(data, routes=[RouteChunk.seal(0, segment.ids_T, routes)])).samples[0]
    assert (sample.routes_TLK[:3] == UNKNOWN).all() and (sample.routes_TLK[3:] >= 0).all()


def test_ENG_5_supports_are_those_of_the_sampled_tokens(maker):
    maker.top_p = 0.7
    data = maker.batch(segments=2)
    for rollout, sample in zip([r for r in data.rollouts for _ in range(2)][2:4], maker.prepare(data).samples[2:4]):
        assert sample.rollout == rollout.id
        assert len(sample.support) == len(sample.targets_N) and sample.support.contains(sample.targets_N).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: None, "nothing says which tokens were left"),
        (lambda s: s.support[:1], "supports: streams of one rollout disagree"),
        (lambda s: s.support[::-1], "not in the set it is said to be drawn from|disagree"),
        (lambda s: [msgspec.structs.replace(c, sets=c.sets[:-2]) for c in s.support], "can't be decompressed"),
        (lambda s: [_full(c.count, 65) for c in s.support], "over 65 tokens, the model's vocabulary has 64"),
        (lambda s: [_full(s.support[0].count, 64), _full(s.support[1].count, 63)], "can't be joined"),
    ],
)
def test_ENG_5_supports_that_do_not_fit_are_refused_by_name(maker, change, sentence):
    maker.top_k = 2
    data = maker.batch()
    data = changed(data, support=change(data.rollouts[0].segments[0]))
    with pytest.raises(BatchError, match=f"rollout v0-g0-0.*({sentence})"):
        maker.prepare(data)


def _full(count, vocab):
    return Support.of(np.ones((count, vocab), bool)).seal()


def test_RPL_2_routes_made_for_other_tokens_are_refused_by_name(maker):
    """Every stream as long as it should be, ids one off: only the seal knows."""
    data = maker.batch()
    ids = np.roll(data.rollouts[0].segments[0].ids_T, 1)
    with pytest.raises(BatchError, match="rollout v0-g0-0, segment 0: .* were made for other tokens"):
        maker.prepare(changed(data, ids=ids.tobytes()))


def test_RPL_4_replay_is_on_and_no_routes_arrive(maker):
    """Not a step is made on routes that nobody sent, whether an engine says so or sends filler."""
    data = maker.batch()
    for n, rollout in enumerate(data.rollouts):
        (segment,) = rollout.segments
        unknown = np.full_like(segment.routes_TLK, 255)
        chunk = RouteChunk.seal(0, segment.ids_T, unknown)
        data.rollouts[n] = msgspec.structs.replace(rollout, segments=[msgspec.structs.replace(segment, routes=[chunk])])
    with pytest.raises(BatchError, match="not one route in the batch of version 0 is known"):
        maker.prepare(data)
    with pytest.raises(BatchError, match="returns no routes needs trainer.replay = false"):
        maker.prepare(changed(data, routes=[], route_shape=(0, 0)))
    assert maker.prepare(data, replay=False).samples[0].routes_TLK is None


def test_zero_advantage_needs_no_forward_but_counts(maker):
    data = maker.batch(groups=1)
    before = maker.prepare(data)
    items = [msgspec.structs.replace(data.batch.items[0], advantage=0.0), *data.batch.items[1:]]
    data.batch = msgspec.structs.replace(data.batch, items=items)
    after = maker.prepare(data)
    assert len(after.samples) == len(before.samples) - 1
    assert after.sampled == before.sampled and after.samples[0].share == before.samples[0].share


@pytest.mark.parametrize("normalizer", ["constant", "sequence", "token"])
def test_rollouts_of_flat_groups_count_in_the_denominators(maker, normalizer):
    """A step must not get larger because groups without signal were left out of the batch."""
    data = maker.batch(groups=1)
    alone = maker.prepare(data, normalizer=normalizer).samples
    data.batch = msgspec.structs.replace(data.batch, rollouts=3 * len(data.batch.items), groups=3, dropped_equal=2)
    flat = maker.prepare(data, normalizer=normalizer).samples
    factor = 1 if normalizer == "token" else 3  # the tokens of flat groups are not fetched
    assert [s.share for s in alone] == pytest.approx([factor * s.share for s in flat])


def test_a_batch_of_more_items_than_rollouts_is_refused(maker):
    data = maker.batch(groups=1)
    data.batch = msgspec.structs.replace(data.batch, rollouts=3)
    with pytest.raises(BatchError, match="counts 3 rollouts and has more items"):
        maker.prepare(data)


def route_change(change):
    def apply(data):
        segment = data.rollouts[0].segments[0]
        routes = segment.routes_TLK.copy()
        change(routes)
        return changed(data, routes=[RouteChunk.seal(0, segment.ids_T, routes)])

    return apply


def set_version(version):
    def apply(data):
        versions = data.rollouts[0].segments[0].versions_T.copy()
        versions[np.flatnonzero(versions >= 0)[0]] = version
        return changed(data, versions=versions.tobytes())

    return apply


def set_item(**fields):
    def apply(data):
        items = [msgspec.structs.replace(data.batch.items[0], **fields), *data.batch.items[1:]]
        data.batch = msgspec.structs.replace(data.batch, items=items)
        return data

    return apply


def infra(data):
    data.rollouts[0] = msgspec.structs.replace(data.rollouts[0], outcome=Outcome.INFRA)
    return data


def sampled_at_start(data):
    segment = data.rollouts[0].segments[0]
    logprobs, versions = segment.logprobs_T.copy(), segment.versions_T.copy()
    logprobs[0], versions[0] = -1.0, data.batch.version
    return changed(data, logprobs=logprobs.tobytes(), versions=versions.tobytes())


def nan_logprob(data):
    logprobs = data.rollouts[0].segments[0].logprobs_T.copy()
    logprobs[np.flatnonzero(np.isfinite(logprobs))[0]] = np.nan
    return changed(data, logprobs=logprobs.tobytes())


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (nan_logprob, "without a finite log-prob"),
        (lambda d: changed(d, ids=d.rollouts[0].segments[0].ids[:-4]), "streams of one rollout disagree"),
        (
            lambda d: changed(d, ids=np.full(len(d.rollouts[0].segments[0].ids_T), 64, "<i4").tobytes()),
            "id 64, outside",
        ),
        (lambda d: changed(d, route_shape=(0, 0), routes=[]), "trainer.replay = false"),
        (route_change(lambda r: r.__setitem__((1, 0, 0), 9)), "expert 9 of 4"),
        (route_change(lambda r: r.__setitem__((1, 0, 0), 255)), "only partly known"),
        (route_change(lambda r: r.__setitem__(1, 0)), "an expert twice"),
        (set_version(6), "version 6, which version 5 cannot know"),
        (set_version(2), "max_staleness is 2"),
        (set_item(advantage=float("nan")), "advantage is nan"),
        (set_item(rollout="other"), "holds rollout v5-g0-0"),
        (infra, "infra"),
        (sampled_at_start, "nothing came before it"),
    ],
)
def test_malformed_rollouts_are_refused_by_name(maker, damage, sentence):
    data = damage(maker.batch(version=5))
    name = data.batch.items[0].rollout
    with pytest.raises(BatchError, match=sentence) as caught:
        maker.prepare(data)
    assert f"rollout {name}" in str(caught.value)


def test_a_payload_that_cannot_be_read(maker):
    data = maker.batch()
    data.rollouts[0] = data.batch  # type: ignore[call-overload]
    with pytest.raises(BatchError, match=r"rollout v0-g0-0: its payload .* cannot be read"):
        maker.prepare(data)
