"""Pins: a micro-batch cut over two ranks, experts sharded as well, learns what it learns on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stretto.model.checkpoint import random_init
from stretto.model.parallel import shard_experts, sum_gradients
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer
from stretto.support import Support
from stretto.trainer.packing import Astray, MicroBatch, join
from stretto.trainer.samples import Sample
from stretto.trainer.split import part_of
from stretto.trainer.step import Distribution, predict

NUCLEUS = Distribution(0.8, 0.9)


def spec_of_two(spec: ModelSpec) -> ModelSpec:
    """With key/value heads for two ranks."""
    return dataclasses.replace(spec, heads=4, kv_heads=2)


def branches(spec: ModelSpec) -> MicroBatch:
    """Samples with a common prompt, foreign routes, some unknown, drawn from sets that the targets belong to."""
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, spec.vocab_size, 9)
    samples = []
    for number in range(4):
        ids = np.concatenate([prompt, rng.integers(0, spec.vocab_size, 5 + 3 * number)])
        layers, k = spec.route_shape
        routes = rng.random((len(ids), layers, spec.experts)).argsort(-1)[..., :k].astype(np.int32)
        routes[:9] = (prompt[:, None, None] + np.arange(layers)[:, None] + np.arange(k)) % spec.experts
        routes[rng.random(len(ids)) < 0.2] = -1
        routes[:9] = abs(routes[:9])
        predict_N = np.arange(8, len(ids))
        targets_N = rng.integers(0, spec.vocab_size, len(predict_N))
        kept_NV = rng.random((len(predict_N), spec.vocab_size)) < 0.6
        kept_NV[np.arange(len(predict_N)), targets_N] = True
        samples.append(
            Sample(
                rollout=f"r{number}",
                ids_T=ids,
                routes_TLK=routes,
                route_ids_T=ids.copy(),
                support=Support.of(kept_NV),
                predict_N=predict_N,
                targets_N=targets_N,
                behaviour_N=np.full(len(predict_N), -3, np.float32),
                versions_N=np.zeros(len(predict_N), np.int32),
                advantage=float(rng.standard_normal()),
                share=0.01,
            )
        )
    return join(samples)


def loss(model: Transformer, micro: MicroBatch) -> torch.Tensor:
    predicted = predict(model, micro, NUCLEUS)
    return -(predicted.logp_N * micro.advantage_N * micro.share_N).sum()


def on_rank(rank: int, spec: ModelSpec, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = random_init(spec, seed=1)
    shard_experts(model, dist.group.WORLD)
    part = part_of(branches(spec), dist.group.WORLD)
    value = loss(model, part)
    value.backward()
    sum_gradients(model, dist.group.WORLD)
    gradients = {name.replace("experts.local", "experts"): p.grad for name, p in model.named_parameters()}
    torch.save({"loss": value.detach(), "ids": part.ids_T, "gradients": gradients}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_RPL_2_two_ranks_with_sharded_experts_learn_what_one_learns(spec: ModelSpec, tmp_path: Path) -> None:
    spec = spec_of_two(spec)
    alone, micro = random_init(spec, seed=1), branches(spec)
    whole = loss(alone, micro)
    whole.backward()
    mp.spawn(on_rank, (spec, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(torch.cat([rank["ids"] for rank in ranks]), micro.ids_T)
    torch.testing.assert_close(ranks[0]["loss"] + ranks[1]["loss"], whole.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in alone.named_parameters():
        parts = [rank["gradients"][name] for rank in ranks]
        found = torch.cat(parts) if "experts." in name else parts[0]
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_RPL_2_routes_off_by_one_token_do_not_pass_the_split(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro = branches(spec_of_two(spec))
    assert micro.route_ids_T is not None
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(Astray, match="after the sequence split"):
        part_of(dataclasses.replace(micro, route_ids_T=micro.route_ids_T.roll(1)), None)
