"""A folder with a corpus, a held-out corpus and a network's config.json, for tests of whole runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

from stretto.config import validated
from stretto.midtrain.corpus import build, plan

SPEC = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}


def python(seed: int) -> str:
    rng = random.Random(seed)
    lines = [f"def f{rng.randrange(10**6)}(a, b):\n    return a {rng.choice('+-*')} b * {rng.randrange(99)}\n"]
    return "\n".join(lines * 1 + [f"x{rng.randrange(10**6)} = {rng.randrange(10**6)}" for _ in range(20)])


def furnished(folder: Path) -> Path:
    """The folder, with `corpus-rows`, `corpus-rest` and `model` in it."""
    for name, numbers in (("rows", range(40)), ("rest", range(40, 44))):
        lines = [
            json.dumps({"text": python(n), "lang": "python", "repo": f"r{n // 4}", "path": f"{n}.py"}) for n in numbers
        ]
        talk = [{"role": "user", "content": f"hello {numbers[0]} " * 8}, {"role": "assistant", "content": "yes"}]
        lines += [json.dumps({"messages": talk})] if name == "rows" else []
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        tree = {"corpus": {"secrets": False}, "source": [{"path": f"{name}.jsonl", "licence": "MIT"}]}
        build.build(validated(plan.Plan, tree), folder, folder / f"corpus-{name}", workers=1)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SPEC))
    return folder
