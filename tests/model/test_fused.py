"""Pins `Numerics.fused`: the compiled loops of one thread say what torch says, forward and backward, for any lengths
and widths; and a network that uses them learns what the plain one learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.model import checkpoint, grouped, headnorm, slots
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.moe import Plan
from stretto.model.norm import RMSNorm
from stretto.model.numerics import Numerics
from stretto.model.rotary import rotary_angles, rotate
from stretto.model.router import balance_loss, select
from stretto.model.spec import ModelSpec
from stretto.model.tiles import add_product, multiply

from .test_deepseek import SPEC as DEEPSEEK
from .test_routing import SPEC as MOE

torch.set_num_threads(1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def with_slopes(function, inputs: list[Tensor]) -> list[Tensor]:
    """The result, and the slope of each input against a fixed direction."""
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, drawn(*out.shape, seed=9).detach())]


@given(
    steps=st.integers(1, 40), rows=st.sampled_from([4, 16]), columns=st.sampled_from([16, 48]), seed=st.integers(0, 9)
)
@settings(max_examples=15, deadline=None)
def test_a_product_of_tiles_is_the_product(steps: int, rows: int, columns: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    a, b, c = (draw.standard_normal(shape, np.float32) for shape in ((steps, rows), (steps, columns), (rows, columns)))
    sizes = rows, columns, steps
    found, added = np.empty_like(c), c.copy()
    multiply(found.reshape(-1), 0, columns, a.T.copy().reshape(-1), 0, steps, 1, b.reshape(-1), 0, columns, *sizes)
    np.testing.assert_allclose(found, a.T @ b, atol=1e-4)
    add_product(added.reshape(-1), 0, columns, a.reshape(-1), 0, 1, rows, b.reshape(-1), 0, columns, *sizes)
    np.testing.assert_allclose(added, c + a.T @ b, atol=1e-4)


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    widths=st.sampled_from([(8, 8), (16, 16), (32, 32), (24, 40)]),
)
@settings(max_examples=25, deadline=None)
def test_attention_of_all_sequences_at_once_is_that_of_each(lengths: list[int], heads, widths) -> None:
    (many, few), (wide, value), tokens = heads, widths, sum(lengths)
    inputs = [drawn(tokens, many, wide), drawn(tokens, few, wide, seed=1), drawn(tokens, few, value, seed=2)]

    def textbook(q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths) for x in (q_THd, k_TGd, v_TGe)), strict=True)
        mixed = (
            F.scaled_dot_product_attention(
                q.transpose(0, 1),
                *(x.transpose(0, 1).repeat_interleave(many // few, 0) for x in (k, v)),
                is_causal=True,
            ).transpose(0, 1)
            for q, k, v in parts
        )
        return torch.cat(list(mixed))

    fused = with_slopes(lambda *x: PackedCausal(lengths, fused=True)(0, *x), inputs)
    for one, other in zip(fused, with_slopes(textbook, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_no_token_is_moved_by_a_later_one_or_by_another_sequence() -> None:
    q, k, v = drawn(60, 2, 16), drawn(60, 1, 16, seed=1), drawn(60, 1, 16, seed=2)
    attend = PackedCausal([37, 23], fused=True)
    with torch.no_grad():
        before = attend(0, q, k, v)
        for x in (k, v):
            x[20:37] = 50.0 * x[20:37] + 3.0
        after = attend(0, q, k, v)
    assert torch.equal(before[:20], after[:20]) and torch.equal(before[37:], after[37:])
    assert not torch.allclose(before[20:37], after[20:37])


def test_scores_far_apart_and_far_below_give_finite_weights() -> None:
    q, k, v = 40.0 * drawn(50, 1, 16), 40.0 * drawn(50, 1, 16, seed=1), drawn(50, 1, 16, seed=2)
    with torch.no_grad():
        found = PackedCausal([50], fused=True)(0, q, k, v)
        torch.testing.assert_close(found, PackedCausal([50])(0, q, k, v), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("normalize", [True, False])
def test_choosing_and_weighing_experts_is_the_routers_with_its_slope(normalize: bool) -> None:
    logits = drawn(200, 8)
    with torch.no_grad():
        logits[:50] = logits[:50].round()  # ties
    chosen = select(torch.softmax(logits, -1), 3, normalize=normalize)
    experts_TK, gates_TK = slots.TopGates.apply(logits, 3, normalize)
    assert torch.equal(experts_TK, chosen.experts_TK)
    torch.testing.assert_close(gates_TK, chosen.gates_TK, atol=1e-6, rtol=1e-5)
    slope = drawn(200, 3, seed=3).detach()
    (one,), (other,) = (torch.autograd.grad(gates, logits, slope) for gates in (gates_TK, chosen.gates_TK))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_pairs_are_sorted_stably() -> None:
    experts_TK = torch.randint(5, (300, 2), generator=torch.Generator().manual_seed(0))
    plan = Plan(experts_TK, 7)
    assert torch.equal(plan.order_N, torch.argsort(experts_TK.reshape(-1), stable=True))
    assert torch.equal(plan.order_N[plan.place_N], torch.arange(600))
    assert plan.sizes == torch.bincount(experts_TK.reshape(-1), minlength=7).tolist()


def learnt(spec: ModelSpec, numerics: Numerics) -> list[Tensor]:
    """Loss and gradients of packed sequences, the router's loss included."""
    model = checkpoint.random_init(replace(spec, initializer_range=0.2), 0, numerics=numerics)
    lengths = [30, 1, 45, 17]
    ids_T = torch.arange(sum(lengths)) * 7 % spec.vocab_size
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    out = model(ids_T, positions_T, PackedCausal(lengths, numerics.fused), capture=bool(spec.experts))
    loss = -token_logprobs(model, out.hidden_TD[:-1], ids_T[1:])[0].mean()
    if out.router_logits and out.routes_TLK is not None:
        loss = loss + 0.1 * balance_loss(out.router_logits, out.routes_TLK, spec.experts)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "spec",
    [MOE, replace(MOE, head_dim=32), replace(MOE, experts=0, experts_per_token=0), DEEPSEEK],
    ids=["moe", "wide heads", "dense", "deepseek"],
)
def test_a_fused_network_learns_what_the_plain_one_learns(spec: ModelSpec) -> None:
    plain, fused = learnt(spec, Numerics()), learnt(spec, Numerics(fused=True))
    assert len(plain) == len(fused) > 10
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-3)


def test_the_same_step_gives_the_same_bits_twice() -> None:
    for one, other in zip(learnt(MOE, Numerics(fused=True)), learnt(MOE, Numerics(fused=True)), strict=True):
        assert torch.equal(one, other)


@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    widths=st.sampled_from([(16, 16), (32, 80), (128, 48)]),
)
@settings(max_examples=20, deadline=None)
def test_products_of_experts_and_their_slopes_are_those_of_matrices(sizes: list[int], widths: tuple[int, int]) -> None:
    (width, height), rows = widths, sum(sizes)
    x, weight, dy = drawn(rows, width), drawn(len(sizes), height, width, seed=1), drawn(rows, height, seed=2).detach()
    y = torch.cat([part @ one.t() for part, one in zip(x.split(sizes), weight, strict=True)])
    torch.testing.assert_close(grouped.products(x.detach(), weight.detach(), sizes), y, atol=1e-4, rtol=1e-4)
    wanted = torch.autograd.grad(y, (x, weight), dy)
    for one, other in zip(grouped.slopes(x.detach(), weight.detach(), sizes, dy), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [32, 64])
def test_heads_are_normalised_and_turned_as_in_two_steps(width: int) -> None:
    norm = RMSNorm(width, 1e-6)
    with torch.no_grad():
        norm.weight.copy_(drawn(width, seed=1))
    angles = rotary_angles(torch.arange(40) * 3, width, 1e4, torch.float32)
    inputs = [drawn(40, 3, width), norm.weight]
    two = with_slopes(lambda x, weight: rotate(norm(x), *angles), inputs)
    one = with_slopes(lambda x, weight: headnorm.NormAndTurn.apply(x, weight, 1e-6, *angles), inputs)
    for found, wanted in zip(one, two, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
