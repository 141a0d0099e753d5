"""Pins when the disagreement of engine and trainer is said, and when training must not start (PITFALLS ENG-9)."""

import torch

from stretto.trainer import alarms
from stretto.trainer.agreement import ALL, Agreement, Bucket, Rows
from stretto.trainer.alarms import Alarms, alarming, refusal


def bucket(off=0.0, tokens=200, replaced=0.0, unknown=0.0, disagreement=0.0, replay=True) -> Bucket:
    """Tokens that the trainer finds more or less likely by `off`, and shares of their rows."""
    agreement = Agreement()
    engine_N = -3.0 * torch.rand(tokens, generator=torch.Generator().manual_seed(0)) - 0.01
    sign_N = torch.where(torch.arange(tokens) % 2 == 0, 1.0, -1.0)
    share_N = (torch.arange(tokens) / tokens).unsqueeze(1)
    known_NL = share_N >= unknown
    last_N = 1 - share_N - 1e-6  # so that rows at the end are known
    rows = Rows(known_NL, last_N < disagreement * (1 - unknown), last_N < replaced * (1 - unknown))
    agreement.add(engine_N + off * sign_N, engine_N, torch.zeros(tokens, dtype=torch.int64), rows if replay else None)
    return agreement.buckets(0)[ALL]


def step(**shares):
    one = bucket(**shares)
    return {ALL: one, "0": one}


def test_a_healthy_step_says_nothing():
    assert Alarms().news(step(off=1e-3)) == [] and Alarms().news(step(replay=False)) == []
    assert Alarms().news({}) == []


def test_each_threshold_has_its_sentence():
    assert set(alarming(step(replaced=0.06))) == {"misaligned"}
    assert "do not belong to these tokens" in alarming(step(replaced=0.06))["misaligned"]
    assert not alarming(step(replaced=0.04))
    assert set(alarming(step(unknown=0.01))) == {"coverage"}
    assert set(alarming(step(disagreement=0.4))) == {"misaligned"}, "strict replay replaces nothing"
    assert set(alarming({ALL: bucket(off=0.8)})) == {"far"}, "stale tokens may drift, but not this far"
    assert not alarming({ALL: bucket(off=0.5)})
    assert set(alarming(step(off=0.1))) == {"same"}, "under the same version that is not rounding"


def test_an_alarm_is_said_when_it_begins_and_again_when_it_comes_back():
    state = Alarms()
    assert len(state.news(step(replaced=0.2))) == 1
    assert state.news(step(replaced=0.3)) == []
    assert state.news(step()) == []
    assert len(state.news(step(replaced=0.2))) == 1


def test_ENG_9_a_jump_of_numerics_is_said_though_it_passes_no_threshold():
    state = Alarms()
    assert [state.jump(k3) for k3 in (2e-5, 1e-5, 3e-5, 2e-5)] == [None] * 4
    assert "jumped to 4.0e-04 from 2.0e-05" in (state.jump(4e-4) or "")


def test_tiny_jumps_are_nobodys_concern():
    state = Alarms()
    assert [state.jump(k3) for k3 in (1e-13, 1e-13, 1e-8, 9e-6)] == [None] * 4


def test_ENG_9_what_engine_and_trainer_do_not_share_is_refused_with_its_numbers():
    assert refusal(bucket(off=0.02)) is None
    sentence = refusal(bucket(off=0.7))
    assert sentence is not None
    for part in ("k3", "correlate", "largest difference", "temperature", str(alarms.GATE_K3)):
        assert part in sentence


def test_ENG_9_uncorrelated_probabilities_are_refused_even_when_close_on_average():
    agreement = Agreement()
    engine_N = torch.full((200,), -0.3) + 0.05 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    trainer_N = torch.full((200,), -0.3) + 0.05 * torch.randn(200, generator=torch.Generator().manual_seed(1))
    agreement.add(trainer_N, engine_N, torch.zeros(200, dtype=torch.int64), None)
    found = agreement.buckets(0)[ALL]
    assert found.divergence.k3 < alarms.GATE_K3 and refusal(found) is not None


def test_too_few_tokens_decide_nothing():
    assert refusal(bucket(off=1.0, tokens=alarms.GATE_TOKENS - 2)) is None
