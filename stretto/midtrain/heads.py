"""Heads for multi-token prediction, taught on a finished network by that network's own distributions (`model.mtp`).

    stretto midtrain heads --model my-nano --out my-nano/mtp      a head for a network of the shipped kind

    heads = train_heads(model, transcripts(chat, seed=0), steps=600)
    checkpoint.save_heads(heads, folder / "mtp")

The network is frozen and runs without gradients. Left out: data parallelism. To train heads with the network instead,
add `mtp_loss(…, frozen=False)` to its loss.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
import xxhash

from stretto.harness.chat import Chat
from stretto.midtrain.demonstrator import Document
from stretto.midtrain.stream import Mixture, Stream
from stretto.model import checkpoint, mtp
from stretto.model.attention import PackedCausal
from stretto.model.mtp import Distilled, Heads, mtp_loss
from stretto.model.transformer import Transformer

STEPS = 1000
"""Of the shipped head."""
WARMUP = 20
"""Steps until the learning rate is at its peak; a cosine down to nothing follows."""
AGREEING = 0.8
"""Share of the loss that is the chance to draw another token, once it has grown to it: between 40 % and 60 % of the
steps."""
BATCH_TOKENS = 2000
SAVE_SECONDS = 60.0
"""Time between two saves of the resume state."""


def main(model_path: Path, out: Path, work: Path, seed: int = 0, threads: int = 1, steps: int = STEPS) -> None:
    """Teach a head to a checkpoint that speaks the shipped chat, and write it to `out`: as the folder `mtp` of the
    checkpoint, engines find it there. `work` keeps the resume state and a log; running again goes on."""
    torch.set_num_threads(threads)
    model, chat = checkpoint.load(model_path).requires_grad_(False), Chat(model_path)
    work.mkdir(parents=True, exist_ok=True)

    def watch(step: int, found: Distilled) -> None:
        if (step + 1) % 50 == 0 or step + 1 == steps:
            line = {"step": step + 1, "loss": round(float(found.loss.detach()), 4)}
            line |= {name: [round(x, 4) for x in getattr(found, name)] for name in ("overlaps", "agreements")}
            print(json.dumps(line), flush=True)
            with (work / "heads.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")

    heads = train_heads(model, transcripts(chat, seed), steps, watch=watch, state_file=work / "heads.pt")
    checkpoint.save_heads(heads, out)
    print(f"wrote {out} ({sum(path.stat().st_size for path in out.iterdir()) / 1e6:.1f} MB)")


def transcripts(chat: Chat, seed: int) -> Iterator[list[Document]]:
    """Batches of careful and of hasty transcripts, in turns."""
    streams = [Stream(Mixture(agent), chat, seed + 11) for agent in ("careful", "hasty")]
    for stream in itertools.cycle(streams):
        yield stream.batch(BATCH_TOKENS)


def train_heads(
    model: Transformer,
    batches: Iterable[list[Document]],
    steps: int,
    lr: float = 3e-3,
    guesses: int = 3,
    watch: Callable[[int, Distilled], None] = lambda step, found: None,
    state_file: Path | None = None,
) -> Heads:
    """One new head after `steps` batches, taught `guesses` guesses in a row.

    Only tokens of the agent count, which the policy itself will sample: those of weight 1, and of weight 0, which are
    its mistakes. `watch` is told of each step. With a `state_file` it goes on from what is saved there each minute,
    given the same batches from the first one on. Raises FloatingPointError when the loss is not
    finite, ValueError when what is saved is of another network.
    """
    heads = mtp.fresh(model)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    first, saved = 0, time.monotonic()
    if state_file is not None and state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        if state["network"] != _digest(model):
            raise ValueError(f"{state_file} holds a head of another network: choose another --work, or delete it")
        heads.load_state_dict(state["heads"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step, documents in enumerate(islice(batches, first, steps), first):
        lengths = [len(document.ids) for document in documents]
        ids_T = torch.tensor([i for document in documents for i in document.ids])
        wanted_T = torch.tensor([weight in (0.0, 1.0) for document in documents for weight in document.weights])
        with torch.no_grad():
            positions_T = torch.cat([torch.arange(length) for length in lengths])
            hidden_TD = model(ids_T, positions_T, PackedCausal(lengths)).hidden_TD
        agreeing = AGREEING * min(max(step / steps - 0.4, 0.0) / 0.2, 1.0)
        found = mtp_loss(model, heads, hidden_TD, ids_T, lengths, guesses, wanted_T, agreeing=agreeing)
        if not bool(found.loss.isfinite()):
            raise FloatingPointError(f"the loss of the heads is {float(found.loss)} at step {step}")
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        fall = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / WARMUP) * fall
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch(step, found)
        if state_file is not None and time.monotonic() - saved > SAVE_SECONDS:
            state = {"heads": heads.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state | {"network": _digest(model)}, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
            saved = time.monotonic()
    return heads


def _digest(model: Transformer) -> str:
    digest = xxhash.xxh64()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
