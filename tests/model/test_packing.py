"""Pins: a sequence gives the same hidden states, log-probs and gradients alone, in any pack, and in any order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer

torch.set_num_threads(1)
SPEC = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=90,
    hidden_size=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    experts=8,
    experts_per_token=2,
    expert_size=16,
    norm_topk_prob=True,
    tie_embeddings=True,
    initializer_range=0.2,
)
LENGTHS = [1, 33, 7, 80, 33, 2]


@pytest.fixture
def model() -> Transformer:
    return checkpoint.random_init(SPEC, seed=0)


@pytest.fixture
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(90, (length,), generator=generator) for length in LENGTHS]


def hidden(model: Transformer, sequences: list[Tensor]) -> list[Tensor]:
    lengths = [len(ids_T) for ids_T in sequences]
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    return list(model(torch.cat(sequences), positions_T, PackedCausal(lengths)).hidden_TD.split(lengths))


def test_ENG_8_alone_and_packed_agree_in_any_order(model: Transformer, sequences: list[Tensor]) -> None:
    with torch.no_grad():
        packed = hidden(model, sequences)
        reverse = hidden(model, sequences[::-1])[::-1]
        for ids_T, one, two in zip(sequences, packed, reverse, strict=True):
            (alone,) = hidden(model, [ids_T])
            torch.testing.assert_close(one, alone, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(two, alone, atol=1e-5, rtol=1e-5)


def test_a_token_sees_neither_the_future_nor_its_neighbours(model: Transformer, sequences: list[Tensor]) -> None:
    with torch.no_grad():
        before = hidden(model, sequences)
        changed = [ids_T.clone() for ids_T in sequences]
        changed[3][40:] = 5
        after = hidden(model, changed)
    for index, (one, two) in enumerate(zip(before, after, strict=True)):
        if index == 3:
            torch.testing.assert_close(one[:40], two[:40], atol=1e-5, rtol=1e-5)
            assert (one[40:] - two[40:]).abs().max() > 0.1
        else:
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_gradients_add_up_over_micro_batches(model: Transformer, sequences: list[Tensor]) -> None:
    def gradient(packs: list[list[Tensor]]) -> list[Tensor]:
        model.zero_grad()
        for pack in packs:
            for ids_T, hidden_TD in zip(pack, hidden(model, pack), strict=True):
                if len(ids_T) > 1:
                    (-token_logprobs(model, hidden_TD[:-1], ids_T[1:])[0].sum() / 100).backward(retain_graph=True)
        return [weight.grad.clone() for weight in model.parameters()]

    one = gradient([sequences])
    for split in ([[ids_T] for ids_T in sequences], [sequences[:2], sequences[2:]]):
        for together, apart in zip(one, gradient(split), strict=True):
            torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-4)


def test_attention_is_the_textbook_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    out = PackedCausal([5, 7])(0, q, k, v)
    same = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) / 8**0.5
    weights = F.softmax(scores.masked_fill(~same, -torch.inf), dim=-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, dim=1))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(
        *(torch.autograd.grad(y.cos().sum(), (q, k, v), retain_graph=True) for y in (out, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_lengths_must_cover_the_tokens(model: Transformer) -> None:
    with pytest.raises(ValueError, match="lengths sum to 5 tokens, but 6 were given"):
        model(torch.zeros(6, dtype=torch.int64), torch.arange(6), PackedCausal([2, 3]))
    with pytest.raises(ValueError, match="positive"):
        PackedCausal([3, 0])
