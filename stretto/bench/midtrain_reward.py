"""Does a lower loss after mid-training give a higher reward after RL? Three budgets from one init, then the same RL.

    shipped model ─┬─ 1st budget ─▶ loss ─▶ RL, 3 seeds ─▶ solve rate on held-out tasks
                   ├─ 2nd budget ─▶ …
                   └─ 3rd budget ─▶ …

The init is the shipped nano model, whose habits were planted (docs/midtrain.md). Each budget is a whole run of its own,
warm-up and decay included, of the nano recipe's own loop on careful transcripts of training tasks with some of the
standard library. The loss is that of the agent's tokens in transcripts that no budget reads. RL is `stretto train` with
the shipped settings but for the few steps, without evaluation on the way. (Composer 2's report, section on
mid-training, has this comparison at scale.)
"""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.bench.loop_runs import Runs, Setting
from stretto.config import ModelConfig
from stretto.harness.chat import Chat
from stretto.midtrain import loop
from stretto.midtrain.demonstrator import Document, transcripts
from stretto.midtrain.stream import Mixture, Stream
from stretto.model import checkpoint
from stretto.model.transformer import Transformer

BUDGETS = (20_000, 100_000, 500_000)
"""Tokens."""
LR, STABLE, CODE = 1e-3, 0.5, 0.05
RL_STEPS, SEEDS = 8, 3
HELD_OUT_TASKS = 64
"""Each tried twice."""
JUDGED_DOCUMENTS = 200
JUDGED_SEED = 7_777_777
"""Of transcripts that only measure."""
ASYNCHRONOUS = Setting("asynchronous", 8)


@dataclass(frozen=True)
class Budget:
    """One mid-training run and the RL after it. `rewards`: solve rate on held-out tasks, one of each seed; `before`:
    that of the first RL step's rollouts, sampled before anything was learnt."""

    tokens: int
    loss: float
    rewards: list[float]
    before: list[float]

    @property
    def reward(self) -> float:
        return statistics.mean(self.rewards)


def measure(
    place: Path,
    say: Callable[[str], None],
    budgets: Sequence[int] = BUDGETS,
    seeds: int = SEEDS,
    rl_steps: int = RL_STEPS,
    held_out: int = HELD_OUT_TASKS,
) -> dict[str, Any]:
    """All of it, in the folder `place`. Raises RuntimeError with the last words of a run that failed."""
    folder = ModelConfig().folder
    chat = Chat(folder)
    losses: dict[int, float] = {}
    for tokens in budgets:
        model = checkpoint.load(folder)
        _midtrain(model, chat, tokens, place)
        losses[tokens] = agent_loss(model, chat)
        checkpoint.save(model, place / str(tokens), tokenizer_from=folder)
        say(f"{tokens:,} tokens of mid-training: loss {losses[tokens]:.4f}")
    start = agent_loss(checkpoint.load(folder), chat)
    rewards: dict[int, list[float]] = {tokens: [] for tokens in budgets}
    before: dict[int, list[float]] = {tokens: [] for tokens in budgets}
    runs = Runs(place, held_out)
    for seed in range(seeds):  # seeds outside, so that a machine that slows down meets all budgets alike
        for tokens in budgets:
            row = runs.train("reward", ASYNCHRONOUS, place / str(tokens), seed, [], rl_steps)
            rewards[tokens].append(row.solve_rate)
            before[tokens].append(row.solved[0])
            say(f"{tokens:,} tokens, then RL with seed {seed}: {row.solve_rate:.0%} solved after {row.seconds:.0f} s")
    found = [Budget(tokens, losses[tokens], rewards[tokens], before[tokens]) for tokens in budgets]
    return {
        "init": {"model": "nano", "loss": round(start, 4)},
        "rl_steps": rl_steps,
        "seeds": seeds,
        "held_out_tasks": held_out,
        "budgets": [{**asdict(one), "loss": round(one.loss, 4), "reward": round(one.reward, 4)} for one in found],
        "least_gain": round(least_gain(found), 4),
    }


def least_gain(budgets: Sequence[Budget]) -> float:
    """The smallest rise of the mean reward from one budget to the next one, by falling loss; -inf when a larger budget
    did not lower the loss."""
    pairs = list(itertools.pairwise(sorted(budgets, key=lambda one: one.tokens)))
    if any(larger.loss >= smaller.loss for smaller, larger in pairs):
        return float("-inf")
    return min(larger.reward - smaller.reward for smaller, larger in pairs)


def _midtrain(model: Transformer, chat: Chat, tokens: int, place: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    phase = loop.Phase(f"budget-{tokens}", Mixture("careful", code=CODE), tokens, LR, STABLE, warmup=5)
    with contextlib.redirect_stdout(io.StringIO()):
        loop.train_phase(model, phase, Stream(phase.mixture, chat, 0), place / f"{tokens}.pt", place / "log.jsonl")
    torch.set_num_threads(before)


@torch.no_grad()
def agent_loss(model: Transformer, chat: Chat, documents: int = JUDGED_DOCUMENTS, batch: int = 10) -> float:
    """Nats per token of what the careful demonstrator says and does, in transcripts that are not learnt from."""
    stream = transcripts(chat, JUDGED_SEED, "careful")
    total = counted = 0.0
    for _ in range(0, documents, batch):
        part = list(itertools.islice(stream, batch))
        tokens = _spoken(part)
        total += float(loop.loss(model, part, balance=0.0)[1]) * tokens
        counted += tokens
    return total / counted


def _spoken(documents: Sequence[Document]) -> int:
    return sum(weight == 1.0 for document in documents for weight in document.weights[1:])
