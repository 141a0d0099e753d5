"""A new version beside the live one: by a whole file or a patch, bf16 or fp8, verified by its root and by a canary."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.engine import canary
from stretto.engine.cache import KVCache
from stretto.engine.contract import WeightsRefused, WrongBase
from stretto.engine.standby import Copy, Standby
from stretto.model import checkpoint, served
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.numerics import PLAIN, Numerics
from stretto.records import Canary, WeightsOrder
from stretto.weights import patchfile
from stretto.weights.patchfile import Change
from stretto.weights.state import bits, fingerprint
from stretto.weights.tensorfile import default_tag, save

from ..model.test_deepseek import SPEC as DEEPSEEK
from .conftest import SPEC

Bits = dict[str, np.ndarray]


def cache() -> KVCache:
    kv_heads, key_dim, value_dim = SPEC.cache_shape
    return KVCache(SPEC.layers, 2, kv_heads, 64, key_dim, value_dim)


def versions(dtype: str, count: int = 4) -> list[Bits]:
    """Published tensors of a network that trains by chance, and of one block that grows over a power of two."""
    model, generator = checkpoint.random_init(SPEC, seed=3), torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator) * parameter.abs()
                parameter.copy_(served.rounded(name, parameter, dtype))
            named = checkpoint.named_tensors(model)
            grown = named["model.layers.0.self_attn.q_proj.weight"]
            grown[0, 0] = grown.abs().max() * 1.5
            grown.copy_(served.rounded("layers.0.self_attn.q_proj.weight", grown, dtype))
        made.append(dict(served.Bits(named, dtype)))
    return made


def tag_of(tensors: Bits) -> dict[str, str]:
    return {name: default_tag(array) for name, array in tensors.items()} | served.tags(tensors)


def whole(path: Path, tensors: Bits) -> WeightsOrder:
    save(path, tensors, tag_of(tensors))
    return WeightsOrder(version=0, fingerprint=fingerprint(tensors), path=str(path))


def patch(path: Path, old: Bits, new: Bits, dense: int = 3) -> WeightsOrder:
    changes = []
    for name in new:
        before, after = bits(old[name]).reshape(-1), bits(new[name]).reshape(-1)
        at = np.flatnonzero(before != after).astype(np.uint32)
        if at.size * dense > after.size:
            changes.append(Change(name, None, after))
        elif at.size:
            changes.append(Change(name, at, after[at]))
    patchfile.save(path, changes, tag_of(new))
    return WeightsOrder(version=1, fingerprint=fingerprint(new), path=str(path), parent=fingerprint(old))


def holds(copy: Copy, tensors: Bits) -> bool:
    return fingerprint(served.Bits(checkpoint.named_tensors(copy.model), copy.dtype)) == fingerprint(tensors)


class Engine:
    """What `Service.update` does, without a thread."""

    def __init__(self, numerics: Numerics = PLAIN) -> None:
        self.room = cache()
        self.live = Copy(checkpoint.empty(SPEC, numerics=numerics), self.room)
        self.standby = Standby(SPEC, numerics, self.room)
        self.serving = ""

    def update(self, order: WeightsOrder) -> float | None:
        apart = self.standby.prepare(order, self.live, self.serving)
        self.live, self.serving = self.standby.exchange(self.live), order.fingerprint
        self.standby.settle(self.live)
        return apart


@pytest.mark.parametrize("dense", [1, 3, 10**9], ids=["positions", "mixed", "whole tensors"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_patches_make_the_published_bits(tmp_path: Path, dtype: str, dense: int) -> None:
    """After a whole file, patches; both copies are the new version when an update is over."""
    made, engine = versions(dtype), Engine()
    engine.update(whole(tmp_path / "0", made[0]))
    assert holds(engine.live, made[0])
    for old, new in itertools.pairwise(made):
        engine.update(patch(tmp_path / "p", old, new, dense))
        assert engine.live is not engine.standby.copy
        assert holds(engine.live, new) and holds(engine.standby.copy, new)
    assert (
        dtype == "bf16"
        or len({made[n]["model.layers.0.self_attn.q_proj.weight_scale_inv"].item() for n in range(4)}) > 1
    )


def test_WGT_4_a_refused_patch_leaves_no_trace(tmp_path: Path) -> None:
    made, engine = versions("bf16"), Engine()
    engine.update(whole(tmp_path / "0", made[0]))
    order = patch(tmp_path / "1", made[0], made[1])
    with pytest.raises(WrongBase, match="starts from"):
        engine.update(patch(tmp_path / "2", made[1], made[2]))
    for damaged in (
        WeightsOrder(version=1, fingerprint="0" * 64, path=order.path, parent=order.parent),
        WeightsOrder(version=1, fingerprint=order.fingerprint, path=str(tmp_path / "nowhere"), parent=order.parent),
    ):
        with pytest.raises(WeightsRefused):
            engine.update(damaged)
        assert holds(engine.live, made[0])
    name, at = "model.norm.weight", np.array([10**6], np.uint32)
    for changes, sentence in (
        ([Change(name, at, np.zeros(1, np.uint16))], "tensor model.norm.weight do not fit"),
        ([Change("nobody", at, np.zeros(1, np.uint16))], "nobody, which this network has not"),
    ):
        patchfile.save(tmp_path / "odd", changes, {name: "BF16", "nobody": "BF16"})
        with pytest.raises(WeightsRefused, match=sentence):
            engine.update(WeightsOrder(version=1, fingerprint="", path=str(tmp_path / "odd"), parent=order.parent))
    engine.update(order)
    assert holds(engine.live, made[1])
    with pytest.raises(WrongBase):  # what was applied once is not applied again
        engine.update(order)


def test_the_exchange_builds_nothing(tmp_path: Path) -> None:
    """Forward passes are those of the start: a pause is two pointers."""
    made, engine = versions("bf16", 3), Engine()
    passes = {id(engine.live.forward), id(engine.standby.copy.forward)}
    engine.update(whole(tmp_path / "0", made[0]))
    engine.update(patch(tmp_path / "1", made[0], made[1]))
    assert {id(engine.live.forward), id(engine.standby.copy.forward)} == passes


IDS = [5, 200, 17, 3, 99, 41, 128, 7, 250, 12, 66, 31]


@torch.no_grad()
def trainers_word(tensors: Mapping[str, Tensor], numerics: Numerics) -> Canary:
    model = checkpoint.empty(SPEC, numerics=numerics)
    checkpoint.load_named(model, tensors)
    hidden_TD = model(torch.tensor(IDS), torch.arange(len(IDS)), PackedCausal([len(IDS)])).hidden_TD
    logprobs_N, _ = token_logprobs(model, hidden_TD[:-1], torch.tensor(IDS[1:]), 1.0)
    return Canary(ids=IDS, logprobs=logprobs_N.tolist())


@pytest.mark.parametrize("numerics", [PLAIN, Numerics(exact=True)], ids=["plain", "exact"])
def test_WGT_2_the_canary_says_whether_the_network_computes_what_the_trainer_does(
    tmp_path: Path, numerics: Numerics, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tensors, other), engine = versions("fp8", 2), Engine(numerics)
    order = whole(tmp_path / "0", tensors)
    word = trainers_word(named(tensors), numerics)
    asked = WeightsOrder(version=0, fingerprint=order.fingerprint, path=order.path, canary=word)
    apart = engine.update(asked)
    assert apart is not None and apart <= canary.tolerance(numerics) / 5
    if numerics.exact:
        assert apart == 0.0

    later = patch(tmp_path / "1", tensors, other)
    wrong = WeightsOrder(
        version=1,
        fingerprint=later.fingerprint,
        path=later.path,
        parent=later.parent,
        canary=trainers_word(named(other), numerics),
    )
    turned = engine.standby.copy.trial(engine.standby._room)
    monkeypatch.setattr(engine.standby.copy, "trial", lambda cache: lambda plan: _halved(turned(plan)))
    with pytest.raises(WeightsRefused, match=r"the canary of version 1 fails: log-probs here are .* nats"):
        engine.update(wrong)
    assert holds(engine.live, tensors)
    monkeypatch.undo()
    assert engine.update(wrong) is not None
    with pytest.raises(WeightsRefused, match="has 12 tokens and 0 log-probs"):
        engine.update(
            WeightsOrder(version=0, fingerprint=order.fingerprint, path=order.path, canary=Canary(ids=IDS, logprobs=[]))
        )


def _halved(passed):
    """A network whose last norm went wrong."""
    return passed._replace(hidden_ND=passed.hidden_ND * 0.5)


def named(tensors: Bits) -> dict[str, Tensor]:
    found = {}
    for name, array in tensors.items():
        if not name.endswith(served.SCALE):
            found[name] = served.values(name, array, tensors.get(name + served.SCALE))
    return found


@pytest.mark.parametrize("spec", [SPEC, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
def test_fp8_values_determine_scales_and_bits(spec) -> None:
    """WGT-8: what the engine holds gives back the published tensors; scales are powers of two and fit."""
    model = checkpoint.random_init(spec, seed=0)
    for name, parameter in model.named_parameters():
        parameter.data = served.rounded(name, parameter.detach(), "fp8")
    published = dict(served.Bits(checkpoint.named_tensors(model), "fp8"))
    assert any(name.endswith(served.SCALE) for name in published)
    again = checkpoint.empty(spec)
    checkpoint.load_named(again, named(published))
    assert fingerprint(served.Bits(checkpoint.named_tensors(again), "fp8")) == fingerprint(published)
    for name, tensor in checkpoint.named_tensors(again).items():
        assert torch.equal(tensor, checkpoint.named_tensors(model)[name])
        if name + served.SCALE in published:
            scale = published[name + served.SCALE]
            assert (np.frexp(scale)[0] == 0.5).all()
