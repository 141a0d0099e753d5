"""The trainer: batches in, versions out. Starts, resumes and ends here.

    load or resume ──▶ publish the start version ──▶ POST /version
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from stretto.config import Config
from stretto.model import checkpoint as huggingface
from stretto.model.spec import ModelSpec
from stretto.records import Batch, encode
from stretto.trainer import checkpoint
from stretto.trainer.client import Orchestrator, OrchestratorError
from stretto.trainer.mismatch import HeldVersions, measure
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.publishing import Publishing, companion_files, new_chain
from stretto.trainer.samples import BatchError, Geometry, Prepared, prepare
from stretto.trainer.schedule import learning_rate
from stretto.trainer.step import Distribution, StepReport, learn
from stretto.trainer.stopping import Stopped, StopRequest
from stretto.watch.metrics import Metrics
from stretto.weights.publisher import Publisher
from stretto.weights.store import Store

REJECTED_IN_A_ROW = 3
LOADERS = 8
PATIENCE_SECONDS = 30.0
"""After so long without a batch, and each time again, an event says what is being waited for."""


class TrainerError(RuntimeError):
    """A sentence: why training cannot go on."""


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
        self.distribution = Distribution(config.rollouts.temperature, config.rollouts.top_p)
        resumed = checkpoint.latest(self.checkpoints)
        source = resumed or config.model.folder
        self.files = companion_files(source)
        self.model = huggingface.load(source)
        self.optimizer = MasterAdamW(self.model, config.trainer.betas, config.trainer.weight_decay)
        self.version = 0
        if resumed is not None:
            self.version = checkpoint.version_of(resumed)
            checkpoint.restore(resumed, self.optimizer)
        self.saved = self.version if resumed is not None else -1
        self.held = HeldVersions(self.optimizer, keep=config.rollouts.max_staleness + 2)
        self.geometry = geometry(self.model.spec)
        self.rejected = 0
        self.chain = new_chain(self.store, config.run.name)
        publisher = Publisher(self.store, self.chain, self.files, config.weights.anchor_every, metrics)
        self.publishing = Publishing(publisher, orchestrator, metrics)
        self._loaders = ThreadPoolExecutor(max_workers=LOADERS, thread_name_prefix="load")

    def run(self) -> None:
        steps = self.config.trainer.steps
        try:
            self.publishing.first(self.model, self.version, self.chain)
            self.metrics.log("event", text=f"training starts from version {self.version} on chain {self.chain}")
            self._hold()
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
            prepared = self._load(batch)
        lr = learning_rate(self.version, self.config.trainer)
        with self._span("compute", seconds, busy=True):
            report = learn(
                self.model,
                self.optimizer,
                prepared.samples,
                self.config.trainer,
                self.distribution,
                lr,
                self.stop.check,
            )
        if not report.finite:
            self._reject(batch)
        else:
            self.rejected = 0
        self.version += 1
        with self._span("publish", seconds):
            self.publishing.submit(self.model, self.version)
        self._hold()
        self._log(batch, prepared, report, lr, seconds)
        every = self.config.trainer.mismatch_every
        if every and self.version % every == 0:
            self._measure(batch, prepared)

    def save(self) -> None:
        """Checkpoint the present version once it is committed, so that a resumed run never is ahead of the ledger."""
        self.publishing.wait()
        if self.saved == self.version:
            return
        checkpoint.save(
            self.checkpoints,
            self.version,
            self.model,
            self.optimizer,
            files=self.files,
            keep=self.config.trainer.keep_checkpoints,
        )
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

    def _load(self, batch: Batch) -> Prepared:
        return prepare(
            batch,
            self._payloads(batch),
            self.geometry,
            max_staleness=self.config.rollouts.max_staleness,
            replay=self.config.trainer.replay,
            normalizer=self.config.trainer.normalizer,
            budget=self.config.harness.max_tokens,
        )

    def _payloads(self, batch: Batch) -> Sequence[bytes]:
        def get(key: str) -> bytes | None:
            try:
                return self.store.get(key)
            except KeyError:
                return None

        payloads = list(self._loaders.map(get, [item.key for item in batch.items]))
        for item, data in zip(batch.items, payloads, strict=True):
            if data is None:
                raise BatchError(f"rollout {item.rollout}: the store holds no payload {item.key}")
        return [data for data in payloads if data is not None]

    def _reject(self, batch: Batch) -> None:
        folder = self.run_dir / "rejected" / f"v{batch.version:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "batch.msgpack").write_bytes(encode(batch))
        for item, data in zip(batch.items, self._payloads(batch), strict=True):
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
            values = measure(self.model, self.held, prepared.samples, batch.version, self.distribution, budget)
            self.metrics.log("mismatch", version=self.version, **values)

    def _hold(self) -> None:
        if self.config.trainer.mismatch_every:
            self.held.add(self.version)

    def _log(self, batch: Batch, prepared: Prepared, report: StepReport, lr: float, seconds: dict[str, float]) -> None:
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
            lr=lr,
            entropy=report.entropy,
            ratio_mean=report.ratio_mean,
            ratio_max=report.ratio_max,
            clipped=report.clipped,
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


def geometry(spec: ModelSpec) -> Geometry:
    layers, per_token = spec.route_shape
    return Geometry(vocab=spec.vocab_size, layers=layers, experts=spec.experts, per_token=per_token)
