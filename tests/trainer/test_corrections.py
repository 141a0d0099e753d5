"""Pins: each coefficient equals a slow reference written from its paper, is exactly 1 where the policies agree, finite
at any log-ratio, and a constant."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.trainer import corrections
from stretto.trainer.corrections import Sequences, log_ratio

FLOOR, CAP = 0.5, 3.0
BOUNDS = LOW, HIGH, DUAL = 0.2, 0.28, 4.0

WEIGHTS = {
    "none": lambda d, a, s: corrections.uncorrected(d),
    "tis": lambda d, a, s: corrections.truncated(d, CAP),
    "sequence-tis": lambda d, a, s: corrections.truncated_sequences(d, s, CAP),
    "icepop": lambda d, a, s: corrections.two_sided_mask(d, FLOOR, CAP),
    "sequence-mask": lambda d, a, s: corrections.sequence_mask(d, s, FLOOR, CAP),
    "geometric-mask": lambda d, a, s: corrections.geometric_mask(d, s, FLOOR, CAP),
    "ppo": lambda d, a, s: corrections.clipped(d, a, BOUNDS),
    "gspo": lambda d, a, s: corrections.clipped_sequences(d, a, s, BOUNDS),
    "cispo": lambda d, a, s: corrections.truncated(d, 1 + HIGH),
    "dppo": lambda d, a, s: bounded_change(d, a),
}


def bounded_change(ratio: torch.Tensor, advantage: torch.Tensor) -> corrections.Weighed:
    """For log-probs that have this ratio and are those of probabilities."""
    current = -ratio.abs() - 0.1
    return corrections.bounded_change(ratio, current, current - ratio, advantage, BOUNDS)


def reference(name: str, ratios: list[list[float]], advantages: list[list[float]]) -> list[float]:
    """One coefficient per token, from lists of lists: the papers' formulas, one token at a time."""
    found = []
    for sequence, gains in zip(ratios, advantages, strict=True):
        product = math.prod(sequence)
        product = min(max(product, math.exp(-20)), math.exp(20))
        mean = math.prod(r ** (1 / len(sequence)) for r in sequence)
        for r, a in zip(sequence, gains, strict=True):
            match name:
                case "none":
                    w = 1.0
                case "tis":
                    w = min(r, CAP)
                case "sequence-tis":
                    w = min(product, CAP)
                case "icepop":
                    w = r if FLOOR <= r <= CAP else 0.0
                case "sequence-mask":
                    w = product if FLOOR <= product <= CAP else 0.0
                case "geometric-mask":
                    w = 1.0 if FLOOR <= mean <= CAP else 0.0
                case "ppo":
                    w = 0.0 if (r > 1 + HIGH and a > 0) or (r < 1 - LOW and a < 0) or r > DUAL else r
                case "gspo":
                    cut = (mean > 1 + HIGH and a > 0) or (mean < 1 - LOW and a < 0) or mean > DUAL
                    w = 0.0 if cut else mean
                case "cispo":
                    w = min(r, 1 + HIGH)
                case _:
                    raise AssertionError(name)
            found.append(w)
    return found


token = st.tuples(st.floats(-30, 30), st.sampled_from([-1.5, 0.5]))
batches = st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4)
EDGES = [math.log(e) for e in (FLOOR, CAP, 1 + HIGH, 1 - LOW, DUAL)]


def near_an_edge(sequences: list[list[float]]) -> bool:
    """There, rounding decides."""
    values = [d for sequence in sequences for d in (*sequence, sum(sequence), sum(sequence) / len(sequence))]
    return any(abs(value - edge) < 1e-4 for value in values for edge in EDGES)


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "dppo"])
@settings(deadline=None, max_examples=60)
@given(batches)
def test_against_a_slow_reference(name, batch):
    clamped = [[max(-20.0, min(20.0, d)) for d, _ in sequence] for sequence in batch]
    if near_an_edge(clamped):
        return
    gains = [[a for _, a in sequence] for sequence in batch]
    flat = torch.tensor([d for sequence in batch for d, _ in sequence])
    sequences = Sequences.of_lengths([len(sequence) for sequence in batch])
    found = WEIGHTS[name](
        log_ratio(flat, torch.zeros_like(flat)), torch.tensor([a for group in gains for a in group]), sequences
    )
    expected = reference(name, [[math.exp(d) for d in sequence] for sequence in clamped], gains)
    assert found.weight_N.tolist() == pytest.approx(expected, rel=1e-4)
    if name != "none":
        plain = [
            r for s in clamped for r in ([math.exp(sum(s))] * len(s) if name.startswith("seq") else map(math.exp, s))
        ]
        masked = torch.tensor([w == 0.0 and r > 1e-8 for w, r in zip(expected, plain, strict=True)])
        assert (found.changed_N | ~masked).all(), "what was masked is counted as changed"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.001, 1.0), st.sampled_from([-1.0, 1.0])), min_size=1))
def test_dppo_masks_by_the_change_of_probability(tokens):
    current, proximal, advantage = (torch.tensor(column) for column in zip(*tokens, strict=True))
    ratio = log_ratio(current.log(), proximal.log())
    found = corrections.bounded_change(ratio, current.log(), proximal.log(), advantage, (0.2, 0.1, 1000.1))
    for (p, q, a), weight in zip(tokens, found.weight_N.tolist(), strict=True):
        if min(abs(p - q - 0.1), abs(q - p - 0.2)) < 1e-5:
            continue
        cut = (p - q > 0.1 and a > 0) or (q - p > 0.2 and a < 0)
        assert weight == pytest.approx(0.0 if cut else p / q, rel=1e-4)


def test_the_off_policy_mask_takes_bad_sequences_that_have_become_unlikely():
    ratio = torch.tensor([-0.3, -0.3, -0.3, -0.3, 0.5, 0.5, -0.1, 0.0])
    advantage = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    sequences = Sequences.of_lengths([2, 2, 2, 2])
    assert corrections.off_policy(ratio, advantage, sequences, 0.1).tolist() == [True] * 2 + [False] * 6


@pytest.mark.parametrize("name", WEIGHTS)
def test_where_the_policies_agree_the_weight_is_exactly_one(name):
    logp = torch.randn(50) - 3
    sequences = Sequences.of_lengths([10, 1, 39])
    ratio = log_ratio(logp, logp)
    weight, changed = WEIGHTS[name](ratio, torch.randn(50), sequences)
    assert torch.equal(weight, torch.ones(50)) and not changed.any()


@pytest.mark.parametrize("difference", [1e4, -1e4, math.inf, -math.inf])
@pytest.mark.parametrize("name", WEIGHTS)
def test_GRP_6_huge_log_ratios_stay_finite(name, difference):
    ratio = log_ratio(torch.full((200,), difference), torch.zeros(200))
    for advantage in (-1.0, 1.0):
        weight, _ = WEIGHTS[name](ratio, torch.full((200,), advantage), Sequences.of_lengths([150, 50]))
        assert weight.isfinite().all() and ratio.exp().isfinite().all() and (weight >= 0).all()


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name not in ("none", "dppo")])
def test_nan_is_not_hidden(name):
    ratio = log_ratio(torch.tensor([math.nan]), torch.tensor([0.0]))
    assert WEIGHTS[name](ratio, torch.ones(1), Sequences.of_lengths([1])).weight_N.isnan().all()


@pytest.mark.parametrize("name", WEIGHTS)
def test_GRP_4_no_gradient_flows_through_a_weight(name):
    current = torch.randn(5, requires_grad=True)
    ratio = log_ratio(current, torch.zeros(5))
    assert not ratio.requires_grad
    assert not WEIGHTS[name](ratio, torch.ones(5), Sequences.of_lengths([5])).weight_N.requires_grad


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=9), min_size=2, max_size=5))
def test_a_sequences_sum_does_not_depend_on_its_company(sequences):
    together = torch.tensor([v for sequence in sequences for v in sequence])
    sums = Sequences.of_lengths([len(s) for s in sequences]).sum(together)
    alone = [Sequences.of_lengths([len(s)]).sum(torch.tensor(s)) for s in sequences]
    assert torch.equal(sums, torch.cat(alone))
