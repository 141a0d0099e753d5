"""The trainer: batches in, versions out. Starts, resumes and ends here.

    load ──▶ publish the start version ──▶ POST /version      or, after a restart: make the batches after the checkpoint
       │                                                      again, compare with HEAD, go on with its chain
       ┌────────────────────────────────────────────────────────────────────────────────────────┐
       │ GET /batch ──▶ payloads ──▶ samples ──▶ step ──▶ publish V+1 (background, then POST /trained) │
       └──── every k steps: mismatch ◀──── every n steps: checkpoint ◀───────────────────────────────────┘

Each batch makes one version. A batch without signal (no advantage differs from zero) and a step whose loss or gradient
is not finite publish V+1 with the weights of V; the latter is alarmed, its batch kept in `rejected/`, and the third in
a row ends the run. The trainer draws no random numbers: equal batches make equal weights, bit for bit, on one thread.
SIGTERM abandons a step between two micro-batches, writes a checkpoint and returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from stretto.config import Config
from stretto.records import Batch, encode
from stretto.trainer import checkpoint, resume
from stretto.trainer.agreement import Bucket
from stretto.trainer.alarms import GATE_TOKENS, Alarms, refusal
from stretto.trainer.client import Orchestrator, OrchestratorError
from stretto.trainer.learner import Learner, Step
from stretto.trainer.mismatch import HeldVersions, measure
from stretto.trainer.payloads import Payloads
from stretto.trainer.publishing import Publishing
from stretto.trainer.samples import BatchError, Prepared
from stretto.trainer.step import StepReport
from stretto.trainer.stopping import Stopped, StopRequest
from stretto.watch.metrics import Metrics, read
from stretto.weights.publisher import Forked
from stretto.weights.store import Store

REJECTED_IN_A_ROW = 3
PATIENCE_SECONDS = 30.0
"""After so long without a batch, and each time again, an event says what is being waited for."""


class TrainerError(RuntimeError):
    """A sentence: why training cannot go on."""

    final = True  # no restart heals it


def train(config: Config, run_dir: Path, orchestrator: str) -> None:
    """Train until `trainer.steps` versions are published, or until SIGTERM; both end with a checkpoint.

    Raises TrainerError, BatchError, CheckpointError, StoreError or OrchestratorError with a sentence.
    """
    stop = StopRequest()
    with stop.listening(), Metrics(run_dir / "metrics.jsonl", "trainer") as metrics:
        torch.set_num_threads(config.trainer.threads)
        trainer = Trainer(config, run_dir, Orchestrator(orchestrator, give_up=lambda: stop.requested), metrics, stop)
        try:
            trainer.run()
        finally:
            trainer.publishing.close()


class Trainer:
    """State of one trainer process between steps: the model, its optimizer, and the version they are at."""

    def __init__(
        self, config: Config, run_dir: Path, orchestrator: Orchestrator, metrics: Metrics, stop: StopRequest
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.orchestrator = orchestrator
        self.metrics = metrics
        self.stop = stop
        self.checkpoints = run_dir / "checkpoints"
        self.store = Store(config.store_url)
        self.payloads = Payloads(self.store)
        found = checkpoint.latest(self.checkpoints)
        self._say_where(found)
        self.learner = Learner(config, found.path if found else None)
        self.saved = self.version if found else -1
        self.held = HeldVersions(self.learner.optimizer, keep=config.rollouts.max_staleness + 2)
        self.rejected = 0
        self.slowed = False
        self.alarms = Alarms()
        self.trusted = False  # the engines compute the policy that this process holds: seen on the first tokens of it
        every = config.weights.anchor_every
        self.publishing = Publishing(
            self.store,
            config.run.name,
            self.learner.files,
            every,
            orchestrator,
            metrics,
            dtype=config.weights.serve_dtype,
        )

    @property
    def version(self) -> int:
        return self.learner.version

    def _say_where(self, found: checkpoint.Found | None) -> None:
        """An alarm when the run does not go on where it was: its last checkpoint is gone, or all of them."""
        note = found.note if found else ""
        if found is None and any(line["kind"] == "step" for line in read(self.metrics.path)):
            note = (
                f"{self.checkpoints} holds no checkpoint, though this run has trained before: it starts again from "
                f"{self.config.model.path} at version 0, and trains its recorded batches in the same order"
            )
        if note:
            self.metrics.log("event", text=note, alarm=True)

    def run(self) -> None:
        steps = self.config.trainer.steps
        try:
            self._begin()
            while self.version < steps:
                self.step()
                if self.version % self.config.trainer.checkpoint_every == 0:
                    self.save()
        except Stopped:
            self.metrics.log("event", text=f"training was asked to stop at version {self.version}")
        except OrchestratorError:
            if not self.stop.requested:
                raise
        self._last_save()

    def _begin(self) -> None:
        """Find the place where a start before this one ended, or publish the version training starts from.

        What was published after the checkpoint is made again from the same batches; nobody waits meanwhile, as the
        engines go on with what they have.
        """
        self._hold()
        place = resume.place(self.store, self.orchestrator.committed())
        if place is not None:
            saved, logged = self.version, resume.logged_steps(self.metrics.path)
            while self.version < place.version:
                self._again(logged)
            if place.published == self.version:
                self._go_on(place.chain)
                self.metrics.log("event", text=resume.sentence(self.version, saved, place.chain))
                if saved < self.version:
                    self.save()
                return
        self.publishing.first(self.learner.model, self.version)
        self.metrics.log("event", text=f"training starts from version {self.version} on chain {self.publishing.chain}")

    def _go_on(self, chain: str) -> None:
        try:
            self.publishing.go_on(self.learner.model, self.version, chain)
        except Forked as error:
            share = resume.take_published(self.store, chain, self.learner.model, self.learner.optimizer)
            text = f"{error}; {share:.2%} of its elements differ: training goes on from the published one"
            self.metrics.log("event", text=text, alarm=True)
            self.publishing.go_on(self.learner.model, self.version, chain)
        self._hold()

    def _again(self, logged: set[int]) -> None:
        """Make a version that was published before: the same batch, the same update. Only what was not said is said."""
        seconds: dict[str, float] = {}
        batch = self._wait_for_batch(seconds)
        with self._span("load", seconds):
            prepared = self.learner.prepare(batch, self.payloads.of(batch))
        with self._span("compute", seconds, busy=True):
            step = self.learner.step(prepared, self.stop.check)
        self._hold()
        if self.version not in logged:
            self._log(batch, prepared, step, step.report.agreement.buckets(batch.version), seconds)

    def _last_save(self) -> None:
        try:
            self.save()
        except OrchestratorError as error:
            if not self.stop.requested:
                raise
            # The orchestrator was stopped before us. The checkpoint before stays in force; its batches come again.
            self.metrics.log("event", text=f"version {self.version} was not committed before the stop: {error}")

    def step(self) -> None:
        """Turn `self.version` into the next one. When this raises Stopped, nothing has changed."""
        seconds: dict[str, float] = {}
        batch = self._wait_for_batch(seconds)
        with self._span("load", seconds):
            prepared = self.learner.prepare(batch, self.payloads.of(batch))
        with self._span("compute", seconds, busy=True):
            step = self.learner.step(prepared, self.stop.check)
        report = step.report
        buckets = report.agreement.buckets(batch.version)
        self._compare(batch, buckets)
        if not report.finite:
            self._reject(batch)
        else:
            self.rejected = 0
        self._guarded(report)
        with self._span("publish", seconds):
            self.publishing.submit(self.learner.model, self.version)
        self._hold()
        self._log(batch, prepared, step, buckets, seconds)
        every = self.config.trainer.mismatch_every
        if every and self.version % every == 0:
            self._measure(batch, prepared)

    def save(self) -> None:
        """Checkpoint the present version once it is committed, so that a resumed run never is ahead of the ledger."""
        self.publishing.wait()
        if self.saved == self.version:
            return
        self.learner.save(self.checkpoints)
        self.saved = self.version

    def _wait_for_batch(self, seconds: dict[str, float]) -> Batch:
        """Time in which training is paused (an evaluation runs) is no waiting: it is neither measured nor reported."""
        start, said = time.time(), 0.0
        while True:
            with self.stop.at_once():
                answer = self.orchestrator.batch(self.version)
            now = time.time()
            if isinstance(answer, Batch):
                if answer.version != self.version:
                    raise BatchError(f"asked for the batch of version {self.version}, got that of {answer.version}")
                seconds["wait"] = now - start
                self.metrics.log("busy", start=start, end=now, what="wait")
                return answer
            if answer.paused:
                start, said = now, 0.0
            elif now - start - said > PATIENCE_SECONDS:
                said = now - start
                text = f"{said:.0f} s without a batch for version {self.version} from {self.orchestrator.url}"
                self.metrics.log("event", text=text)

    def _reject(self, batch: Batch) -> None:
        folder = self.run_dir / "rejected" / f"v{batch.version:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "batch.msgpack").write_bytes(encode(batch))
        for item, data in zip(batch.items, self.payloads.of(batch), strict=True):
            (folder / f"{item.rollout}.msgpack").write_bytes(data)
        self.rejected += 1
        text = (
            f"loss or gradient of the batch for version {batch.version} is not finite: no update was made, version "
            f"{batch.version + 1} equals {batch.version}; the batch is kept in {folder}"
        )
        self.metrics.log("event", text=text, alarm=True)
        if self.rejected == REJECTED_IN_A_ROW:
            raise TrainerError(f"{text}; this is the {REJECTED_IN_A_ROW}rd step in a row, so training ends")

    def _measure(self, batch: Batch, prepared: Prepared) -> None:
        if batch.version in self.held:
            budget = self.config.trainer.microbatch_tokens
            values = measure(
                self.learner.model,
                self.held,
                prepared.samples,
                batch.version,
                self.learner.distribution,
                budget,
                self.config.trainer.replay_ratio,
            )
            self.metrics.log("mismatch", version=self.version, **values)
            if values["k3"] is not None and (sentence := self.alarms.jump(values["k3"])):
                self._alarm(batch, sentence)

    def _guarded(self, report: StepReport) -> None:
        """Say when the guard begins to slow training down, not again until it has stopped to."""
        slowed = report.applied and report.scale < 1.0
        if slowed and not self.slowed:
            text = (
                f"step to version {self.version}: the policy has moved by {report.moved:.3f} (KL per token) since its "
                f"rollouts were sampled, more than trainer.guard ({self.config.trainer.guard:g}): the step is made at "
                f"{report.scale:.0%} of its learning rate, the next ones smaller too until that is over; when it "
                "lasts, lower trainer.lr"
            )
            self.metrics.log("event", text=text, alarm=True)
        self.slowed = slowed

    def _hold(self) -> None:
        if self.config.trainer.mismatch_every:
            self.held.add(self.version)

    def _compare(self, batch: Batch, buckets: Mapping[str, Bucket]) -> None:
        """The start gate, then the alarms. At the gate nothing of the step has been published or saved."""
        if not self.trusted and "0" in buckets:
            sentence = refusal(buckets["0"])
            if sentence is not None:
                raise TrainerError(f"training ends at its first batch, which changed no version: {sentence}")
            self.trusted = buckets["0"].divergence.tokens >= GATE_TOKENS
        for sentence in self.alarms.news(buckets):
            self._alarm(batch, sentence)

    def _alarm(self, batch: Batch, sentence: str) -> None:
        self.metrics.log("event", text=f"step to version {batch.version + 1}: {sentence}", alarm=True)

    def _log(
        self,
        batch: Batch,
        prepared: Prepared,
        step: Step,
        buckets: Mapping[str, Bucket],
        seconds: dict[str, float],
    ) -> None:
        report = step.report
        rewards = [item.reward for item in batch.items]
        self.metrics.log(
            "step",
            version=self.version,
            rollouts=len(batch.items),
            groups=batch.groups,
            tokens=prepared.tokens,
            trained_tokens=report.trained_tokens,
            loss=report.loss,
            solve_rate=batch.solve_rate,
            reward=sum(rewards) / len(rewards) if rewards else None,
            grad_norm=report.grad_norm,
            lr=step.lr,
            lr_scale=report.scale,
            moved=report.moved,
            entropy=report.entropy,
            ratio_mean=report.ratio_mean,
            ratio_max=report.ratio_max,
            clipped=report.clipped,
            reference_k1=report.reference_k1,
            agreement={name: bucket.values() for name, bucket in buckets.items()},
            applied=report.applied,
            staleness=batch.staleness,
            dropped_equal=batch.dropped_equal,
            seconds=seconds,
        )

    @contextmanager
    def _span(self, name: str, seconds: dict[str, float], busy: bool = False) -> Iterator[None]:
        """Measure a part of the step; what keeps the process busy is logged for the timeline too."""
        start = time.time()
        yield
        end = time.time()
        seconds[name] = end - start
        if busy:
            self.metrics.log("busy", start=start, end=end, what=name)
