"""`stretto bench midtrain`: what each part measures is the same work, at tiny sizes; what its summary makes of it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from stretto.bench import midtrain, midtrain_corpus, midtrain_picture, midtrain_resume, midtrain_speed
from stretto.bench.midtrain_reward import Budget, agent_loss, least_gain
from stretto.config import ModelConfig
from stretto.harness.chat import Chat
from stretto.midtrain.tokens.shards import Row
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.nats import Nats
from stretto.model.numerics import Numerics
from stretto.model.spec import ModelSpec


def row(*lengths: int) -> Row:
    ids = np.arange(sum(lengths), dtype=np.int64) + 5
    return Row(ids, np.ones(len(ids), bool), list(lengths))


def test_archives_hold_sources_and_a_licence_below_one_folder(tmp_path: Path) -> None:
    midtrain_corpus.pack(tmp_path, 2_000_000)
    packages = list((tmp_path / "packages").glob("*.tar.gz"))
    assert packages and len(list(tmp_path.glob("python-*.tar.gz"))) == 1
    total, named = 0, []
    for file in packages:
        with tarfile.open(file) as archive:
            members = archive.getmembers()
        assert {member.name.split("/")[0] for member in members} == {file.name.removesuffix(".tar.gz")}
        named += [member.name.split("/")[1] for member in members]
        total += sum(member.size for member in members)
    assert "PKG-INFO" in named and any(name.upper().startswith("LICEN") for name in named)
    assert 0 < total <= 2_000_000


def test_corpus_speed_counts_what_was_read(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="the [corpus] extra is not installed")
    found = midtrain_corpus.measure(None, tmp_path, megabytes=1)
    assert 0.4 < found["read_mb"] < 1.2 and 0 < found["kept_mb"] <= found["read_mb"]
    assert found["cpu_s"] * found["mb_per_cpu_s"] == pytest.approx(found["read_mb"], rel=0.02)
    assert list(midtrain_corpus.texts(tmp_path))


def test_both_ways_of_transformers_learn_the_tokens_of_the_packed_rows() -> None:
    rows = [row(3, 5), row(7), row(2, 2, 2)]
    for batches in (midtrain_speed.batches_of_rows(rows), midtrain_speed.batches_of_documents(rows)):
        learnt = sum(int((labels >= 0).sum()) for _, _, labels in batches)
        assert learnt == sum(length - 1 for one in rows for length in one.lengths)
        for ids, positions, labels in batches:
            assert bool((labels[labels >= 0] == ids[labels >= 0]).all()) and not bool(
                ((positions == 0) & (labels >= 0)).any()
            )


def test_a_step_of_transformers_has_our_loss() -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
    wide = ModelSpec(
        model_type="qwen3_moe",
        intermediate_size=64,
        experts=4,
        experts_per_token=2,
        expert_size=16,
        tie_embeddings=True,
        **sizes,
    )
    found = midtrain_speed.measure(rounds=1, rows=1, wide=wide)
    assert found["nano"]["ratio"] > 0 and found["wide"]["share"] > 0 and found["nano"]["loss"] > 0


def test_flops_are_those_of_the_active_weights_and_of_what_attention_may_see() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4}
    spec = ModelSpec(model_type="qwen3", intermediate_size=16, tie_embeddings=True, **sizes)
    weights = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16 + 50 * 8
    assert midtrain_speed.step_flops(spec, [row(3, 2)]) == 6 * weights * 5 + 12 * (6 + 3) * 8


def test_the_fused_loss_and_norms_have_the_gradients_of_torch() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(21, 8, requires_grad=True)
    targets = torch.randint(0, 21, (9,))
    ours, theirs = Nats.apply(hidden, weight, targets), F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    assert torch.allclose(ours, theirs, rtol=1e-6)
    pairs = zip(
        torch.autograd.grad(ours * 2, (hidden, weight)), torch.autograd.grad(theirs * 2, (hidden, weight)), strict=True
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    folder, ids = ModelConfig().folder, torch.arange(40) % 30 + 5
    slopes = []
    for numerics in (Numerics(), Numerics(fused=True)):
        model = checkpoint.load(folder, numerics=numerics)
        out = model(ids, torch.arange(40), PackedCausal([40]))
        out.hidden_TD.square().sum().backward()
        slopes.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for a, b in zip(*slopes, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))


def test_stopping_and_two_ranks_change_nothing(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="the [corpus] extra is not installed")
    found = midtrain_resume.measure(tmp_path, steps=2)
    assert found["bit_equal"] and found["same_documents"], found


def test_the_gain_is_the_least_rise_and_needs_a_falling_loss() -> None:
    three = [Budget(1, 0.3, [0.2, 0.4], [0.1]), Budget(10, 0.2, [0.5], [0.1]), Budget(100, 0.1, [0.6], [0.1])]
    assert least_gain(three[::-1]) == pytest.approx(0.1)
    assert least_gain([*three[:2], Budget(100, 0.25, [0.9], [0.1])]) == float("-inf")


def test_the_loss_of_the_shipped_model_is_that_of_some_documents() -> None:
    folder = ModelConfig().folder
    loss = agent_loss(checkpoint.load(folder), Chat(folder), documents=4, batch=2)
    assert 0 < loss < 3


def test_summary_picture_and_refusals(tmp_path: Path) -> None:
    budgets = [{"tokens": t, "loss": 1 / t, "rewards": [t / 100], "reward": t / 100} for t in (10, 20, 40)]
    found = {
        "corpus": {
            "sources": "s",
            "read_mb": 9.0,
            "kept_mb": 4.0,
            "cpu_s": 1.5,
            "mb_per_cpu_s": 6.0,
            "stages_cpu_s": {"read": 1.0},
        },
        "training": {
            "nano": {
                "ratio": 1.4,
                "tokens_per_s": {"ours": 14, "theirs": 10},
                "transformers_way": "documents",
                "packed": {"tokens_per_s": 4, "ratio": 3.5},
            },
            "wide": {"share": 0.6, "peak_gflops": 90.0, "width": 512, "tokens_per_s": 7},
        },
        "speculation": {
            "spec_speedup": 1.3,
            "spec_distribution_p": 0.01,
            "temperature": 1.0,
            "guesses": 6,
            "plain_tokens_per_s": 1.0,
            "sides": {
                "heads": {
                    "tokens_per_s": 1.0,
                    "speedup": 1.4,
                    "whole_turn_speedup": 1.1,
                    "acceptance": 0.5,
                    "tokens_per_pass": 2.0,
                    "same_text": True,
                }
            },
        },
        "resume": {"bit_equal": True, "same_documents": True},
        "reward": {"least_gain": 0.1, "budgets": budgets, "rl_steps": 2, "seeds": 1},
    }
    tree = midtrain.summary(found)
    assert {name: check["ok"] for name, check in tree["checks"].items()} == {
        "corpus_mb_per_s": True,
        "vs_hf_tokens_per_s": False,
        "peak_share": True,
        "resume_equal": True,
        "spec_speedup": True,
        "spec_distribution_p": False,
        "loss_reward_monotone": True,
    }
    paper = io.StringIO()
    midtrain.show(tree, Console(file=paper, width=120))
    assert "packed rows" in paper.getvalue() and "3.50" in paper.getvalue()
    assert "vs_hf_tokens_per_s     at least 1.5: 1.4, DOES NOT HOLD" in paper.getvalue()
    drawn = midtrain_picture.picture(found["reward"])
    assert drawn.startswith("<svg") and drawn.count("<circle") == 6 and "40k" not in drawn and "0.04k tokens" in drawn
    with pytest.raises(ValueError, match="there is no such folder"):
        midtrain.midtrain(None, Console(file=paper), sources=tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no archive"):
        midtrain_corpus.measure(tmp_path, tmp_path)
