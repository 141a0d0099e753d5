"""Pins router replay: own routes change nothing to the bit, foreign ones keep the router's
gradient, unknown rows stay free, networks stay apart; and the experts' hand-written gradients are autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.deepseek import Grouping
from stretto.model.moe import Experts
from stretto.model.router import Selection, balance_loss, choose, grouped_ranks, select
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


def run(model: Transformer, routes_TLK: Tensor | None = None, **options: float) -> Output:
    ids_T = torch.arange(T) * 7 % SPEC.vocab_size
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    return model(ids_T, positions_T, PackedCausal(LENGTHS), routes_TLK=routes_TLK, capture=True, **options)


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


def test_RPL_7_foreign_routes_are_obeyed_and_the_router_keeps_its_gradient(model: Transformer) -> None:
    routes_TLK = foreign_routes()
    out = run(model, routes_TLK)
    assert torch.equal(out.routes_TLK, routes_TLK)
    assert not torch.equal(out.hidden_TD, run(model).hidden_TD)
    assert 0 < out.disagreement.item() < 1
    routers = {name: g for name, g in gradients(model, routes_TLK).items() if name.endswith("mlp.gate.weight")}
    assert len(routers) == L and all(gradient.abs().max() > 0 for gradient in routers.values())


def test_RPL_6_unknown_rows_route_freely(model: Transformer) -> None:
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


def test_RPL_9_two_networks_stay_apart(model: Transformer) -> None:
    other = checkpoint.random_init(SPEC, seed=1)
    alone = run(model), run(other)
    run(model, foreign_routes())
    mixed = run(other), run(model)
    assert torch.equal(mixed[1].hidden_TD, alone[0].hidden_TD)
    assert torch.equal(mixed[0].hidden_TD, alone[1].hidden_TD)


def test_RPL_8_recomputation_reuses_the_replayed_routes(model: Transformer) -> None:
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
    scores_TE = torch.softmax(logits_TE, -1)
    own = select(scores_TE, 3, normalize=normalize)
    assert own.replaced_T is None and own.differs_T is None
    expected = scores_TE.topk(3).values
    torch.testing.assert_close(own.gates_TK, expected / expected.sum(-1, keepdim=True) if normalize else expected)
    foreign = select(scores_TE, 3, own.experts_TK.flip(0), normalize=normalize)
    live = scores_TE.gather(1, own.experts_TK.flip(0))
    torch.testing.assert_close(foreign.gates_TK, live / live.sum(-1, keepdim=True) if normalize else live)


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


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values)


def test_the_filter_replaces_what_is_not_plausible_in_place_and_in_order() -> None:
    scores_TE = rows([0.40, 0.30, 0.15, 0.10, 0.05]).expand(6, 5)
    replayed_TK = torch.tensor([[4, 1, 0], [3, 2, 4], [0, 0, 1], [2, 1, 0], [-1, -1, -1], [3, 0, 1]])
    choice = select(scores_TE, 3, replayed_TK, ratio=0.6)  # plausible: 0.24, 0.18 and 0.09, place by place
    assert choice.experts_TK.tolist() == [[2, 1, 0], [0, 1, 2], [0, 2, 1], [2, 1, 0], [0, 1, 2], [3, 0, 1]]
    assert choice.replaced_T.tolist() == [True, True, True, False, False, False]
    assert choice.differs_T.tolist() == [True, True, True, False, False, True]
    torch.testing.assert_close(choice.gates_TK[0], torch.tensor([0.15, 0.30, 0.40]) / 0.85)


def test_a_row_without_the_dominant_expert_is_not_plausible() -> None:
    """Each of its experts is as good as the weakest own one, but the token's output would be another."""
    choice = select(rows([0.90, 0.04, 0.035, 0.025]), 2, torch.tensor([[1, 2]]), ratio=0.8)
    assert choice.experts_TK.tolist() == [[0, 2]] and choice.replaced_T.tolist() == [True]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Scores, replayed rows (some unknown, some with an expert twice), k, and a bias (DeepSeek-V3) or none."""
    experts, tokens = draw(st.integers(4, 12)) * 2, draw(st.integers(1, 8))
    k = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    logits_TE = torch.randn(tokens, experts, generator=generator) * draw(st.sampled_from([0.0, 0.3, 3.0]))
    replayed_TK = torch.randint(0, experts, (tokens, k), generator=generator)
    replayed_TK[torch.rand(tokens, generator=generator) < 0.2] = -1
    if draw(st.booleans()):
        return logits_TE.softmax(-1), replayed_TK, k, None
    return logits_TE.sigmoid(), replayed_TK, k, torch.randn(experts, generator=generator)


def chosen(scores_TE: Tensor, replayed_TK: Tensor | None, k: int, bias_E: Tensor | None, ratio: float) -> Selection:
    ranks = None
    if bias_E is not None:
        ranks = grouped_ranks(scores_TE, bias_E, Grouping(groups=2, kept=1, scale=1.0), ratio)
    return select(scores_TE, k, replayed_TK, ratio, ranks=ranks)


@given(routings(), st.floats(0.01, 1.0))
def test_what_the_filter_keeps_and_replaces(routing: tuple[Tensor, Tensor, int, Tensor | None], ratio: float) -> None:
    scores_TE, replayed_TK, k, bias_E = routing
    own, strict, filtered, full = (
        chosen(scores_TE, recorded, k, bias_E, r)
        for recorded, r in ((None, 0.0), (replayed_TK, 0.0), (replayed_TK, ratio), (replayed_TK, 1.0))
    )
    known_T = replayed_TK[:, 0] >= 0
    assert torch.equal(strict.experts_TK[known_T], replayed_TK[known_T]) and not strict.replaced_T.any()
    for choice in (strict, filtered, full):
        assert torch.equal(choice.experts_TK[~known_T], own.experts_TK[~known_T])
        assert not (choice.replaced_T | choice.differs_T)[~known_T].any()
    kept_TK = filtered.experts_TK == replayed_TK
    assert torch.equal(filtered.replaced_T, ~kept_TK.all(-1) & known_T)
    for before, after, best in zip(replayed_TK.tolist(), filtered.experts_TK.tolist(), own.experts_TK.tolist()):
        assert len(set(after)) == k
        fresh = [new for old, new in zip(before, after, strict=True) if old != new]
        if before[0] >= 0:  # the best of the router's own that were free, best first
            assert fresh == [expert for expert in best if expert not in set(after) - set(fresh)][: len(fresh)]
    ranks_TE = scores_TE if bias_E is None else scores_TE + bias_E
    same = [ranks_TE.gather(1, choice.experts_TK).sort(-1).values for choice in (own, full)]
    torch.testing.assert_close(same[0], same[1])  # the same sets, but for ties
    looser = chosen(scores_TE, replayed_TK, k, bias_E, ratio / 2)
    assert not (looser.replaced_T & ~filtered.replaced_T).any()


@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_a_bias_that_all_experts_share_changes_nothing(shift: float) -> None:
    scores_TE = rows([0.9, 0.8, 0.7, 0.6, 0.3, 0.2])
    bias_E = torch.tensor([0.0, 0.05, 0.0, 0.05, 0.0, 0.0]) + shift
    for replayed, expected in (([0, 3], [0, 3]), ([0, 2], [0, 2]), ([0, 5], [0, 1])):
        ranks = grouped_ranks(scores_TE, bias_E, Grouping(groups=1, kept=1, scale=1.0), 0.7)
        choice = select(scores_TE, 2, torch.tensor([replayed]), 0.7, ranks=ranks)
        assert choice.experts_TK.tolist() == [expected], (replayed, shift)


def test_an_expert_of_a_group_that_was_nearly_kept_is_plausible() -> None:
    scores_TE = rows([0.80, 0.70, 0.79, 0.69, 0.1, 0.1])
    grouping = Grouping(groups=3, kept=1, scale=1.0)
    replayed_TK = torch.tensor([[2, 3]])
    for ratio, expected in ((0.8, [2, 3]), (1.0, [0, 1])):
        ranks = grouped_ranks(scores_TE, torch.zeros(6), grouping, ratio)
        assert select(scores_TE, 2, replayed_TK, ratio, ranks=ranks).experts_TK.tolist() == [expected]


def test_RPL_7_gates_and_gradient_come_from_live_scores_of_experts_far_from_the_top(model: Transformer) -> None:
    logits_TE = torch.tensor([[5.0, 4.0, -3.0, -4.0]], requires_grad=True)
    choice = select(logits_TE.softmax(-1), 2, torch.tensor([[3, 2]]))
    choice.gates_TK[0, 0].backward()
    torch.testing.assert_close(choice.gates_TK, torch.softmax(torch.tensor([[-4.0, -3.0]]), -1))
    assert logits_TE.grad[0, 2:].abs().min() > 0.1 and logits_TE.grad[0, :2].abs().max() < 1e-6


def test_the_filter_reports_its_share_of_covered_rows(model: Transformer) -> None:
    own_TLK = run(model).routes_TLK
    assert run(model, own_TLK, replay_ratio=0.9).replaced.item() == 0
    routes_TLK = own_TLK.clone()
    routes_TLK[0] = -1
    routes_TLK[4, 0] = torch.stack([run(model).router_logits[0][4].argsort()[0], own_TLK[4, 0, 0]])
    out = run(model, routes_TLK, replay_ratio=1.0)
    assert out.covered.item() == T * L - L and out.replaced.item() == pytest.approx(1 / (T * L - L))
    assert torch.equal(out.routes_TLK.sort(-1).values, own_TLK.sort(-1).values)  # repaired
