"""Pins: the engine's own forward pass gives what the network's definition gives, however a pass is made up; experts and
gates are those of `router.select` to the bit; weights loaded in place are the ones that count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stretto.engine import compiled
from stretto.engine.cache import KVCache
from stretto.engine.forward import Defined, Stepped, _each, forward_of, logits
from stretto.engine.layers import join
from stretto.engine.narrow import Narrow
from stretto.engine.products import products
from stretto.engine.scheduler import Chunk, Plan
from stretto.model import checkpoint
from stretto.model.numerics import Numerics
from stretto.model.router import select
from stretto.model.spec import ModelSpec

from ..model.test_deepseek import SPEC as DEEPSEEK
from .conftest import SPEC

LLAMA = replace(SPEC, model_type="llama", experts=0, experts_per_token=0, expert_size=0, dense_layers=())
WIDE = replace(SPEC, heads=2, head_dim=32, experts_per_token=3, norm_topk_prob=False, dense_layers=(2,))
FAMILIES = {"qwen3_moe": SPEC, "wide": WIDE, "llama": LLAMA, "biased": replace(LLAMA, attention_bias=True)}
TOKENS = 320


def plan(decoding: list[tuple[int, int]], chunks: list[tuple[int, int, int]], spec: ModelSpec) -> Plan:
    """`decoding` are (slot, position), `chunks` (slot, position, rows). The last row of each is sampled from, the last
    of all twice, as for twins."""
    slots, positions = [slot for slot, _ in decoding], [position for _, position in decoding]
    sampled, cut = list(range(len(decoding))), []
    for slot, position, rows in chunks:
        cut.append(Chunk(slot, len(slots), len(slots) + rows, position))
        slots += [slot] * rows
        positions += range(position, position + rows)
        sampled.append(len(slots) - 1)
    sampled.append(len(slots) - 1)
    rng = np.random.default_rng(len(slots))
    slots_T, positions_T, sampled_N = (np.array(x, np.int64) for x in (slots, positions, sampled))
    return Plan(
        copies=[],
        slots_T=slots_T,
        positions_T=positions_T,
        ids_T=rng.integers(0, spec.vocab_size, len(slots)),
        decoding=len(decoding),
        chunks=cut,
        sampled_N=sampled_N,
        samplers_N=slots_T[sampled_N],
        next_N=positions_T[sampled_N] + 1,
        twins=[],
        serial=0,
    )


def cache(spec: ModelSpec) -> KVCache:
    kv_heads, key_width, value_width = spec.cache_shape
    return KVCache(spec.layers, 6, kv_heads, TOKENS, key_width, value_width)


def network(spec: ModelSpec, seed: int = 1):
    model = checkpoint.random_init(spec, seed).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            parameter.normal_(1.0, 0.3)  # not the ones and zeros that would hide a mistake
    return model


@torch.inference_mode()
def agree(model, stepped: Stepped, defined: Defined) -> None:
    passes = [
        plan([], [(0, 0, 40), (1, 0, 300), (2, 0, 1)], model.spec),
        plan([(0, 40), (2, 1)], [(3, 0, 17)], model.spec),
        plan([(3, 17), (0, 41), (2, 2)], [(1, 300, 15), (4, 0, 9)], model.spec),
        plan([(1, 315), (3, 18)], [], model.spec),
    ]
    for one in passes:
        wanted, found = defined(one), stepped(one)
        torch.testing.assert_close(found.hidden_ND, wanted.hidden_ND, atol=2e-5, rtol=0)
        if wanted.routes_TLK is None:
            assert found.routes_TLK is None
        else:
            assert (found.routes_TLK == wanted.routes_TLK).mean() > 0.99  # two experts may be as good up to rounding


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_give_what_the_definition_gives(family: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = network(FAMILIES[family])
        stepped = forward_of(model, cache(model.spec))
        assert isinstance(stepped, Stepped)
        agree(model, stepped, Defined(model, cache(model.spec)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("spec", "numerics"),
    [(DEEPSEEK, Numerics()), (SPEC, Numerics(exact=True)), (SPEC, Numerics(rounding=True))],
    ids=["latent attention", "exact", "rounding"],
)
def test_other_networks_and_numerics_run_the_definition(spec: ModelSpec, numerics: Numerics) -> None:
    model = checkpoint.random_init(spec, 1, numerics=numerics).requires_grad_(False)
    assert isinstance(forward_of(model, cache(spec)), Defined)


@pytest.mark.parametrize("family", ["qwen3_moe", "biased"])
def test_weights_loaded_in_place_are_used(family: str) -> None:
    model, other = network(FAMILIES[family], 1), network(FAMILIES[family], 2)
    stepped = Stepped(model, cache(model.spec))
    join(model)  # once more changes nothing
    checkpoint.load_named(model, checkpoint.named_tensors(other))
    stepped.refresh()
    agree(model, stepped, Defined(other, cache(other.spec)))


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_and_gates_are_those_of_select_to_the_bit(normalize: bool) -> None:
    logits_TE = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    logits_TE[::3] = logits_TE[::3].round()  # ties
    scores_TE = torch.softmax(logits_TE, dim=-1)
    wanted = select(scores_TE, 3, normalize=normalize)
    routes_TLK, gates_TK = np.full((500, 2, 3), -1, np.int32), np.empty((500, 3), np.float32)
    compiled.choose(scores_TE.numpy(), normalize, 1, routes_TLK, gates_TK)
    assert (routes_TLK[:, 1] == wanted.experts_TK.numpy()).all() and (routes_TLK[:, 0] == -1).all()
    assert (gates_TK == wanted.gates_TK.numpy()).all()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_logits_are_those_of_the_network(rows: int) -> None:
    model, hidden_ND = network(SPEC), torch.randn(rows, SPEC.hidden_size)
    torch.testing.assert_close(logits(model, hidden_ND), model.logits(hidden_ND), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sizes", [[5, 0, 1, 4], [0, 0, 9, 3]])
def test_products_are_those_of_torch_and_of_narrow_weights_to_the_bit(sizes: list[int]) -> None:
    x, weights = torch.randn(sum(sizes), 48), torch.randn(4, 32, 48).bfloat16().float()
    wanted, found = torch.empty(sum(sizes), 32), torch.empty(sum(sizes), 32)
    _each(x, [weight.t() for weight in weights], wanted, sizes)
    flat = (t.numpy().reshape(-1) for t in (x, weights, found))
    x_flat, weights_flat, out_flat = flat
    products(x_flat, 48, weights_flat, 32, np.array(sizes), out_flat)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    narrow = Narrow(weights)
    assert narrow.bits.dtype == np.uint16
    again = np.empty_like(out_flat)
    products(x_flat, 48, narrow.bits, 32, np.array(sizes), again)
    assert again.tobytes() == out_flat.tobytes()


def test_a_weight_of_more_than_bf16_stays_as_it_is_and_a_refresh_sees_what_was_loaded() -> None:
    weight = torch.randn(16, 16).bfloat16().float()
    narrow = Narrow(weight)
    weight[3, 5] = 1 / 3
    narrow.refresh()
    assert narrow.bits.dtype == np.float32 and narrow.bits[3 * 16 + 5] == np.float32(1 / 3)
    weight[3, 5] = -2.5
    narrow.refresh()
    assert narrow.bits.dtype == np.uint16
    assert ((narrow.bits.astype(np.uint32) << 16).view(np.float32) == weight.numpy().reshape(-1)).all()


def test_nan_stays_visible_and_with_its_row() -> None:
    model = network(SPEC)
    stepped = Stepped(model, cache(SPEC))
    one = plan([(0, 0), (1, 0)], [], SPEC)
    one.ids_T[:] = 3, 4
    model.embed_tokens.weight[4] = torch.nan
    with torch.inference_mode():
        hidden_ND = stepped(one).hidden_ND
    assert hidden_ND[0].isfinite().all() and hidden_ND[1].isnan().all()
