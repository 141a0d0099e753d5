"""How fast mid-training learns: tokens per CPU second beside transformers, and the share of the machine's matmul peak.

    documents of the nano recipe ─▶ packed rows ─▶ ours: midtrain/learner.py ───────────────┐ one step each, in turn
                     └────────────▶ theirs, the fastest way of a trial ──────────────────────┘ the same loss, to 1e-3

Both learn every token of the same documents, with the router's balance loss, clipping and a fused AdamW, at learning
rate 0 so that each round does the same. Theirs may have its rows packed (each document kept apart by its position ids)
or one document a row (longest together, no mask: what is padded comes after what is read), in passes of few or many
tokens and with either of its two quick ways to compute experts. One thread; CPU seconds.
The peak is the best of several products of 1024 x 1024 matrices, measured again beside each timed step.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.bench.ceiling import WIDTH, multiplied
from stretto.config import ModelConfig
from stretto.harness.chat import Chat
from stretto.midtrain.learner import Learner
from stretto.midtrain.nano import SKILL
from stretto.midtrain.recipe import Midtrain
from stretto.midtrain.stream import Stream
from stretto.midtrain.tokens.packing import best_fit
from stretto.midtrain.tokens.shards import Row
from stretto.model import checkpoint
from stretto.model.numerics import Numerics
from stretto.model.spec import ModelSpec

ROW, ROWS, MICRO_ROWS = 1024, 8, 4
THEIR_ROWS = (1, 2, MICRO_ROWS)
"""Rows' worth of tokens in one pass of transformers'."""
THEIR_EXPERTS = ("grouped_mm", "eager")
ROUNDS = 5
TRIALS = 2
PEAK_TIMES = 6
PACKED = "packed rows"
CLOSE = 1e-3
"""Relative difference of the two losses up to which they count as one."""
BALANCE = 0.001
"""Weight of the router's loss in both: transformers' default."""
FUSED = Numerics(fused=True)
"""As `stretto midtrain` computes with one thread (prepare.py)."""
WIDE = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=4096,
    hidden_size=512,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate_size=1024,
    max_positions=2048,
    experts=8,
    experts_per_token=2,
    expert_size=256,
    norm_topk_prob=True,
    tie_embeddings=True,
)
"""The shape of the nano model, four times as wide."""


def measure(rounds: int = ROUNDS, rows: int = ROWS, wide: ModelSpec = WIDE) -> dict[str, Any]:
    """Both comparisons. Raises ValueError without transformers, RuntimeError when the losses differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        folder = ModelConfig().folder
        packed = packed_rows(folder, rows)
        return {"nano": _beside_transformers(folder, packed, rounds), "wide": _of_peak(wide, packed, rounds)}
    finally:
        torch.set_num_threads(before)


def packed_rows(folder: Path, rows: int) -> list[Row]:
    """Rows of at most `ROW` tokens, of documents as the first phase of the nano recipe reads them when it no longer
    practises to copy; every token is learnt."""
    documents = Stream(SKILL.mixture, Chat(folder), 0).batch(rows * ROW, copying=0.0)
    ids = [np.array(document.ids, np.int64) for document in documents]
    packed = []
    for pieces in best_fit([len(one) for one in ids], ROW)[:rows]:
        parts = [ids[number][start:stop] for number, start, stop in pieces]
        joined = np.concatenate(parts)
        packed.append(Row(joined, np.ones(len(joined), bool), [len(part) for part in parts]))
    return packed


def _beside_transformers(folder: Path, rows: Sequence[Row], rounds: int) -> dict[str, Any]:
    tokens = sum(len(row.ids) for row in rows)
    ours = _ours(checkpoint.load(folder, numerics=FUSED), rows)
    theirs = _their_ways(folder, rows)
    loss = ours()
    for name, step in theirs.items():  # what is compiled or allocated once is done here too
        if abs((other := step()) - loss) > CLOSE * loss:
            raise RuntimeError(f"transformers' loss is {other:.5f} with {name}, ours {loss:.5f}: not the same work")
    trial = {name: min(_timed(step) for _ in range(TRIALS)) for name, step in theirs.items()}
    own = min(_timed(ours) for _ in range(TRIALS))
    best = min(trial, key=lambda name: trial[name])
    taken = _in_turn({"ours": ours, "theirs": theirs[best]}, rounds)
    return {
        "tokens": tokens,
        "documents": sum(len(row.lengths) for row in rows),
        "loss": round(loss, 5),
        "transformers_way": best,
        "trial_tokens_per_s": {name: round(tokens / seconds) for name, seconds in trial.items()},
        "tokens_per_s": {name: round(tokens / statistics.median(seconds)) for name, seconds in taken.items()},
        "ratio": round(statistics.median(b / a for a, b in zip(taken["ours"], taken["theirs"], strict=True)), 3),
        "trial_ratio": {name: round(seconds / own, 3) for name, seconds in trial.items()},
        "packed": {"tokens_per_s": round(tokens / trial[PACKED]), "ratio": round(trial[PACKED] / own, 3)},
    }


def _of_peak(spec: ModelSpec, rows: Sequence[Row], rounds: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    rows = [Row(draw.integers(0, spec.vocab_size, len(row.ids)), row.learn, row.lengths) for row in rows[:MICRO_ROWS]]
    step, flops = _ours(checkpoint.random_init(spec, 0, numerics=FUSED), rows), step_flops(spec, rows)
    step()
    shares, peaks, seconds = [], [], []
    for _ in range(rounds):
        seconds.append(_timed(step))
        peaks.append(peak_flops())
        shares.append(flops / seconds[-1] / peaks[-1])
    tokens = sum(len(row.ids) for row in rows)
    return {
        "width": spec.hidden_size,
        "active_parameters": multiplied(spec, 1),
        "tokens": tokens,
        "tokens_per_s": round(tokens / statistics.median(seconds)),
        "peak_gflops": round(statistics.median(peaks) / 1e9, 1),
        "share": round(statistics.median(shares), 3),
    }


def step_flops(spec: ModelSpec, rows: Sequence[Row]) -> float:
    """Of a forward and a backward pass: 6 for each active weight and token, and 12 for each channel of a query and each
    token it may see. What is computed twice (the head's logits) counts once."""
    tokens = sum(len(row.ids) for row in rows)
    pairs = sum(length * (length + 1) // 2 for row in rows for length in row.lengths)
    return 6.0 * multiplied(spec, 1) * tokens + 12.0 * pairs * spec.heads * spec.head_dim * spec.layers


def peak_flops() -> float:
    """Of this thread's float32 products of large matrices, per CPU second."""
    a, b = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    return 2.0 * WIDTH**3 / min(_timed(lambda: a @ b) for _ in range(PEAK_TIMES))


def _ours(model: Any, rows: Sequence[Row]) -> Callable[[], float]:
    """A whole step: the loss without the router's."""
    settings = Midtrain(model="-", corpus=("-",), out="-", micro_rows=MICRO_ROWS, balance=BALANCE)
    learner = Learner(model, settings)
    return lambda: learner.step(rows, 0.0).loss


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""ids, positions and labels (-100: not learnt), each [rows, longest]."""


def batches_of_rows(rows: Sequence[Row]) -> list[Batch]:
    """`MICRO_ROWS` packed rows each; positions begin at 0 in each document, and in the padding."""
    return [_padded(rows[start : start + MICRO_ROWS]) for start in range(0, len(rows), MICRO_ROWS)]


def batches_of_documents(rows: Sequence[Row], micro_rows: int = MICRO_ROWS) -> list[Batch]:
    """One document a row, about as many tokens a batch as `micro_rows` packed rows have."""
    parts = [part for row in rows for part in np.split(row.ids, np.cumsum(row.lengths)[:-1])]
    alone = [Row(part, np.ones(len(part), bool), [len(part)]) for part in sorted(parts, key=len, reverse=True)]
    batches, start = [], 0
    while start < len(alone):
        count = max(1, micro_rows * ROW // len(alone[start].ids))
        batches.append(_padded(alone[start : start + count]))
        start += count
    return batches


def _padded(rows: Sequence[Row]) -> Batch:
    longest = max(len(row.ids) for row in rows)
    ids, labels = np.zeros((len(rows), longest), np.int64), np.full((len(rows), longest), -100, np.int64)
    positions = np.zeros((len(rows), longest), np.int64)
    for at, row in enumerate(rows):
        size = len(row.ids)
        lengths = [*row.lengths, *([longest - size] if longest > size and len(row.lengths) > 1 else [])]
        place = np.concatenate([np.arange(length) for length in lengths])
        positions[at, : len(place)] = place
        if len(row.lengths) == 1:
            positions[at] = np.arange(longest)
        ids[at, :size] = row.ids
        labels[at, :size] = np.where(positions[at, :size] == 0, -100, row.ids)
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(labels)


def _their_ways(folder: Path, rows: Sequence[Row]) -> dict[str, Callable[[], float]]:
    """A step of transformers' network in each way it may be used; packed rows, which are slow there, in one way."""
    ways = {PACKED: _theirs(folder, batches_of_rows(rows), THEIR_EXPERTS[0])}
    for micro_rows in THEIR_ROWS:
        batches = batches_of_documents(rows, micro_rows)
        for experts in THEIR_EXPERTS:
            ways[f"documents, {micro_rows * ROW} tokens a pass, {experts}"] = _theirs(folder, batches, experts)
    return ways


def _theirs(folder: Path, batches: Sequence[Batch], experts: str) -> Callable[[], float]:
    """A whole step of transformers' network: the loss without the router's."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("it compares with transformers, which is not installed: pip install -e '.[dev]'") from None
    with contextlib.redirect_stderr(io.StringIO()):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation=experts, attn_implementation="sdpa"
        ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), fused=True)
    learnt = sum(int((labels >= 0).sum()) for _, _, labels in batches)

    def step() -> float:
        total = 0.0
        for ids, positions, labels in batches:
            out = model(
                input_ids=ids,
                position_ids=positions,
                labels=labels,
                use_cache=False,
                output_router_logits=True,
                num_items_in_batch=learnt,
            )
            total += float(out.loss.detach() - BALANCE * out.aux_loss.detach())
            out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def _in_turn(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each in each round; every other round goes backwards."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            taken[name].append(_timed(steps[name]))
    return taken


def _timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
