"""A run's training again, alone, over the batches it recorded: does the same come out?

    ledger (which rollouts, with what advantage) ─┐
    store (the rollouts)                          ├──▶ Learner ──▶ loss, gradient norm   against   metrics.jsonl
    a checkpoint, or the model it began with ─────┘

Training is a function of its batches, so on the same machine every number is equal to the bit. Where one is not, the
code, the configuration or the machine has changed what a step does, and the first such version says since when. Nothing
of the run is written to. With overrides it answers what-if: these very batches under another objective.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.config import Config
from stretto.records import Batch, decode
from stretto.trainer import checkpoint
from stretto.trainer.learner import Learner, Step
from stretto.trainer.payloads import Payloads
from stretto.watch.metrics import read
from stretto.weights.store import Store


class ReplayError(ValueError):
    """A sentence: what of the run is not there to be replayed."""


@dataclass(frozen=True)
class Compared:
    """One step: as it was logged (None where it was not) and as it came out now."""

    step: Step
    logged_loss: float | None
    logged_grad_norm: float | None

    @property
    def difference(self) -> float | None:
        """The larger of the relative differences of loss and gradient norm; 0.0 when both are equal to the bit."""
        pairs = [(self.step.report.loss, self.logged_loss), (self.step.report.grad_norm, self.logged_grad_norm)]
        found = [_relative(now, then) for now, then in pairs if then is not None]
        return max(found, default=None)


def replay(config: Config, run: Path, first: int | None = None, last: int | None = None) -> Iterator[Compared]:
    """Train versions `first` to `last` (default: all that were logged) of `run` again, one by one.

    Starts at the newest checkpoint before `first`, or at the run's model; the versions between are made without being
    given back. Raises ReplayError, BatchError and CheckpointError with a sentence.
    """
    logged = {int(line["version"]): line for line in read(run / "metrics.jsonl") if line["kind"] == "step"}
    if not logged:
        raise ReplayError(f"{run} has logged no step: there is nothing to replay")
    first, last = 1 if first is None else first, max(logged) if last is None else last
    if not 1 <= first <= last <= max(logged):
        raise ReplayError(f"versions {first} to {last} are asked for; {run} has trained 1 to {max(logged)}")
    torch.set_num_threads(config.trainer.threads)
    learner = Learner(config, _start(run / "checkpoints", first))
    payloads = Payloads(Store(config.store_url))
    while learner.version < last:
        batch = recorded_batch(run, learner.version)
        step = learner.step(learner.prepare(batch, payloads.of(batch)))
        if step.version >= first:
            line = logged.get(step.version, {})
            yield Compared(step, line.get("loss"), line.get("grad_norm"))


def recorded_batch(run: Path, version: int) -> Batch:
    """The batch that updated `version`, from the run's ledger, which may be in use."""
    path = run / "ledger.sqlite"
    if not path.is_file():
        raise ReplayError(f"{run} has no ledger, which says what was trained")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            row = db.execute("SELECT record FROM batches WHERE version=?", (version,)).fetchone()
    except sqlite3.Error as error:
        raise ReplayError(f"{path} cannot be read: {error}") from None
    if row is None:
        raise ReplayError(f"{path} holds no batch for version {version}")
    return decode(row[0], Batch)


def as_json(compared: Compared) -> dict[str, Any]:
    report = compared.step.report
    return {
        "version": compared.step.version,
        "loss": report.loss,
        "logged_loss": compared.logged_loss,
        "grad_norm": report.grad_norm,
        "logged_grad_norm": compared.logged_grad_norm,
        "difference": compared.difference,
        "clipped": report.clipped,
        "moved": report.moved,
        "lr_scale": report.scale,
        "entropy": report.entropy,
    }


def _start(folder: Path, first: int) -> Path | None:
    """The newest whole checkpoint from which `first` is still to be made; None: the model the run began with."""
    before = [path for path in checkpoint.whole(folder) if checkpoint.version_of(path) < first]
    return before[0] if before else None


def _relative(now: float, then: float) -> float:
    if now == then:
        return 0.0
    scale = max(abs(now), abs(then))
    return abs(now - then) / scale if math.isfinite(scale) else math.inf
