"""Two versions of a model's weights, one optimizer step apart: real gradients, AdamW on float32 masters, bf16 served.

    checkpoint (bf16) ──▶ masters, each anywhere in its bf16 cell ──4 steps──▶ old ──1 step──▶ new

Loaded masters would all sit in the middle of their cell, where after many steps hardly any does, so each is first put
somewhere in it at random. Gradients are those of policy gradient: log-probabilities of sequences, weighted with
advantages of both signs. All learning rates share them, taken along the path of the middle one: over a few steps they
differ by less than the noise of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.weights.codec_report import inside_cell

STEPS = 5
SEQUENCES = 4
TOKENS = 32
BETAS = (0.9, 0.95)

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pair:
    """Tensors by name, bf16 as uint16 if made here, and where they come from."""

    name: str
    old: Weights
    new: Weights


def real_steps(folder: Path, name: str, learning_rates: Sequence[float], seed: int = 0) -> list[Pair]:
    """A pair for each learning rate. Memory: about six times the model in float32."""
    model = checkpoint.load(folder)
    named = dict(model.named_parameters())
    rng = np.random.default_rng(seed)
    start = {key: inside_cell(value, rng) for key, value in _served(named).items()}
    masters = {lr: {key: torch.from_numpy(value.copy()) for key, value in start.items()} for lr in learning_rates}
    middle = masters[sorted(learning_rates)[len(learning_rates) // 2]]
    first = {key: torch.zeros_like(value) for key, value in named.items()}
    second = {key: torch.zeros_like(value) for key, value in named.items()}
    ids = _text(folder, STEPS * SEQUENCES * TOKENS)
    old: dict[float, Weights] = {}
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for key, tensor in named.items():
                tensor.copy_(middle[key])
        batch = ids[(step - 1) * SEQUENCES * TOKENS : step * SEQUENCES * TOKENS]
        gradients = _gradients(model, named, batch)
        if step == STEPS:
            old = {lr: _served(tensors) for lr, tensors in masters.items()}
        for key, gradient in gradients.items():
            update = _adam(first[key], second[key], gradient, step)
            for lr, tensors in masters.items():
                tensors[key].sub_(update, alpha=lr)
    return [Pair(f"{name} {lr:g}", old[lr], _served(masters[lr])) for lr in learning_rates]


def _gradients(model: torch.nn.Module, named: Mapping[str, Tensor], ids_T: Tensor) -> dict[str, Tensor]:
    lengths = [TOKENS] * SEQUENCES
    positions_T = torch.arange(TOKENS).repeat(SEQUENCES)
    model.zero_grad()
    out = model(ids_T, positions_T, PackedCausal(lengths))
    logp_TV = torch.log_softmax(model.logits(out.hidden_TD).float(), -1)  # type: ignore[operator]
    logp_ST = logp_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]
    logp_ST = torch.cat((logp_ST, logp_ST.new_zeros(1))).view(SEQUENCES, TOKENS)[:, :-1]
    advantage_S = torch.tensor([1.0, -1.0, 0.5, -0.5])
    (-(advantage_S[:, None] * logp_ST).mean()).backward()
    return {key: tensor.grad for key, tensor in named.items() if tensor.grad is not None}


def _adam(first: Tensor, second: Tensor, gradient: Tensor, step: int) -> Tensor:
    """The update for a learning rate of one."""
    first.lerp_(gradient, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    root = (second / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
    return (first / (1 - BETAS[0] ** step)).div_(root)


def _served(masters: Mapping[str, Tensor]) -> Weights:
    return {
        key: value.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for key, value in masters.items()
    }


def _text(folder: Path, count: int) -> Tensor:
    """Token ids of our own source, as much as needed."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    package = Path(checkpoint.__file__).parent.parent
    ids: list[int] = []
    for file in sorted(package.rglob("*.py")):
        ids += tokenizer.encode(file.read_text(encoding="utf-8")).ids
        if len(ids) >= count:
            break
    return torch.tensor(ids[:count])
