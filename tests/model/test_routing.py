"""Pins router replay: own routes change nothing to the bit, foreign ones keep the router's
gradient, unknown rows stay free, networks stay apart; and the experts' hand-written gradients are autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.moe import Experts
from stretto.model.router import balance_loss, choose, select
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Output, Transformer

torch.set_num_threads(1)
SPEC = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=80,
    hidden_size=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    experts=6,
    experts_per_token=2,
    expert_size=16,
    norm_topk_prob=True,
    dense_layers=(1,),
    initializer_range=0.3,
)
LENGTHS = [9, 14]
T, L, K, E = sum(LENGTHS), 3, 2, 6


@pytest.fixture
def model() -> Transformer:
    return checkpoint.random_init(SPEC, seed=0)


def run(model: Transformer, routes_TLK: Tensor | None = None) -> Output:
    ids_T = torch.arange(T) * 7 % SPEC.vocab_size
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    return model(ids_T, positions_T, PackedCausal(LENGTHS), routes_TLK=routes_TLK, capture=True)


def foreign_routes() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T * L)]).view(T, L, K)


def gradients(model: Transformer, routes_TLK: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    run(model, routes_TLK).hidden_TD.square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_replaying_own_routes_is_identical_to_the_bit(model: Transformer) -> None:
    free = run(model)
    assert free.disagreement is None and free.covered is None
    replayed = run(model, free.routes_TLK)
    assert torch.equal(replayed.hidden_TD, free.hidden_TD)
    assert torch.equal(replayed.routes_TLK, free.routes_TLK)
    assert replayed.disagreement.item() == 0 and replayed.covered.item() == T * L
    for name, gradient in gradients(model, None).items():
        assert torch.equal(gradient, gradients(model, free.routes_TLK)[name]), name


def test_foreign_routes_are_obeyed_and_the_router_keeps_its_gradient(model: Transformer) -> None:
    routes_TLK = foreign_routes()
    out = run(model, routes_TLK)
    assert torch.equal(out.routes_TLK, routes_TLK)
    assert not torch.equal(out.hidden_TD, run(model).hidden_TD)
    assert 0 < out.disagreement.item() < 1
    routers = {name: g for name, g in gradients(model, routes_TLK).items() if name.endswith("mlp.gate.weight")}
    assert len(routers) == L and all(gradient.abs().max() > 0 for gradient in routers.values())


def test_unknown_rows_route_freely(model: Transformer) -> None:
    own_TLK = run(model).routes_TLK
    unknown = run(model, torch.full((T, L, K), -1))
    assert torch.equal(unknown.routes_TLK, own_TLK)
    assert unknown.covered.item() == 0 and unknown.disagreement.item() == 0
    routes_TLK = foreign_routes()
    routes_TLK[5] = -1  # a whole token
    routes_TLK[6, 0] = -1  # the first layer of the next
    out = run(model, routes_TLK)
    known = routes_TLK >= 0
    assert torch.equal(out.routes_TLK[known], routes_TLK[known])
    assert torch.equal(out.routes_TLK[5:7, 0], own_TLK[5:7, 0])  # layer 0 sees the same input whatever was replayed
    assert out.covered.item() == T * L - L - 1


def test_disagreement_counts_sets_not_orders(model: Transformer) -> None:
    own_TLK = run(model).routes_TLK
    assert run(model, own_TLK.flip(-1)).disagreement.item() == 0
    one = own_TLK.clone()
    one[-1, -1, 0] = next(e for e in range(E) if e not in own_TLK[-1, -1])
    assert run(model, one).disagreement.item() == pytest.approx(1 / (T * L))


def test_two_networks_stay_apart(model: Transformer) -> None:
    other = checkpoint.random_init(SPEC, seed=1)
    alone = run(model), run(other)
    run(model, foreign_routes())
    mixed = run(other), run(model)
    assert torch.equal(mixed[1].hidden_TD, alone[0].hidden_TD)
    assert torch.equal(mixed[0].hidden_TD, alone[1].hidden_TD)


def test_recomputation_reuses_the_replayed_routes(model: Transformer) -> None:
    routes_TLK = foreign_routes()
    plain = gradients(model, routes_TLK)
    model.zero_grad()
    recompute(lambda: run(model, routes_TLK).hidden_TD, use_reentrant=False).square().mean().backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert torch.equal(weight.grad, plain[name]), name


@pytest.mark.parametrize(
    "routes_TLK",
    [
        torch.zeros(T - 1, L, K, dtype=torch.int64),
        torch.zeros(T, L + 1, K, dtype=torch.int64),
        torch.zeros(T, L, K, dtype=torch.int32),
        torch.full((T, L, K), E),
        torch.full((T, L, K), -2),
        torch.tensor([0, -1]).expand(T, L, K),
    ],
    ids=["short", "layers", "dtype", "too_big", "too_small", "half_known"],
)
def test_routes_that_do_not_fit_are_refused(model: Transformer, routes_TLK: Tensor) -> None:
    with pytest.raises(ValueError, match="routes"):
        run(model, routes_TLK)


def test_ties_go_to_the_lowest_index() -> None:
    logits_TE = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 2.0, 1.0, 5.0]])
    assert choose(logits_TE, 3).tolist() == [[1, 2, 3], [0, 1, 2], [4, 0, 2]]
    assert choose(torch.zeros(1000, 64), 8).unique(dim=0).tolist() == [list(range(8))]


@pytest.mark.parametrize("normalize", [True, False])
def test_gates_are_those_of_the_full_softmax(normalize: bool) -> None:
    logits_TE = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    experts_TK, gates_TK = select(logits_TE, 3, None, normalize)
    expected = torch.softmax(logits_TE, -1).topk(3).values
    torch.testing.assert_close(gates_TK, expected / expected.sum(-1, keepdim=True) if normalize else expected)
    replayed_TK, foreign_gates_TK = select(logits_TE, 3, experts_TK.flip(0), normalize)
    live = torch.softmax(logits_TE, -1).gather(1, replayed_TK)
    torch.testing.assert_close(foreign_gates_TK, live / live.sum(-1, keepdim=True) if normalize else live)


def plain_experts(experts: Experts, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
    rows = []
    for x_D, chosen, gates in zip(x_TD, experts_TK.tolist(), gates_TK, strict=True):
        total = torch.zeros_like(x_D)
        for expert, gate in zip(chosen, gates, strict=True):
            inner, up = F.linear(x_D, experts.gate_up_proj[expert]).chunk(2)
            total = total + gate * F.linear(F.silu(inner) * up, experts.down_proj[expert])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("case", ["spread", "idle_experts", "one_token"])
def test_experts_and_their_gradients_are_those_of_plain_autograd(case: str) -> None:
    generator = torch.Generator().manual_seed(1)
    experts = checkpoint.random_init(SPEC, seed=4).layers[0].mlp.experts
    tokens = 1 if case == "one_token" else 20
    x_TD = torch.randn(tokens, 32, generator=generator)
    experts_TK = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)])
    if case == "idle_experts":
        experts_TK = torch.tensor([[2, 5]]).expand(tokens, K)
    gates_TK = torch.rand(tokens, K, generator=generator)
    results = []
    for forward in (experts, lambda *args: plain_experts(experts, *args)):
        experts.zero_grad()
        inputs = x_TD.clone().requires_grad_(), gates_TK.clone().requires_grad_()
        out_TD = forward(inputs[0], experts_TK, inputs[1])
        out_TD.sin().sum().backward()
        results.append((out_TD.detach(), *(t.grad.clone() for t in (*inputs, *experts.parameters()))))
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)


def test_balance_loss_is_one_when_balanced_and_grows_with_imbalance() -> None:
    balanced_TLK = torch.arange(24).view(12, 1, 2) % E
    assert balance_loss([torch.zeros(12, E)], balanced_TLK, E).item() == pytest.approx(1.0)
    skewed = torch.zeros(12, E)
    skewed[:, :2] = 4.0
    skewed.requires_grad_()
    loss = balance_loss([skewed, torch.zeros(12, E)], torch.tensor([0, 1]).expand(12, 2, 2), E)
    assert loss.item() > 1.5
    loss.backward()
    assert (skewed.grad[:, :2] > 0).all() and (skewed.grad[:, 2:] < 0).all()
