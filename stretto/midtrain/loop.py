"""The mid-training loop: next-token prediction with per-token loss weights, one phase at a time, resumable.

AdamW, warm-up / stable / linear decay, a load-balancing loss for the router. No document sees another: each is a
sequence of its own in the packed forward pass.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.midtrain.demonstrator import Document
from stretto.midtrain.stream import Mixture, Stream
from stretto.model.attention import PackedCausal
from stretto.model.router import balance_loss
from stretto.model.transformer import Transformer

SAVE_SECONDS = 60.0
"""Time between two saves of the resume state."""


@dataclass(frozen=True)
class Phase:
    """One stretch of training on one mixture. Token counts are what the model sees, context included."""

    name: str
    mixture: Mixture
    tokens: int
    lr: float
    stable: float  # share of the phase at the peak learning rate; linear decay to `final` of it follows
    final: float = 0.03
    warmup: int = 30
    batch_tokens: int = 1500
    copy_until: int = 0  # tokens over which the share of copy documents falls to 0


def learning_rate(phase: Phase, step: int, seen: int) -> float:
    """Warm-up by steps, then stable, then linear decay by tokens."""
    progress = seen / phase.tokens
    decay = 1.0 if progress < phase.stable else 1 - (1 - phase.final) * (progress - phase.stable) / (1 - phase.stable)
    return phase.lr * min(1.0, (step + 1) / phase.warmup) * max(decay, phase.final)


def loss(model: Transformer, documents: list[Document], balance: float = 0.01) -> tuple[Tensor, Tensor]:
    """Weighted next-token loss plus `balance` x load-balancing loss; and the loss on fully weighted tokens alone."""
    ids_T = torch.tensor([i for d in documents for i in d.ids])
    lengths = [len(d.ids) for d in documents]
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    weights_T = torch.tensor([w for d in documents for w in [*d.weights[1:], 0.0]])
    targets_T = torch.roll(ids_T, -1)
    out = model(ids_T, positions_T, PackedCausal(lengths), capture=True)
    rows = weights_T.nonzero().squeeze(1)
    losses_N = F.cross_entropy(model.logits(out.hidden_TD[rows]), targets_T[rows], reduction="none")
    weights_N = weights_T[rows]
    total = (losses_N * weights_N).sum() / weights_N.sum()
    agent = losses_N.detach()[weights_N == 1.0]
    if out.router_logits and out.routes_TLK is not None:
        total = total + balance * balance_loss(out.router_logits, out.routes_TLK, model.spec.experts)
    return total, agent.mean() if len(agent) else total.detach()


def train_phase(model: Transformer, phase: Phase, stream: Stream, state_file: Path, log_file: Path) -> None:
    """Train one phase to its end, saving resume state each minute. Continues from `state_file` when it is there."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=phase.lr,
        betas=(0.9, 0.97),
        fused=True,
    )
    step, seen, copying = 0, 0, phase.mixture.copying
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seen, copying = state["step"], state["seen"], state["copying"]
        stream.restore(state["block"], state["offset"], copying)
    started = saved = time.monotonic()
    first, recent = seen, 0.0
    while seen < phase.tokens:
        if stream.offset == 0:
            copying = phase.mixture.copying * max(0.0, 1 - seen / phase.copy_until) if phase.copy_until else 0.0
        documents = stream.batch(phase.batch_tokens, copying)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, step, seen)
        value, agent = loss(model, documents)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += sum(len(d.ids) for d in documents)
        step += 1
        recent = agent.item() if step == 1 else 0.98 * recent + 0.02 * agent.item()
        if step % 100 == 0:
            rate = (seen - first) / (time.monotonic() - started)
            line = {
                "phase": phase.name,
                "step": step,
                "tokens": seen,
                "loss": round(recent, 4),
                "tokens_per_s": round(rate),
            }
            print(json.dumps(line), flush=True)
            with log_file.open("a") as log:
                log.write(json.dumps(line) + "\n")
        if time.monotonic() - saved > SAVE_SECONDS or seen >= phase.tokens:
            _save(state_file, model, optimizer, stream, step=step, seen=seen, copying=copying)
            saved = time.monotonic()


def _save(path: Path, model: Transformer, optimizer: torch.optim.Optimizer, stream: Stream, **numbers: float) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **numbers}
    torch.save({**state, "block": stream.block, "offset": stream.offset}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
