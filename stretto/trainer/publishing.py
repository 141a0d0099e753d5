"""From trained weights to a committed version, beside the next step.

    trainer thread:      copy out what changed, ask the canary ──▶ next batch, next step ...
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

import torch

from stretto.model import served
from stretto.model.attention import PackedCausal
from stretto.model.checkpoint import TOKENIZER_FILES, named_tensors
from stretto.model.logprobs import token_logprobs
from stretto.model.spec import CONFIG
from stretto.model.transformer import Transformer
from stretto.records import Canary
from stretto.trainer.client import Orchestrator
from stretto.watch.metrics import Metrics
from stretto.weights.publisher import Publisher
from stretto.weights.store import Store

CANARY_TOKENS = 24


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
        dtype: str = "bf16",
    ) -> None:
        """`dtype` is `weights.serve_dtype`."""
        self.chain = ""
        self._store, self._run, self._anchor_every, self._dtype = store, run, anchor_every, dtype
        config = {name: served.config_of(data, dtype) for name, data in files.items() if name == CONFIG}
        self._files = {**files, **config}
        self._publisher: Publisher | None = None
        self._orchestrator = orchestrator
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing")
        self._pending: Future[None] | None = None

    def first(self, model: Transformer, version: int) -> None:
        """Publish the version training starts from as the anchor of a new chain, and announce it. Blocks."""
        self.chain = new_chain(self._store, self._run)
        args = (self._store, self.chain, self._files, self._anchor_every, self._metrics, self._tags(model))
        self._publisher = Publisher(*args)
        start = time.time()
        self._publisher.submit(version, self._bits(model), canary=canary(model))
        self._publisher.wait()
        self._metrics.log("busy", start=start, end=time.time(), what="publish")
        self._orchestrator.set_version(version, self.chain)

    def go_on(self, model: Transformer, version: int, chain: str) -> None:
        """Go on with `chain`, whose HEAD is `version`, and commit that in case the start before us could not. Blocks.

        Raises Forked when the model is not that version, bit for bit.
        """
        args = (self._store, chain, self._files, self._bits(model), self._anchor_every, self._metrics)
        self._publisher = Publisher.go_on(*args, tags=self._tags(model))
        self.chain = chain
        if version:
            self._orchestrator.trained(version - 1)

    def submit(self, model: Transformer, version: int) -> None:
        """Copy out what `version`, made by batch `version - 1`, has changed; the rest is background work."""
        self.wait()
        assert self._publisher is not None, "a chain is begun before versions are published"
        self._publisher.submit(version, self._bits(model), canary=canary(model))
        self._pending = self._thread.submit(self._commit, version)

    def wait(self) -> None:
        """Until the last submitted version is committed; raises what went wrong in the background, each time again."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _commit(self, version: int) -> None:
        assert self._publisher is not None
        start = time.time()
        self._publisher.wait()
        self._metrics.log("busy", start=start, end=time.time(), what="publish")
        self._orchestrator.trained(version - 1)

    def _bits(self, model: Transformer) -> served.Bits:
        return served.Bits(named_tensors(model), self._dtype)

    def _tags(self, model: Transformer) -> dict[str, str]:
        return served.tags(self._bits(model))


@torch.no_grad()
def canary(model: Transformer) -> Canary:
    """What the trainer says of a few fixed tokens: whoever serves these weights must say the same."""
    count = min(CANARY_TOKENS, model.spec.max_positions)
    ids_T = torch.arange(1, count + 1) * 7919 % model.spec.vocab_size
    hidden_TD = model(ids_T, torch.arange(count), PackedCausal([count])).hidden_TD
    logprobs_N, _ = token_logprobs(model, hidden_TD[:-1], ids_T[1:], 1.0)
    return Canary(ids=ids_T.tolist(), logprobs=logprobs_N.tolist())


def new_chain(store: Store, run: str) -> str:
    """A chain name no start of this run has used: `<run>-0`, `<run>-1`, ... Two starts never write into one chain."""
    pattern = re.compile(rf"weights/{re.escape(run)}-(\d+)/")
    used = [int(match[1]) for key in store.list("weights") if (match := pattern.match(key))]
    return f"{run}-{max(used, default=-1) + 1}"


def companion_files(source: Path) -> dict[str, bytes]:
    """What a checkpoint folder holds besides weights (config.json, tokenizer): goes into anchors and exports."""
    paths = [source / name for name in ("config.json", *TOKENIZER_FILES)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}
