"""Pins one optimizer step: on-policy gradient, replay, no step without signal or with values that aren't finite, masked
micro-batches, and that learning moves probability towards what was rewarded."""

import dataclasses

import numpy as np
import pytest
import torch

from stretto.config import TrainerConfig
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.packing import join
from stretto.trainer.samples import UNKNOWN
from stretto.trainer.step import Distribution, learn, predict, without_routes

DISTRIBUTION = Distribution(1.0, 1.0)


def optimizer_of(model):
    return MasterAdamW(model, (0.9, 0.97), 0.0)


def step(model, optimizer, samples, lr=1e-3, **settings):
    return learn(model, optimizer, samples, TrainerConfig(**settings), DISTRIBUTION, lr)


def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_plain_policy_gradient(maker):
    samples = maker.prepare(maker.batch()).samples
    micro = join(samples)
    logp = predict(maker.model, micro, DISTRIBUTION).logp_N
    assert torch.allclose(logp, micro.behaviour_N, atol=1e-5)
    (micro.share_N * micro.advantage_N * logp).sum().neg().backward()
    plain = torch.cat([p.grad.flatten() for p in maker.model.parameters()])
    report = step(maker.model, optimizer_of(maker.model), samples, max_grad_norm=1e9)
    assert report.grad_norm == pytest.approx(plain.norm().item(), rel=1e-5)
    assert report.ratio_mean == pytest.approx(1.0, abs=1e-5) and report.clipped == 0.0
    assert report.trained_tokens == len(micro.targets_N)


def test_learning_raises_the_probability_of_what_was_rewarded(maker):
    samples = maker.prepare(maker.batch()).samples
    micro = join(samples)
    optimizer = optimizer_of(maker.model)
    for _ in range(4):
        assert step(maker.model, optimizer, samples, lr=3e-3).applied
    with torch.no_grad():
        gain = predict(maker.model, micro, DISTRIBUTION).logp_N - micro.behaviour_N
    assert gain[micro.advantage_N > 0].mean() > 0.05 and gain[micro.advantage_N < 0].mean() < -0.05


def test_RPL_7_replay_forces_experts_and_keeps_the_routers_gradient(maker):
    data = maker.batch()
    samples = maker.prepare(data).samples
    swapped = [dataclasses.replace(s, routes_TLK=(s.routes_TLK + 1) % 4) for s in samples]
    with torch.no_grad():
        own = predict(maker.model, join(samples), DISTRIBUTION)
        other = predict(maker.model, join(swapped), DISTRIBUTION)
        free = predict(maker.model, without_routes(join(samples)), DISTRIBUTION)
    assert torch.equal(own.logp_N, free.logp_N) and own.disagreement == 0
    assert other.disagreement > 0.5 and (other.logp_N - own.logp_N).abs().max() > 1e-3
    logp = predict(maker.model, join(swapped), DISTRIBUTION).logp_N
    logp.sum().backward()
    for layer in maker.model.layers:
        assert layer.mlp.gate.weight.grad.abs().max() > 0


def test_RPL_6_unknown_rows_route_freely(maker):
    samples = maker.prepare(maker.batch()).samples
    unknown = [dataclasses.replace(s, routes_TLK=np.full_like(s.routes_TLK, UNKNOWN)) for s in samples]
    with torch.no_grad():
        blind, free = (
            predict(maker.model, micro, DISTRIBUTION) for micro in (join(unknown), without_routes(join(samples)))
        )
    assert torch.equal(blind.logp_N, free.logp_N) and blind.covered == 0


def test_no_signal_moves_nothing(maker):
    optimizer = optimizer_of(maker.model)
    step(maker.model, optimizer, maker.prepare(maker.batch()).samples)
    before = {key: value.clone() for key, value in optimizer.state().items()}
    report = step(maker.model, optimizer, [])
    assert not report.applied and report.finite and report.trained_tokens == 0
    assert all(torch.equal(before[key], value) for key, value in optimizer.state().items())


def test_a_fully_masked_batch_has_zero_gradient_for_every_parameter(maker):
    samples = maker.prepare(maker.batch()).samples
    far = [dataclasses.replace(s, behaviour_N=s.behaviour_N - 5.0) for s in samples]
    optimizer = optimizer_of(maker.model)
    before = {name: p.detach().clone() for name, p in maker.model.named_parameters()}
    report = step(maker.model, optimizer, far, correction="icepop")
    assert report.clipped == 1.0 and report.grad_norm == 0.0 and report.loss == 0.0
    assert all(torch.equal(before[name], p) for name, p in maker.model.named_parameters())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_stops_before_the_optimizer(maker, bad):
    samples = maker.prepare(maker.batch()).samples
    optimizer = optimizer_of(maker.model)
    step(maker.model, optimizer, samples)
    before = {key: value.clone() for key, value in optimizer.state().items()}
    broken = [dataclasses.replace(samples[0], advantage=bad), *samples[1:]]
    report = step(maker.model, optimizer, broken)
    assert not report.finite and not report.applied
    assert all(torch.equal(before[key], value) for key, value in optimizer.state().items())
    assert step(maker.model, optimizer, samples).applied


def test_huge_log_ratios_make_a_finite_step(maker):
    samples = maker.prepare(maker.batch()).samples
    far = [dataclasses.replace(s, behaviour_N=np.full_like(s.behaviour_N, -1e4)) for s in samples]
    report = step(maker.model, optimizer_of(maker.model), far)
    assert report.applied and report.clipped == 1.0 and report.ratio_max < 1e9


def test_abandoning_between_micro_batches_changes_nothing(maker):
    samples = maker.prepare(maker.batch()).samples
    optimizer = optimizer_of(maker.model)
    before = {key: value.clone() for key, value in optimizer.state().items()}
    calls = 0

    def between():
        nonlocal calls
        calls += 1
        if calls == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        learn(maker.model, optimizer, samples, TrainerConfig(microbatch_tokens=40), DISTRIBUTION, 1e-3, between)
    assert all(torch.equal(before[key], value) for key, value in optimizer.state().items())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_ENG_6_temperature_is_that_of_the_engine(maker, temperature):
    """Log-probs are of the tempered distribution on both sides."""
    maker.temperature = temperature
    micro = join(maker.prepare(maker.batch()).samples)
    with torch.no_grad():
        logp = predict(maker.model, micro, Distribution(temperature, 1.0)).logp_N
        other = predict(maker.model, micro, Distribution(temperature + 0.3, 1.0)).logp_N
    assert torch.allclose(logp, micro.behaviour_N, atol=1e-5)
    assert (other - micro.behaviour_N).abs().max() > 0.01
