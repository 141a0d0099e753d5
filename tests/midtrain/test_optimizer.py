"""AdamW, and Muon on the matrices inside: which weight is moved by which, in place, and as a resumed run needs it."""

from __future__ import annotations

import copy

import pytest
import torch

from stretto.midtrain.optimizer import Optimizer, slices


def named() -> dict[str, torch.nn.Parameter]:
    shapes = {
        "embed_tokens.weight": (9, 4),
        "layers.0.self_attn.q_proj.weight": (6, 4),
        "layers.0.mlp.gate.weight": (3, 4),
        "layers.0.mlp.experts.gate_up_proj": (3, 8, 4),
        "layers.0.mlp.experts.down_proj": (3, 4, 4),
        "norm.weight": (4,),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def give_gradients(parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_inner_matrices_move_along_orthogonal_directions_one_by_one():
    parameters = named()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = Optimizer(parameters, weight_decay=0.0, betas=(0.9, 0.95), muon=True)
    give_gradients(parameters, 1)
    optimizer.step(0.1)
    assert all(parameter.grad is None for parameter in parameters.values())
    moved = {name: before[name] - parameter.detach() for name, parameter in parameters.items()}
    for name in (
        "layers.0.self_attn.q_proj.weight",
        "layers.0.mlp.experts.gate_up_proj",
        "layers.0.mlp.experts.down_proj",
    ):
        for one in slices(name, torch.nn.Parameter(moved[name])):
            values = torch.linalg.svdvals(one.leaf)
            assert values.max() / values.min() < 2.5, (name, values)  # five steps of Newton-Schulz: about equal
    for name in ("embed_tokens.weight", "layers.0.mlp.gate.weight", "norm.weight"):
        assert torch.allclose(moved[name].abs(), torch.full_like(moved[name], 0.1), rtol=1e-3), "AdamW's first step"


def test_without_muon_it_is_adamw_to_the_bit():
    ours, theirs = named(), named()
    optimizer = Optimizer(ours, weight_decay=0.05, betas=(0.9, 0.95))
    matrices = [p for p in theirs.values() if p.ndim >= 2]
    vectors = [p for p in theirs.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    for seed in range(3):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimizer.step(0.01)
        adamw.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("muon", [False, True])
def test_a_resumed_optimizer_goes_on_to_the_bit(muon):
    whole, part = named(), named()
    first, second = (Optimizer(p, 0.05, (0.9, 0.95), muon) for p in (whole, part))
    for seed in range(4):
        give_gradients(whole, seed)
        first.step(0.01)
        give_gradients(part, seed)
        second.step(0.01)
        if seed == 1:
            saved = copy.deepcopy(second.state())
            second = Optimizer(part, 0.05, (0.9, 0.95), muon)
            second.load_state(saved)
    assert all(torch.equal(whole[name], part[name]) for name in whole)


def test_an_expert_without_a_gradient_stays():
    parameters = named()
    optimizer = Optimizer(parameters, 0.0, (0.9, 0.95), muon=True)
    before = parameters["layers.0.mlp.experts.down_proj"].detach().clone()
    parameters["norm.weight"].grad = torch.ones(4)
    optimizer.step(0.1)
    assert torch.equal(parameters["layers.0.mlp.experts.down_proj"], before)
