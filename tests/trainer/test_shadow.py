"""Pins: a shadow's weights are worn and taken off without a trace, the average follows the masters, and it survives a
restart."""

import pytest
import torch

from stretto.model import checkpoint as huggingface
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.shadow import Shadow


@pytest.fixture
def optimizer(maker):
    return MasterAdamW(maker.model, (0.9, 0.97), 0.0)


def push(optimizer, value=1.0):
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step(1e-2)


def test_worn_inside_only_and_without_gradients(maker, optimizer):
    shadow = Shadow.of(optimizer, 0.5)
    push(optimizer)
    own = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
    with pytest.raises(InterruptedError), shadow.worn(optimizer):
        assert not torch.is_grad_enabled()
        for name, p in optimizer.parameters.items():
            assert torch.equal(p, p.bfloat16().float()) and not torch.equal(p, own[name])
        raise InterruptedError
    assert torch.is_grad_enabled() and all(torch.equal(own[n], p) for n, p in optimizer.parameters.items())


def test_the_average_follows_and_the_start_stays(maker, optimizer, tmp_path):
    huggingface.save(maker.model, tmp_path)
    start, average = Shadow.frozen(tmp_path), Shadow.of(optimizer, 0.75)
    name = next(iter(optimizer.masters))
    expected = optimizer.masters[name].clone()
    for _ in range(3):
        push(optimizer)
        for shadow in (start, average):
            shadow.follow(optimizer)
        expected = 0.75 * expected + 0.25 * optimizer.masters[name]
    with average.worn(optimizer):
        assert torch.equal(optimizer.parameters[name], average.state()["ema/" + name].bfloat16().float())
    assert torch.allclose(average.state()["ema/" + name], expected, atol=1e-6)
    assert start.state() == {}
    saved = huggingface.load(tmp_path)
    with start.worn(optimizer):
        assert all(torch.equal(a, b) for a, b in zip(maker.model.parameters(), saved.parameters(), strict=True))


def test_state_round_trip(optimizer):
    average = Shadow.of(optimizer, 0.75)
    push(optimizer)
    average.follow(optimizer)
    state = {key: value.clone() for key, value in average.state().items()}
    again = Shadow.of(optimizer, 0.75)
    again.load_state(state)
    assert all(torch.equal(state[key], value) for key, value in again.state().items())
    fresh = Shadow.of(optimizer, 0.75)
    fresh.load_state({})  # a checkpoint from before there was an average
    assert all(torch.equal(fresh.state()["ema/" + n], m) for n, m in optimizer.masters.items())
