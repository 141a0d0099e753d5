"""Whether a mid-training run that stops and goes on is the run that did not stop, also on another number of ranks.

    2N steps on one rank ───────────────────▶ weights A
    N steps ─┬─ N more on one rank ─────────▶ weights B      B = A, to the bit (exact numerics)
             └─ N more on two ranks (gloo) ─▶ the steps of A: as many tokens, as many learnt, the loss to 1e-4

A tiny network with random weights on the standard library's first modules.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from stretto.config import validated
from stretto.midtrain.corpus.build import build
from stretto.midtrain.corpus.plan import Plan
from stretto.midtrain.run import METRICS, midtrain
from stretto.midtrain.stream import library_files

STEPS = 6
"""N."""
CLOSE = 1e-4
"""Sums over ranks are made in another order."""
SECONDS = 300.0
SPEC = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
ROW, ROWS, FILES = 128, 4, 12
LR = 1e-3


def measure(place: Path, steps: int = STEPS) -> dict[str, Any]:
    """Three runs in the folder `place`. Raises RuntimeError when two ranks did not come to an end."""
    _prepare(place)
    whole = midtrain(_recipe(place, "whole", steps))
    parts = _recipe(place, "parts", steps)
    midtrain(parts, stop_after=steps)
    pair = _recipe(place, "pair", steps)
    shutil.copytree(place / "parts", place / "pair")
    midtrain(parts)
    _on_two_ranks(pair)
    told = {name: _steps(place / name) for name in ("whole", "parts", "pair")}
    hashes = {name: _hash(place / name / "final") for name in told}
    read = {name: [(line["seen"], line["learnt"]) for line in lines] for name, lines in told.items()}
    losses = [[line["loss"] for line in told[name][steps:]] for name in ("whole", "pair")]
    apart = max((abs(a - b) for a, b in zip(*losses, strict=False)), default=float("inf"))
    return {
        "steps": [steps, steps],
        "weights": hashes,
        "bit_equal": hashes["whole"] == hashes["parts"] and whole.is_dir(),
        "same_documents": read["whole"] == read["parts"] == read["pair"] and apart < CLOSE,
        "two_ranks_loss_apart": round(apart, 8),
    }


def _prepare(place: Path) -> None:
    texts = [(path.name, path.read_text(encoding="utf-8", errors="ignore")[:4000]) for path in library_files()[:FILES]]
    lines = [
        json.dumps({"text": text, "lang": "python", "repo": f"part-{number // 3}", "path": name})
        for number, (name, text) in enumerate(texts)
    ]
    (place / "library.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tree = {"corpus": {"secrets": False}, "source": [{"path": "library.jsonl", "licence": "PSF-2.0"}]}
    build(validated(Plan, tree), place, place / "corpus", workers=1)
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text(json.dumps(SPEC))


def _recipe(place: Path, out: str, steps: int) -> Path:
    """Of a run of 2 x `steps`: rows are filled best-fit, so that a step may read a little less than it could."""
    path = place / f"{out}.toml"
    tokens = 2 * steps * ROW * ROWS - ROW * ROWS // 2
    path.write_text(
        f'[midtrain]\nmodel = "model"\ncorpus = ["corpus"]\nout = "{out}"\nrow = {ROW}\nbatch_rows = {ROWS}\n'
        f'micro_rows = 2\nnumerics = "exact"\n[[phase]]\nname = "bulk"\ntokens = {tokens}\nlr = {LR}\n'
    )
    return path


def _on_two_ranks(recipe: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    code = (
        "import sys; from pathlib import Path; from stretto.midtrain.run import midtrain; midtrain(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [*words, sys.executable, "-c", code, str(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"mid-training on two ranks ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")


def _steps(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [line for line in lines if line["kind"] == "midtrain"]


def _hash(folder: Path) -> str:
    """Of all tensors, as they lie in the file."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
