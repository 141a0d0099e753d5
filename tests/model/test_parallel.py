"""Splitting tokens, heads and experts over ranks changes nothing but the order of some sums (RPL-2)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.parallel import RowsMixedUp, SplitHeads, shard_experts, spans, sum_gradients
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer

LENGTHS = [7, 19, 3, 12]
SPEC = ModelSpec.from_hf(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, positions, and routes the router would not have chosen, with some rows unknown."""
    random = torch.Generator().manual_seed(5)
    tokens = sum(LENGTHS)
    ids_T = torch.randint(SPEC.vocab_size, (tokens,), generator=random)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    layers, per_token = SPEC.route_shape
    routes_TLK = torch.rand(tokens, layers, SPEC.experts, generator=random).argsort(-1)[..., :per_token]
    routes_TLK[torch.rand(tokens, layers, generator=random) < 0.2] = -1
    return ids_T, positions_T, routes_TLK


def _loss(model: Transformer, rows: slice, attend: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the log-probs of the next ids of these rows, and the experts they used."""
    ids_T, positions_T, routes_TLK = _inputs()
    output = model(ids_T[rows], positions_T[rows], attend, routes_TLK=routes_TLK[rows], capture=True)
    logp_N, entropy_N = token_logprobs(model, output.hidden_TD, ids_T.roll(-1)[rows])
    return (logp_N + 0.1 * entropy_N).sum(), output.routes_TLK


def _on_rank(rank: int, ranks: int, folder: str, numerics: Numerics) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    model = checkpoint.random_init(SPEC, seed=3, numerics=numerics)
    shard_experts(model, group)
    parts = spans(sum(LENGTHS), ranks)
    attend = SplitHeads(PackedCausal(LENGTHS), [part.stop - part.start for part in parts], group)
    loss, routes_TLK = _loss(model, parts[rank], attend)
    loss.backward()
    sum_gradients(model, group)
    gradients = {name.replace("experts.local", "experts"): p.grad for name, p in model.named_parameters()}
    torch.save({"loss": loss.detach(), "routes": routes_TLK, "gradients": gradients}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("numerics", [PLAIN, Numerics(rounding=True)], ids=["float32", "rounded"])
def test_RPL_2_a_micro_batch_on_two_ranks_equals_the_same_on_one(tmp_path: Path, numerics: Numerics) -> None:
    alone = checkpoint.random_init(SPEC, seed=3, numerics=numerics)
    loss, routes_TLK = _loss(alone, slice(None), PackedCausal(LENGTHS))
    loss.backward()
    mp.spawn(_on_rank, (2, str(tmp_path), numerics), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]

    torch.testing.assert_close(ranks[0]["loss"] + ranks[1]["loss"], loss.detach(), rtol=1e-5, atol=1e-4)
    assert torch.equal(torch.cat([rank["routes"] for rank in ranks]), routes_TLK)
    for name, parameter in alone.named_parameters():
        parts = [rank["gradients"][name] for rank in ranks]
        found = torch.cat(parts) if "experts." in name else parts[0]
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-4, msg=name)
        if "experts." not in name:
            assert torch.equal(parts[0], parts[1]), name


def test_rows_that_come_home_to_another_place_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = checkpoint.random_init(SPEC, seed=3)
        shard_experts(model, dist.group.WORLD)
        exchange, calls = dist.all_to_all_single, itertools.count()

        def shifted(out: torch.Tensor, x_N: torch.Tensor, *sizes: list[int], group: dist.ProcessGroup) -> None:
            exchange(out, x_N, *sizes, group=group)
            if len(sizes) and x_N.dtype == torch.int64 and next(calls) == 2:  # the rows on their way home
                out.copy_(out.roll(1))

        monkeypatch.setattr(dist, "all_to_all_single", shifted)
        with pytest.raises(RowsMixedUp, match="rank 0"), torch.no_grad():
            _loss(model, slice(None), PackedCausal(LENGTHS))
    finally:
        dist.destroy_process_group()


def test_parts_are_contiguous_and_cover_everything() -> None:
    for tokens in range(1, 40):
        for ranks in range(1, 6):
            parts = spans(tokens, ranks)
            assert [i for part in parts for i in range(part.start, part.stop)] == list(range(tokens))
            assert max(p.stop - p.start for p in parts) - min(p.stop - p.start for p in parts) <= 1


def test_heads_and_experts_that_do_not_divide_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    with pytest.raises(ValueError, match="8 experts can't be split over 3 ranks"):
        shard_experts(checkpoint.random_init(SPEC, seed=3), None)
    attend = SplitHeads(PackedCausal([6]), [2, 2, 2], None)
    with pytest.raises(ValueError, match="4 attention heads can't be split over 3 ranks"):
        attend(0, torch.zeros(2, 4, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))
