"""Pins rounding: activations hold bf16 values at fixed places, gradients pass straight through, routers, the head and
the softmax stay float32; and the compiled loops say what torch says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.model import checkpoint, kernels
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.moe import MoE
from stretto.model.norm import RMSNorm
from stretto.model.numerics import Level, Numerics, engine_numerics, trainer_numerics
from stretto.model.transformer import Transformer

from .test_routing import LENGTHS, SPEC, T, foreign_routes

torch.set_num_threads(1)
ROUNDING, EXACT = Numerics(rounding=True), Numerics(exact=True)


def run(model: Transformer, routes_TLK: Tensor | None = None, **options):
    ids_T = torch.arange(T) * 7 % SPEC.vocab_size
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    return model(ids_T, positions_T, PackedCausal(LENGTHS), routes_TLK, capture=True, **options)


def is_bf16(x: Tensor) -> bool:
    return torch.equal(x, x.bfloat16().float())


def test_rounding_is_to_nearest_even_and_keeps_what_is_not_finite() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    x = torch.cat([torch.from_numpy(values), torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.4e38])])
    expected = x.bfloat16().float()
    torch.testing.assert_close(kernels.round_(x.clone()), expected, rtol=0, atol=0, equal_nan=True)


def test_activations_are_bf16_values_where_hardware_would_store_them() -> None:
    model = checkpoint.random_init(SPEC, seed=0, numerics=ROUNDING)
    seen: dict[str, bool] = {}

    def watch(name: str):
        return lambda module, inputs, output: seen.update(
            {name: is_bf16(output[0] if type(output) is tuple else output)}
        )

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(watch(name))
    out = run(model)
    routers = {name for name in seen if name.endswith("mlp.gate")}
    assert routers and not any(seen[name] for name in routers)
    assert all(rounded for name, rounded in seen.items() if name not in routers), seen
    assert is_bf16(out.hidden_TD) and not is_bf16(model.logits(out.hidden_TD))


def test_keys_and_values_are_bf16_values() -> None:
    model = checkpoint.random_init(SPEC, seed=0, numerics=ROUNDING)
    attend = PackedCausal(LENGTHS)

    def watching(layer: int, q: Tensor, k: Tensor, v: Tensor, exact: bool = False) -> Tensor:
        assert is_bf16(q) and is_bf16(k) and is_bf16(v)
        return attend(layer, q, k, v, exact)

    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    model(torch.arange(T) % SPEC.vocab_size, positions_T, watching)


@pytest.mark.parametrize("numerics", [ROUNDING, EXACT, Numerics(rounding=True, exact=True)])
def test_results_and_gradients_are_those_of_plain_arithmetic_up_to_rounding(numerics: Numerics) -> None:
    gradients = []
    routes_TLK = foreign_routes()
    for mode in (Numerics(), numerics):
        model = checkpoint.random_init(SPEC, seed=0, numerics=mode)
        out = run(model, routes_TLK)
        logp_N, _ = token_logprobs(model, out.hidden_TD, torch.arange(T) % SPEC.vocab_size)
        logp_N.mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()} | {"logp": logp_N.detach()})
    for name, plain in gradients[0].items():
        distance = (gradients[1][name] - plain).norm() / plain.norm()
        assert distance < (0.15 if numerics.rounding else 1e-4), (name, distance)


def test_swiglu_norm_and_rotation_of_the_loops_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(37, 30, generator=generator) * 10
    joint[0, :4] = torch.tensor([200.0, -200.0, 0.0, 88.0])
    gate, up = joint.chunk(2, dim=1)
    torch.testing.assert_close(kernels.swiglu(joint, False), F.silu(gate) * up, rtol=2e-6, atol=1e-30)
    leaf = joint.clone().requires_grad_()
    (F.silu(leaf[:, :15]) * leaf[:, 15:]).sum().backward()
    torch.testing.assert_close(kernels.swiglu_backward(joint, torch.ones(37, 15)), leaf.grad, rtol=1e-5, atol=1e-6)
    x = torch.randn(9, 3, 10, generator=generator)
    plain, looped = RMSNorm(10, 1e-6), RMSNorm(10, 1e-6, EXACT)
    torch.testing.assert_close(looped(x), plain(x))
    torch.testing.assert_close(kernels.sigmoid(x), x.sigmoid())
    nan = torch.full((1, 4), torch.nan)
    assert kernels.swiglu(nan, True).isnan().all() and kernels.sigmoid(nan).isnan().all()


def test_attention_of_the_loops_is_that_of_torch_and_one_compiled_function_serves_all() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(25, heads, 8, generator=generator) for heads in (4, 2, 2))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    mine = PackedCausal([10, 15])(0, *inputs, exact=True)
    mine.square().sum().backward()
    others = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = PackedCausal([10, 15])(0, *others)
    plain.square().sum().backward()
    torch.testing.assert_close(mine, plain, atol=1e-6, rtol=1e-5)
    for one, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)
    assert len(kernels._attend.signatures) == 1


@pytest.mark.parametrize("numerics", [Numerics(), ROUNDING, EXACT])
@pytest.mark.parametrize("ratio", [0.0, 0.8])
def test_RPL_8_recomputed_activations_use_the_same_experts_and_give_the_same_gradients(
    numerics: Numerics, ratio: float
) -> None:
    model = checkpoint.random_init(SPEC, seed=0, numerics=numerics)
    routes_TLK = foreign_routes()
    routes_TLK[3] = -1
    calls = {True: 0, False: 0}
    for module in model.modules():
        if isinstance(module, MoE):
            module.register_forward_pre_hook(lambda *_: calls.update({recompute: calls[recompute] + 1}))
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        out = run(model, routes_TLK, replay_ratio=ratio, recompute=recompute)
        (out.hidden_TD.square().mean() + sum(logits.square().mean() for logits in out.router_logits)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert calls[True] == 2 * calls[False]
    for name, plain in gradients[0].items():
        assert torch.equal(gradients[1][name], plain), name


def test_levels() -> None:
    assert trainer_numerics(Level.FAST, "bfloat16") == Numerics() == engine_numerics("ordered", "float32")
    assert trainer_numerics("ordered", "bfloat16") == engine_numerics("fast", "bfloat16") == ROUNDING
    assert trainer_numerics("exact", "bfloat16") == Numerics(rounding=True, exact=True)
    with pytest.raises(ValueError, match="engine.dtype"):
        engine_numerics("ordered", "float16")
