"""Pins: the guard leaves a step alone while the policy is near its rollouts, and makes it smaller in proportion when it
is not; a few outliers don't decide; the step is a pure function of the batch."""

import dataclasses
import math

import pytest
import torch

from stretto.config import TrainerConfig
from stretto.trainer.guard import LARGEST, RECOVERY, SMALLEST, Guard
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.step import Distribution, learn


def guard(limit, *parts):
    """After one step."""
    made = Guard(limit)
    for part in parts:
        made.add(torch.tensor(part))
    made.settle()
    return made


def test_distance_is_half_the_mean_square_of_the_log_ratio():
    made = guard(0.01, [0.1, -0.2], [0.3])
    assert made.distance == pytest.approx((0.01 + 0.04 + 0.09) / 6)
    assert made.scale == pytest.approx(0.01 / made.distance)


def test_near_its_rollouts_nothing_happens():
    assert guard(0.05, [0.1, -0.2, 0.3]).scale == 1.0
    assert guard(0.05).scale == 1.0
    assert guard(0.0, [2.0] * 9).scale == 1.0, "0 is off"


def test_it_slows_at_once_and_recovers_slowly():
    made = guard(0.05, [2.0])
    assert made.scale == pytest.approx(0.05 / 2)
    made.settle()
    assert made.scale == SMALLEST, "distances that stay large multiply, down to a floor"
    made.begin()
    steps = 0
    while made.scale < 1.0:
        made.settle()
        steps += 1
    assert steps == math.ceil(math.log(1 / SMALLEST) / math.log(RECOVERY))


def test_the_scale_survives_a_restart():
    made, again = guard(0.05, [1.0]), Guard(0.05)
    again.load_state(made.state())
    assert again.scale == made.scale < 1.0
    again.load_state({})
    assert again.scale == 1.0
    off = Guard(0.0)
    off.load_state(made.state())
    assert off.scale == 1.0


def test_outliers_do_not_decide():
    """One token in a thousand of a ratio of exp(20) counts as much as one of exp(2)."""
    many = [0.0] * 999
    assert guard(0.05, [*many, 20.0]).distance == guard(0.05, [*many, LARGEST]).distance
    assert guard(0.05, [*many, 20.0]).scale == 1.0


def test_it_is_the_kl_to_second_order():
    """Against the exact divergence of two near distributions, in expectation over the behaviour policy's tokens."""
    logits = torch.randn(50, dtype=torch.float64)
    q = torch.log_softmax(logits, 0)
    p = torch.log_softmax(logits + 0.02 * torch.randn(50, dtype=torch.float64), 0)
    exact = float((q.exp() * (q - p)).sum())
    second_order = float((q.exp() * (p - q).clamp(-LARGEST, LARGEST).square()).sum()) / 2
    assert second_order == pytest.approx(exact, rel=0.05)


def moved(maker, distance, **settings):
    """The largest movement of a master in one step, when behaviour and policy are `distance` apart in every token."""
    samples = maker.prepare(maker.batch()).samples
    far = [dataclasses.replace(sample, behaviour_N=sample.behaviour_N + distance) for sample in samples]
    optimizer = MasterAdamW(maker.model, (0.9, 0.97), 0.0)
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    config = TrainerConfig.model_validate({"correction": "none", **settings})
    report = learn(maker.model, optimizer, far, config, Distribution(1.0, 1.0), lr=1e-3)
    assert report.applied
    return report, max(float((optimizer.masters[name] - before[name]).abs().max()) for name in before)


def test_a_step_far_from_its_rollouts_is_made_smaller(maker):
    report, distance = moved(maker, 1.0)
    assert report.moved == pytest.approx(0.5, rel=1e-3) and report.scale == pytest.approx(0.1, rel=1e-3)
    assert distance == pytest.approx(1e-4, rel=0.01)  # Adam's first step is the learning rate


def test_off_and_healthy_steps_are_whole(maker):
    for report, distance in (moved(maker, 1.0, guard=0), moved(maker, 0.1)):
        assert report.scale == 1.0 and distance == pytest.approx(1e-3, rel=0.01)


def test_what_is_not_finite_is_not_the_guards_business(maker):
    samples = maker.prepare(maker.batch()).samples
    samples[0] = dataclasses.replace(samples[0], advantage=math.nan)
    optimizer = MasterAdamW(maker.model, (0.9, 0.97), 0.0)
    report = learn(maker.model, optimizer, samples, TrainerConfig(), Distribution(1.0, 1.0), lr=1e-3)
    assert not report.finite and not report.applied
