"""`stretto midtrain CONFIG`: the phases of a recipe, one after the other, each resumable at any step.

    corpora ─▶ prepare.py: rows ─▶ mixture.py: which rows ─▶ learner.py: one step ─▶ <out>/<phase>, <out>/final
                                                              state.pt, metrics.jsonl

The state is written whole under another name first, so that a kill at any moment leaves the one before. Started under
`torchrun`, ranks share each step (gloo on CPUs, nccl where there are GPUs: untested there); rank 0 writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.config import ConfigError
from stretto.midtrain import prepare
from stretto.midtrain.learner import Learner, Taught
from stretto.midtrain.measures import Measures
from stretto.midtrain.recipe import Phase, Recipe, learning_rate, load, teaches
from stretto.midtrain.tokens.mixture import Stream, annealed, normalised
from stretto.midtrain.tokens.shards import Shards
from stretto.model import checkpoint, mtp
from stretto.model.mtp import Heads
from stretto.model.transformer import Transformer
from stretto.watch.metrics import Metrics

STATE, METRICS, FINAL = "state.pt", "metrics.jsonl", "final"


def midtrain(config: Path, stop_after: int | None = None) -> Path:
    """Run what is left of the recipe; the folder of the finished checkpoint. `stop_after` ends it after so many steps,
    to go on later. Raises ConfigError, ValueError or FloatingPointError with a sentence."""
    recipe, base = load(config), config.parent
    out = base / recipe.midtrain.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(recipe.midtrain.threads)
    ours = "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        return Run(recipe, base, out).go(stop_after)
    finally:
        if ours:
            dist.destroy_process_group()


class Run:
    """One process's part of a run."""

    def __init__(self, recipe: Recipe, base: Path, out: Path):
        self.recipe, self.base, self.out = recipe, base, out
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if self.rank > 0:
            dist.barrier()  # rank 0 makes tokenizer and shards
        self.tokenizer = prepare.tokenizer_folder(recipe, base, out)
        lengths = {phase.row or recipe.midtrain.row for phase in recipe.phase}
        self.shards = {row: prepare.rows(recipe, base, out, self.tokenizer, row) for row in sorted(lengths)}
        if self.rank == 0 and dist.is_initialized():
            dist.barrier()
        for phase in recipe.phase:  # before hours of training, not after
            for shares in (phase.mixture, phase.mixture_end):
                if shares:
                    normalised(shares, self.rows(phase).domains)
        self.metrics = Metrics(out / METRICS, "midtrain") if self.rank == 0 else None
        self.measures = Measures(recipe.evaluation, base, self.tokenizer) if self.rank == 0 else None

    def rows(self, phase: Phase) -> Shards:
        return self.shards[phase.row or self.recipe.midtrain.row]

    def go(self, stop_after: int | None) -> Path:
        final = self.out / FINAL
        if final.is_dir():
            return final
        state = self._state()
        model, heads = prepare.network(self.recipe, self.base), prepare.heads(self.recipe, self.base)
        left = stop_after
        for number, phase in enumerate(self.recipe.phase):
            done = self.out / f"{number}-{phase.name}"
            if not done.is_dir():
                model = prepare.stretched(model, phase, self.recipe)
                started = state if state and state["phase"] == number else None
                if heads is None and self.recipe.mtp is not None and teaches(self.recipe, phase) != "off":
                    heads = mtp.fresh(model, self.recipe.mtp.depth, self.recipe.midtrain.seed)
                taken, whole = self._phase(model, heads, number, phase, started, left)
                if not whole:
                    return self.out
                left = None if left is None else left - taken
                self._save_model(model, heads, done)
            model, heads = prepare.loaded(done, self.recipe)  # bf16 values, as a run that stops here would go on from
        self._save_model(model, heads, final)
        return final

    def _phase(
        self,
        model: Transformer,
        heads: Heads | None,
        number: int,
        phase: Phase,
        state: dict[str, Any] | None,
        limit: int | None,
    ) -> tuple[int, bool]:
        """Train to the phase's end, or for `limit` steps: (how many it took, whether the end is reached)."""
        settings = self.recipe.midtrain
        stream = Stream(self.rows(phase).domains, settings.seed + number)
        learner = Learner(model, settings, self._taught(heads, phase))
        step = seen = 0
        if state:
            learner.load_state(state["learner"])
            stream.restore(state["stream"])
            step, seen = state["step"], state["seen"]
        first = step
        while seen < phase.tokens:
            if limit is not None and step - first >= limit:
                self._save_state(number, step, seen, learner, stream)
                return step - first, False
            begun = time.monotonic()
            lr = learning_rate(phase, step, seen)
            rows = stream.batch(settings.batch_rows, mixture(phase, self.rows(phase), seen / phase.tokens))
            try:
                done = learner.step(rows, lr)
            except FloatingPointError as error:
                raise FloatingPointError(
                    f"step {step} of phase {phase.name}: {error}. Nothing was changed by it; the state of step "
                    f"{step - step % settings.save_every} is in {self.out / STATE}: lower phase.lr, or look at the rows"
                ) from None
            step, seen = step + 1, seen + done.tokens
            if self.metrics is not None:
                seconds = time.monotonic() - begun
                self.metrics.log(
                    "midtrain",
                    phase=phase.name,
                    step=step,
                    seen=seen,
                    lr=lr,
                    **asdict(done),
                    tokens_per_s=done.tokens / seconds,
                    epochs=stream.epochs,
                )
            if step % settings.save_every == 0 and seen < phase.tokens:
                self._save_state(number, step, seen, learner, stream)
            if step % self.recipe.evaluation.every == 0 or seen >= phase.tokens:
                self._evaluate(model, phase, step)
        learner.take_average()
        return step - first, True

    def _taught(self, heads: Heads | None, phase: Phase) -> Taught | None:
        how = teaches(self.recipe, phase)
        if heads is None or self.recipe.mtp is None or how == "off":
            return None
        return Taught(heads, self.recipe.mtp, alone=how == "alone")

    def _evaluate(self, model: Transformer, phase: Phase, step: int) -> None:
        if self.metrics is None or self.measures is None:
            return
        for kind, values in self.measures.of(model, self.rows(phase).row):
            self.metrics.log(kind, phase=phase.name, step=step, **values)

    def _state(self) -> dict[str, Any] | None:
        path = self.out / STATE
        if not path.is_file():
            return None
        try:
            return torch.load(path, weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise ConfigError(f"{path} can't be read ({error}): remove it to begin this phase again") from error

    def _save_state(self, number: int, step: int, seen: int, learner: Learner, stream: Stream) -> None:
        if self.rank:
            return
        part = self.out / f"{STATE}.part"
        torch.save(
            {"phase": number, "step": step, "seen": seen, "learner": learner.state(), "stream": stream.state()}, part
        )
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(self.out / STATE)

    def _save_model(self, model: Transformer, heads: Heads | None, folder: Path) -> None:
        if self.rank == 0:
            checkpoint.save(model, folder, tokenizer_from=self.tokenizer, heads=heads)
        if dist.is_initialized():
            dist.barrier()


def mixture(phase: Phase, shards: Shards, progress: float) -> Mapping[str, float]:
    """What the phase reads at `progress`; without a mixture each domain by its rows."""
    start = phase.mixture or {name: float(len(domain)) for name, domain in shards.domains.items()}
    return annealed(start, phase.mixture_end or start, min(1.0, progress))
