"""What training is, apart from where batches come from and versions go: the model, its optimizer, and their version.

    batch, payloads ──prepare──▶ samples ──step──▶ version + 1        loop.py: the orchestrator's batches, published
                                                                      replay.py: a run's recorded batches, compared

A pure function of the checkpoint and the batches: no random numbers, no counter but the version, from which the
learning rate follows, so that N steps, a restart and N steps are 2N steps, bit for bit on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.config import Config
from stretto.model import checkpoint as huggingface
from stretto.model import selftest
from stretto.model.numerics import trainer_numerics
from stretto.model.spec import ModelSpec
from stretto.records import Batch
from stretto.trainer import checkpoint
from stretto.trainer.guard import Guard
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.publishing import companion_files
from stretto.trainer.samples import Geometry, Prepared, prepare
from stretto.trainer.schedule import learning_rate
from stretto.trainer.shadow import Shadow
from stretto.trainer.step import Distribution, Shadows, StepReport, learn


@dataclass(frozen=True)
class Step:
    """What became of a batch; `version` is the one it made, `lr` the schedule's, before the guard."""

    version: int
    lr: float
    report: StepReport


class Learner:
    """State between steps. Starts at `resumed`, or at version 0 with the model that `config.model` names.

    Raises CheckpointError with a sentence when either cannot be loaded.
    """

    def __init__(self, config: Config, resumed: Path | None) -> None:
        self.config = config
        source = resumed or config.model.folder
        self.files = companion_files(source)
        numerics = trainer_numerics(config.model.numerics, config.engine.dtype)
        self.model = huggingface.load(source, numerics=numerics)
        if numerics.exact:
            selftest.check(self.model.spec, numerics)
        self.optimizer = MasterAdamW(
            self.model, config.trainer.betas, config.trainer.weight_decay, config.weights.serve_dtype
        )
        self.distribution = Distribution(config.rollouts.temperature, config.rollouts.top_p, config.rollouts.top_k)
        self.geometry = geometry(self.model.spec)
        self.version = 0
        rest = {}
        if resumed is not None:
            self.version = checkpoint.version_of(resumed)
            rest = checkpoint.restore(resumed, self.optimizer)
        self._guard = Guard(config.trainer.guard)
        self._guard.load_state(rest)
        self._average, self._shadows = self._make_shadows()
        if self._average is not None:
            self._average.load_state(rest)

    def _make_shadows(self) -> tuple[Shadow | None, Shadows]:
        """The moving average if any, and which policies the objective compares with."""
        settings = self.config.trainer
        average = start = None
        if settings.proximal == "ema" or (settings.kl and settings.reference == "ema"):
            average = Shadow.of(self.optimizer, settings.ema_decay)
        if settings.kl and settings.reference == "start":
            start = Shadow.frozen(self.config.model.folder)
        proximal = average if settings.proximal == "ema" else None
        reference = (average if settings.reference == "ema" else start) if settings.kl else None
        return average, Shadows(proximal, reference)

    def prepare(self, batch: Batch, payloads: Sequence[bytes]) -> Prepared:
        """Raises BatchError naming the rollout that is malformed or too old."""
        return prepare(
            batch,
            payloads,
            self.geometry,
            max_staleness=self.config.rollouts.max_staleness,
            replay=self.config.trainer.replay,
            truncated=self.distribution.truncated,
            normalizer=self.config.trainer.normalizer,
            budget=self.config.harness.most_sampled,
        )

    def step(self, prepared: Prepared, between: Callable[[], None] = lambda: None) -> Step:
        """Turn `version` into the next one. When `between` raises, nothing has changed."""
        lr = learning_rate(self.version, self.config.trainer)
        report = learn(
            self.model,
            self.optimizer,
            prepared.samples,
            self.config.trainer,
            self.distribution,
            lr,
            between,
            self._shadows,
            self._guard,
        )
        if self._average is not None:
            self._average.follow(self.optimizer)
        self.version += 1
        return Step(self.version, lr, report)

    def save(self, folder: Path) -> Path:
        """A checkpoint of the present version below `folder`."""
        rest = {**self._guard.state(), **(self._average.state() if self._average is not None else {})}
        keep = self.config.trainer.keep_checkpoints
        return checkpoint.save(folder, self.version, self.model, self.optimizer, self.files, keep, rest)


def geometry(spec: ModelSpec) -> Geometry:
    layers, per_token = spec.route_shape
    return Geometry(vocab=spec.vocab_size, layers=layers, experts=spec.experts, per_token=per_token)
