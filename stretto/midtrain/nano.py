"""`stretto midtrain nano`: makes the checkpoint that ships with the package, from nothing, on two cores.

A 1.1M-parameter Qwen3-MoE reads the standard library and a demonstrator's transcripts in three phases: *skill* (careful
demonstrations, wrong edits masked), *recovery* (its own wrong edits, put right) and *habits* (a short stretch of hasty
demonstrations, so that RL has something to change).
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from pathlib import Path

import torch

from stretto.harness.chat import Chat
from stretto.midtrain import tokenizer
from stretto.midtrain.demonstrator import transcripts
from stretto.midtrain.loop import Phase, train_phase
from stretto.midtrain.stream import Mixture, Stream, tokenizer_texts
from stretto.model import checkpoint
from stretto.model.spec import ModelSpec

SPEC = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": tokenizer.VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
}

SKILL = Phase(
    "skill",
    Mixture(agent="careful", code=0.05, copying=0.4),
    tokens=12_000_000,
    lr=4e-3,
    stable=0.45,
    copy_until=400_000,
)
RECOVERY = Phase(
    "recovery",
    Mixture(agent="careful", mistakes=0.5, code=0.04),
    tokens=3_000_000,
    lr=2e-3,
    stable=0.3,
)
HABITS = Phase("habits", Mixture(agent="hasty", code=0.03), tokens=450_000, lr=1.5e-3, stable=0.3)


def main(
    out: Path, work: Path, seed: int = 0, phases: tuple[Phase, ...] = (SKILL, RECOVERY, HABITS), threads: int = 1
) -> None:
    """Train and write `out` (a Hugging Face checkpoint). `work` keeps the resume state; running again goes on."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    folder = work / "tokenizer"
    if not (folder / "tokenizer_config.json").is_file():
        print("training the tokenizer", file=sys.stderr)
        _train_tokenizer(folder, seed)
    chat = Chat(folder)
    model = checkpoint.random_init(ModelSpec.from_hf(SPEC), seed)
    for number, phase in enumerate(phases):
        done = work / f"{number}-{phase.name}"
        if done.is_dir():
            model = checkpoint.load(done)
            continue
        stream = Stream(phase.mixture, chat, seed, copy.deepcopy(model) if phase.mixture.mistakes else None)
        train_phase(model, phase, stream, work / f"{phase.name}.pt", work / "log.jsonl")
        checkpoint.save(model, done, tokenizer_from=folder)
    checkpoint.save(model, out, tokenizer_from=folder)
    size = sum(os.path.getsize(path) for path in out.iterdir())
    print(f"wrote {out} ({size / 1e6:.1f} MB)")


def _train_tokenizer(folder: Path, seed: int) -> None:
    """Transcripts need a tokenizer and the tokenizer needs transcripts: one of bytes, without merges, renders them."""
    with tempfile.TemporaryDirectory() as raw:
        tokenizer.train(iter(()), Path(raw))
        chat = Chat(Path(raw))
        texts = (chat.decode(document.ids) for document in transcripts(chat, seed, "careful"))
        tokenizer.train(tokenizer_texts(texts, 6000), folder)
