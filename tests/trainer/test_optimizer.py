"""Pins: the model holds bf16 values only, small updates add up in the masters, nothing that is not finite survives."""

import pytest
import torch
from torch import nn

from stretto.config import TrainerConfig
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.schedule import FLOOR, learning_rate


@pytest.fixture
def pair():
    torch.manual_seed(0)
    network = nn.Linear(8, 4)
    return network, MasterAdamW(network, (0.9, 0.97), 0.0)


def fill(network, value=1.0):
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_the_model_holds_the_rounded_masters(pair):
    network, optimizer = pair
    for _ in range(3):
        fill(network)
        optimizer.step(1e-3)
        for name, parameter in network.named_parameters():
            assert torch.equal(parameter, parameter.bfloat16().float())
            assert torch.equal(parameter, optimizer.masters[name].bfloat16().float())
    assert not torch.equal(optimizer.masters["weight"], network.weight)


def test_updates_below_one_ulp_are_not_lost():
    network = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        network.weight.fill_(1.0)
    optimizer = MasterAdamW(network, (0.9, 0.97), 0.0)
    seen = set()
    for _ in range(100):  # a bf16 step below 1.0 is 2^-8; each of ours is 1e-4
        fill(network)
        optimizer.step(1e-4)
        seen.add(network.weight.item())
    assert network.weight.item() == pytest.approx(0.99, abs=0.004) and len(seen) == 4


def test_equals_plain_adamw_on_the_masters(pair):
    network, optimizer = pair
    reference = nn.Linear(8, 4)
    reference.load_state_dict({k: v.clone() for k, v in optimizer.masters.items()})
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.97), weight_decay=0.0)
    for step in range(3):
        for ours, theirs in zip(network.parameters(), reference.parameters(), strict=True):
            ours.grad = torch.full_like(ours, float(step - 1))
            theirs.grad = ours.grad.clone()
        optimizer.step(1e-2)
        adamw.step()
    for name, parameter in reference.named_parameters():
        assert torch.allclose(optimizer.masters[name], parameter, atol=1e-7)


def test_weight_decay_spares_vectors():
    network = nn.Linear(4, 4)
    optimizer = MasterAdamW(network, (0.9, 0.97), weight_decay=0.5)
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    fill(network, 0.0)
    optimizer.step(0.1)
    assert torch.equal(optimizer.masters["bias"], before["bias"])
    assert torch.allclose(optimizer.masters["weight"], before["weight"] * 0.95)


def test_an_update_that_overflows_is_an_error(pair):
    network, optimizer = pair
    fill(network)
    with pytest.raises(FloatingPointError, match="weight"):
        optimizer.step(3.4e38)


def test_state_round_trip_continues_bit_for_bit(pair):
    network, optimizer = pair
    fill(network)
    optimizer.step(1e-3)
    state = {key: value.clone() for key, value in optimizer.state().items()}
    other = nn.Linear(8, 4)
    resumed = MasterAdamW(other, (0.9, 0.97), 0.0)
    resumed.load_state(state)
    for n, o in ((network, optimizer), (other, resumed)):
        fill(n, -0.5)
        o.step(1e-3)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.state().values(), resumed.state().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))


def test_state_of_another_model_is_refused(pair):
    _, optimizer = pair
    other = MasterAdamW(nn.Linear(8, 5), (0.9, 0.97), 0.0)
    with pytest.raises(ValueError, match="weight"):
        other.load_state(optimizer.state())


def test_schedule_is_a_function_of_the_version():
    settings = TrainerConfig(lr=1.0, warmup_steps=4, steps=12, decay_steps=4)
    rates = [learning_rate(v, settings) for v in range(15)]
    assert rates == [0.25, 0.5, 0.75, *[1.0] * 6, 0.75, 0.5, 0.25, FLOOR, FLOOR, FLOOR]
    assert learning_rate(0, TrainerConfig(lr=1.0, warmup_steps=0)) == 1.0
    assert learning_rate(99, TrainerConfig(lr=1.0, steps=100)) == 1.0
