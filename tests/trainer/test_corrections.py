"""Pins: weights are 1 on policy, capped or masked as named, finite at any log-ratio, constants."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.trainer.corrections import log_ratio, weigh

RATIOS = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20)


@pytest.mark.parametrize("correction", ["tis", "icepop", "none"])
def test_on_policy_weight_is_exactly_one(correction):
    logp = torch.randn(50) - 3
    weight, changed = weigh(log_ratio(logp, logp), correction, 2.0)
    assert torch.equal(weight, torch.ones(50)) and not changed.any()


@settings(deadline=None)
@given(RATIOS, st.floats(1.1, 10))
def test_against_a_float64_reference(differences, cap):
    ratio_N = log_ratio(torch.tensor(differences), torch.zeros(len(differences)))
    tis, ice = weigh(ratio_N, "tis", cap), weigh(ratio_N, "icepop", cap)
    for i, difference in enumerate(differences):
        if abs(abs(difference) - math.log(cap)) < 1e-5:
            continue  # on the edge rounding decides
        ratio = math.exp(max(-20.0, min(20.0, difference)))
        assert tis.weight_N[i].item() == pytest.approx(min(ratio, cap), rel=1e-5)
        assert ice.weight_N[i].item() == pytest.approx(ratio if 1 / cap <= ratio <= cap else 0.0, rel=1e-5)
        assert tis.changed_N[i].item() == (ratio > cap)
        assert ice.changed_N[i].item() == (not 1 / cap <= ratio <= cap)


@pytest.mark.parametrize("difference", [1e4, -1e4, math.inf, -math.inf])
@pytest.mark.parametrize("correction", ["tis", "icepop", "none"])
def test_huge_log_ratios_stay_finite(correction, difference):
    ratio_N = log_ratio(torch.tensor([difference]), torch.tensor([0.0]))
    weight, _ = weigh(ratio_N, correction, 2.0)
    assert weight.isfinite().all() and ratio_N.exp().isfinite().all() and 0 <= weight.item() <= 2.0 + 1e-6


def test_nan_is_not_hidden():
    ratio_N = log_ratio(torch.tensor([math.nan]), torch.tensor([0.0]))
    assert weigh(ratio_N, "tis", 2.0).weight_N.isnan().all()


def test_weights_carry_no_gradient():
    current = torch.randn(5, requires_grad=True)
    assert not log_ratio(current, torch.zeros(5)).requires_grad
    assert not weigh(log_ratio(current, torch.zeros(5)), "tis", 2.0).weight_N.requires_grad
