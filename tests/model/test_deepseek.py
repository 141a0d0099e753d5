"""Pins the DeepSeek-V3 family: logits and files are those of transformers, replay and its gradients are as for other
networks, and what a config asks for beyond it is named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config

from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.deepseek import Grouping
from stretto.model.moe import MoE
from stretto.model.router import balance_loss, grouped_ranks
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Output, Transformer
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.packing import TreeCausal

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # theirs, without shared experts
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 1}


def fields(seed: int) -> dict[str, Any]:
    """Random small sizes; over the seeds every switch takes both of its values."""
    rng = random.Random(seed)
    groups = rng.choice([1, 2, 4])
    heads = rng.choice([2, 3])
    scaled = seed % 3 == 2
    rope = {"rope_theta": rng.choice([1e4, 5e4])}
    rope |= YARN if scaled else {"rope_type": "default"}
    if scaled and seed % 2:
        rope |= {"mscale": 1.0, "mscale_all_dim": rng.choice([1.0, 0.7])}
    return {
        "vocab_size": rng.randint(50, 130),
        "hidden_size": 8 * rng.randint(3, 8),
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": rng.randint(20, 90),
        "moe_intermediate_size": 4 * rng.randint(2, 10),
        "n_routed_experts": groups * rng.choice([2, 4]) * 2,
        "num_experts_per_tok": rng.randint(1, 3),
        "n_group": groups,
        "topk_group": rng.randint(1, groups),
        "n_shared_experts": seed % 3,
        "first_k_dense_replace": rng.choice([0, 1]),
        "norm_topk_prob": seed % 4 != 3,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "q_lora_rank": rng.choice([8, 20]) if seed % 2 else None,
        "kv_lora_rank": rng.choice([8, 16]),
        "qk_nope_head_dim": rng.choice([8, 12]),
        "qk_rope_head_dim": rng.choice([4, 16]),
        "v_head_dim": rng.choice([6, 16, 40]),
        "rope_interleave": seed % 4 != 1,
        "rope_parameters": rope,
        "attention_bias": seed % 5 == 3,
        "tie_word_embeddings": seed % 5 == 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": rng.choice([1e-6, 1e-4]),
    }


def random_network(seed: int) -> torch.nn.Module:
    """A transformers network with weights, and biases of the choice, large enough that every part matters."""
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(DeepseekV3Config(**fields(seed))).float().eval()
    for name, weight in network.named_parameters():
        weight.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    for name, buffer in network.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(3.0, 0.2)
    return network


def ours(folder: Path, ids_T: Tensor) -> Tensor:
    model = checkpoint.load(folder)
    with torch.no_grad():
        return model.logits(model(ids_T, torch.arange(len(ids_T)), PackedCausal([len(ids_T)])).hidden_TD)


@pytest.mark.parametrize("seed", range(12))
def test_logits_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    theirs = random_network(seed)
    ids_T = torch.randint(theirs.config.vocab_size, (37,), generator=torch.Generator().manual_seed(seed))
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(ids_T[None]).logits[0]
    assert expected.std() > 0.3  # the comparison means something
    torch.testing.assert_close(ours(tmp_path, ids_T), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_files_go_there_and_back_to_the_byte(seed: int, tmp_path: Path) -> None:
    """From shards too. The bias of the choice keeps its float32; all else that we write is bf16."""
    torch.manual_seed(seed)
    theirs = random_network(seed).to(torch.bfloat16)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(len(buffer)) + 10
    theirs.save_pretrained(tmp_path / "theirs")
    model = checkpoint.load(tmp_path / "theirs")
    checkpoint.save(model, tmp_path / "ours")
    checkpoint.save(model, tmp_path / "shards", shard_bytes=20_000)
    source, written = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert source.keys() == written.keys()
    for name, tensor in source.items():
        assert tensor.dtype == written[name].dtype and torch.equal(tensor, written[name]), name
    files = list((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 30_000 for file in files)
    for folder in ("ours", "shards"):
        again, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        named = again.state_dict()
        for name, tensor in checkpoint.named_tensors(checkpoint.load(tmp_path / folder)).items():
            if name in named:  # all but single experts, which are stacked there too
                assert torch.equal(named[name], tensor), name
        ids_T = torch.arange(30) % again.config.vocab_size
        with torch.no_grad():
            expected = again(ids_T[None]).logits[0]
        torch.testing.assert_close(ours(tmp_path / folder, ids_T), expected, atol=1e-4, rtol=1e-4)


def test_kimi_k2_is_the_same_network(tmp_path: Path) -> None:
    random_network(1).save_pretrained(tmp_path)
    ids_T = torch.arange(20)
    before = ours(tmp_path, ids_T)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    assert torch.equal(ours(tmp_path, ids_T), before)
    assert ModelSpec.from_hf(checkpoint.load_spec(tmp_path).to_hf()) == checkpoint.load_spec(tmp_path)


def test_layers_for_multi_token_prediction_are_not_read(tmp_path: Path) -> None:
    random_network(1).save_pretrained(tmp_path)
    before = ours(tmp_path, torch.arange(9))
    extra = {"model.layers.3.eh_proj.weight": torch.ones(4, 4), "model.layers.3.mlp.gate.weight": torch.ones(2)}
    save_file(load_file(tmp_path / "model.safetensors") | extra, tmp_path / "model.safetensors")
    assert torch.equal(ours(tmp_path, torch.arange(9)), before)


SPEC = ModelSpec.from_hf(
    DeepseekV3Config(**fields(1) | {"initializer_range": 0.3, "first_k_dense_replace": 1}).to_dict()
)
T, (L, K), E = 23, SPEC.route_shape, SPEC.experts


@pytest.fixture
def model() -> Transformer:
    model = checkpoint.random_init(SPEC, seed=0)
    for name, tensor in checkpoint.named_tensors(model).items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    return model


def run(model: Transformer, routes_TLK: Tensor | None = None) -> Output:
    ids_T = torch.arange(T) * 7 % SPEC.vocab_size
    positions_T = torch.cat([torch.arange(9), torch.arange(14)])
    return model(ids_T, positions_T, PackedCausal([9, 14]), routes_TLK=routes_TLK, capture=True)


def foreign_routes() -> Tensor:
    """Across groups, which the router itself would never do."""
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T * L)]).view(T, L, K)


def gradients(model: Transformer, routes_TLK: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    run(model, routes_TLK).hidden_TD.square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_replaying_own_routes_is_identical_to_the_bit(model: Transformer) -> None:
    free = run(model)
    replayed = run(model, free.routes_TLK)
    assert torch.equal(replayed.hidden_TD, free.hidden_TD)
    assert replayed.disagreement.item() == 0 and replayed.covered.item() == T * L
    for name, gradient in gradients(model, None).items():
        assert torch.equal(gradient, gradients(model, free.routes_TLK)[name]), name


def test_foreign_routes_are_obeyed_and_unknown_rows_route_freely(model: Transformer) -> None:
    free, routes_TLK = run(model), foreign_routes()
    routes_TLK[6, 0] = -1
    out = run(model, routes_TLK)
    known = routes_TLK >= 0
    assert torch.equal(out.routes_TLK[known], routes_TLK[known])
    assert torch.equal(out.routes_TLK[6, 0], free.routes_TLK[6, 0])
    assert 0 < out.disagreement.item() <= 1 and out.covered.item() == T * L - 1


def test_gates_of_replayed_experts_are_the_live_scores_and_their_gradient_is_plain_autograds(
    model: Transformer,
) -> None:
    """Against the formula of arXiv 2412.19437 (eq. 12-16) written out, on one layer and routes from elsewhere."""
    moe = next(m for m in model.modules() if isinstance(m, MoE))
    x_TD = torch.randn(T, SPEC.hidden_size, generator=torch.Generator().manual_seed(0))
    routes_TK = foreign_routes()[:, 0]
    results = []
    for plain in (False, True):
        moe.zero_grad()
        if plain:
            gates_TK = F.linear(x_TD, moe.gate.weight).sigmoid().gather(1, routes_TK)
            if SPEC.norm_topk_prob:
                gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
            y_TD = moe.shared_experts(x_TD)
            for k in range(K):
                up_T2F = torch.einsum("tfd,td->tf", moe.experts.gate_up_proj[routes_TK[:, k]], x_TD)
                inner, up = up_T2F.chunk(2, dim=-1)
                down = torch.einsum("tdf,tf->td", moe.experts.down_proj[routes_TK[:, k]], F.silu(inner) * up)
                y_TD = y_TD + gates_TK[:, k, None] * SPEC.grouping.scale * down
        else:
            y_TD, _ = moe(x_TD, routes_TK)
        y_TD.sin().sum().backward()
        results.append([y_TD.detach(), *(weight.grad.clone() for weight in moe.parameters())])
    assert moe.gate.weight.grad.abs().max() > 0
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_the_bias_selects_and_never_weighs(model: Transformer) -> None:
    routes_TLK = run(model).routes_TLK
    before = run(model, routes_TLK).hidden_TD
    for name, tensor in checkpoint.named_tensors(model).items():
        if name.endswith("e_score_correction_bias"):
            tensor[0] += 100
    assert torch.equal(run(model, routes_TLK).hidden_TD, before)
    assert (run(model).routes_TLK == 0).any(-1).all()  # expert 0 is chosen everywhere


def test_groups_are_ranked_by_their_two_best_experts() -> None:
    logits_TE = torch.tensor([[3.0, -9.0, -9.0, 2.0, 2.0, -9.0, 1.0, 1.5, 0.0]])
    ranks_TE = grouped_ranks(logits_TE.sigmoid(), torch.zeros(9), Grouping(groups=3, kept=2, scale=1.0)).own_TE
    assert ranks_TE.isfinite().tolist() == [[False] * 3 + [True] * 6]


def test_balance_loss_takes_the_normalised_sigmoids(model: Transformer) -> None:
    out = run(model)
    moe = next(m for m in model.modules() if isinstance(m, MoE))
    logits_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    share = logits_TE.sigmoid() / logits_TE.sigmoid().sum(-1, keepdim=True)
    torch.testing.assert_close(F.logsigmoid(logits_TE).softmax(-1), share)
    loss = balance_loss(out.router_logits, out.routes_TLK, E)
    assert len(out.router_logits) == L and 0.9 < loss.item() < 3
    loss.backward()
    assert moe.gate.weight.grad.abs().max() > 0


def test_shared_prefixes_work_with_values_of_another_width() -> None:
    q, k, v = (torch.randn(6, 2, width, generator=torch.Generator().manual_seed(width)) for width in (12, 12, 5))
    paths = [torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 4, 5])]
    found = TreeCausal(paths, [4, 2])(0, q, k, v)
    for path in paths:
        alone = PackedCausal([4])(0, *(x[path] for x in (q, k, v)))
        torch.testing.assert_close(found[path][2:], alone[2:], atol=1e-5, rtol=1e-5)


def test_training_and_publishing_leave_the_bias_as_it_was(model: Transformer) -> None:
    name = next(n for n in checkpoint.named_tensors(model) if n.endswith("e_score_correction_bias"))
    bias = checkpoint.named_tensors(model)[name].clone()
    assert not torch.equal(bias, bias.bfloat16().float())  # bf16 could not hold it
    optimizer = MasterAdamW(model, (0.9, 0.95), 0.1)
    run(model).hidden_TD.square().mean().backward()
    optimizer.step(1e-2)
    assert torch.equal(checkpoint.named_tensors(model)[name], bias)
    bits = checkpoint.bf16_bits(model)
    assert bits[name].dtype == "float32" and (bits[name] == bias.numpy()).all()
    assert {array.dtype.name for key, array in bits.items() if key != name} <= {"uint16", "float32"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False},
        ),
        ("rope_scaling", {"rope_type": "linear", "factor": 4.0}),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("num_key_value_heads", 1),
        ("head_dim", 128),
        ("n_group", 5),
        ("topk_group", 99),
        ("n_shared_experts", None),
        ("n_shared_experts", -1),
        ("first_k_dense_replace", "3"),
        ("kv_lora_rank", None),
        ("qk_rope_head_dim", 7),
        ("quantization_config", {"quant_method": "fp8"}),
        ("index_topk", 2048),
    ],
)
def test_what_is_not_supported_is_named(field: str, value: Any) -> None:
    config = SPEC.to_hf()
    assert ModelSpec.from_hf(config) == SPEC
    if field == "qk_rope_head_dim":
        config["head_dim"] = value
    with pytest.raises(ValueError, match=field):
        ModelSpec.from_hf(config | {field: value})
