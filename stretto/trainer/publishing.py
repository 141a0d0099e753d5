"""From trained weights to a committed version, beside the next step.

    trainer thread:      copy the bf16 values out ──▶ next batch, next step ...
    publishing thread:              encode, upload, move HEAD ──▶ POST /trained ──▶ metrics

The first start of the trainer begins a chain; a later one goes on with it, for which it must hold the very bits that
HEAD names (`resume.py`). A chain that is lost is followed by a new one.

At most one version is on its way. An error in the background is raised at the next `wait` (hence the next `submit`),
before another version goes out. `/trained` is sent when HEAD has moved, never before: what is committed can be fetched.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from stretto.model.checkpoint import TOKENIZER_FILES, bf16_bits
from stretto.model.transformer import Transformer
from stretto.trainer.client import Orchestrator
from stretto.watch.metrics import Metrics
from stretto.weights.publisher import Publisher
from stretto.weights.store import Store


class Publishing:
    """The trainer's end of the chain of versions."""

    def __init__(
        self,
        store: Store,
        run: str,
        files: dict[str, bytes],
        anchor_every: int,
        orchestrator: Orchestrator,
        metrics: Metrics,
    ) -> None:
        self.chain = ""
        self._store, self._run, self._files, self._anchor_every = store, run, files, anchor_every
        self._publisher: Publisher | None = None
        self._orchestrator = orchestrator
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing")
        self._pending: Future[None] | None = None

    def first(self, model: Transformer, version: int) -> None:
        """Publish the version training starts from as the anchor of a new chain, and announce it. Blocks."""
        self.chain = new_chain(self._store, self._run)
        self._publisher = Publisher(self._store, self.chain, self._files, self._anchor_every, self._metrics)
        self._publish(version, bf16_bits(model))
        self._orchestrator.set_version(version, self.chain)

    def go_on(self, model: Transformer, version: int, chain: str) -> None:
        """Go on with `chain`, whose HEAD is `version`, and commit that in case the start before us could not. Blocks.

        Raises Forked when the model is not that version, bit for bit.
        """
        args = (self._store, chain, self._files, bf16_bits(model), self._anchor_every, self._metrics)
        self._publisher = Publisher.go_on(*args)
        self.chain = chain
        if version:
            self._orchestrator.trained(version - 1)

    def submit(self, model: Transformer, version: int) -> None:
        """Copy out what the model holds as `version`, made by batch `version - 1`; the rest is background work."""
        self.wait()
        self._pending = self._thread.submit(self._publish_and_commit, version, bf16_bits(model))

    def wait(self) -> None:
        """Until the last submitted version is committed; raises what went wrong in the background, each time again."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _publish_and_commit(self, version: int, tensors: dict[str, np.ndarray]) -> None:
        self._publish(version, tensors)
        self._orchestrator.trained(version - 1)

    def _publish(self, version: int, tensors: dict[str, np.ndarray]) -> None:
        assert self._publisher is not None, "a chain is begun before versions are published"
        start = time.time()
        self._publisher.publish(version, tensors)
        self._metrics.log("busy", start=start, end=time.time(), what="publish")


def new_chain(store: Store, run: str) -> str:
    """A chain name no start of this run has used: `<run>-0`, `<run>-1`, ... Two starts never write into one chain."""
    pattern = re.compile(rf"weights/{re.escape(run)}-(\d+)/")
    used = [int(match[1]) for key in store.list("weights") if (match := pattern.match(key))]
    return f"{run}-{max(used, default=-1) + 1}"


def companion_files(source: Path) -> dict[str, bytes]:
    """What a checkpoint folder holds besides weights (config.json, tokenizer): goes into anchors and exports."""
    paths = [source / name for name in ("config.json", *TOKENIZER_FILES)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}
