"""The trainer's side: turn named tensors into the next version of a chain.

    publisher = Publisher(store, "run1-0", files)          one per chain; it creates the chain
    publisher.publish(0, tensors)                          anchor
    publisher.submit(1, tensors)                           delta, in the background; training goes on
    publisher.wait()                                       raises what went wrong

The baseline of a delta is the bytes last published, never weights held elsewhere (`baseline.py`). Every delta is
against it, so a publisher that falls behind drops the versions in between and sends one larger delta. What only late
readers need (a new anchor, a skip delta) is added after HEAD has moved: nobody waits for it. A restarted trainer goes
on with its chain if it holds the very bits that HEAD names (`go_on`), and takes a new chain id otherwise; nothing is
ever overwritten.

Memory: the baseline, one copy of the weights; of versions on their way what changed; and the frames being encoded or
the anchor's file being written. Several ranks, each with the tensors it owns, publish together (`ranks.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from stretto.records import Canary
from stretto.weights import baseline as baselines
from stretto.weights import chain as chains
from stretto.weights import codec, frames
from stretto.weights.baseline import Baseline, Fresh, Given, NonFiniteError, Staged, check_successor
from stretto.weights.chain import ChainError, ChainLost, Link, Manifest, Metadata, TensorInfo
from stretto.weights.collect import collect
from stretto.weights.frames import Since, join
from stretto.weights.patchfile import Change
from stretto.weights.ranks import Alone
from stretto.weights.store import Store, StoreError
from stretto.weights.writer import Whole, Writer

if TYPE_CHECKING:
    from stretto.watch.metrics import Metrics

__all__ = ["Forked", "NonFiniteError", "Published", "Publisher"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Forked(ChainError):
    """What this publisher holds is not what the chain's HEAD names: it must not write there."""


@dataclass(frozen=True)
class Published:
    """What became of one version. `bytes` is what a follower fetches for it, manifest included."""

    version: int
    form: str  # "anchor", "delta" or "skip"
    bytes: int
    bytes_full: int
    changed: float  # share of elements that differ from the previous published version; 1 for the first
    seconds: float


@dataclass(frozen=True)
class _Pending:
    """A version that waits for the background: what differs from the baseline."""

    version: int
    layout: list[TensorInfo]
    changes: list[Change | None]
    metadata: Metadata
    canary: Canary | None


class Publisher:
    """Owns one chain. Methods may be called from one thread; `submit` uses a thread of its own.

    `files` go into each anchor beside the weights (config.json, tokenizer files), so that it loads anywhere. `tags`
    names the dtype of tensors for which the array's own does not say it (fp8 as uint8); uint16 is BF16.
    """

    def __init__(
        self,
        store: Store,
        chain: str,
        files: Mapping[str, bytes],
        anchor_every: int = 20,
        metrics: Metrics | None = None,
        tags: Mapping[str, str] | None = None,
        ranks: Alone | None = None,
        *,
        _new: bool = True,
    ) -> None:
        if anchor_every < 1:
            raise ValueError(f"anchor_every is {anchor_every}: use 1 or more")
        if chains.MODEL_FILE in files:
            raise ValueError(f"files holds {chains.MODEL_FILE}, which the publisher writes: leave it out")
        found = chains.read_head(store, chain) if _new else None
        if found is not None:
            raise ChainLost(
                f"chain {chain} exists in {store.url}, at version {found[0].version}: "
                "give a new chain id, a chain is never overwritten"
            )
        threading.Thread(target=codec.warm_up, name="codec", daemon=True).start()
        self._ranks = ranks or Alone()
        self._writer = Writer(store, chain, files, self._ranks)
        self._anchor_every, self._metrics, self._tags = anchor_every, metrics, dict(tags or {})
        self._baseline: Baseline | None = None
        self._root = ""  # of the baseline, over all ranks
        self._since = Since(-1, "")  # the way back to the base of the next skip
        self._skipping = True
        # The background: `_pending` is the newest version not yet begun; a newer one replaces it.
        self._memory = threading.Lock()  # the baseline's tensors are written, or compared with
        self._changed = threading.Condition()
        self._pending: _Pending | None = None
        self._busy = False
        self._error: Exception | None = None
        self._done: list[Published] = []
        self._thread: threading.Thread | None = None

    @classmethod
    def go_on(
        cls,
        store: Store,
        chain: str,
        files: Mapping[str, bytes],
        tensors: Mapping[str, np.ndarray],
        anchor_every: int = 20,
        metrics: Metrics | None = None,
        tags: Mapping[str, str] | None = None,
        ranks: Alone | None = None,
    ) -> Publisher:
        """Take over a chain whose publisher is gone; `tensors` are the version that HEAD names.

        Raises Forked when they are not, bit for bit, and when there is no such chain. A publisher that is alive after
        all loses the chain when this one moves HEAD.
        """
        found = chains.read_head(store, chain)
        if found is None:
            raise Forked(f"there is no chain {chain} in {store.url}")
        publisher = cls(store, chain, files, anchor_every, metrics, tags, ranks, _new=False)
        head, writer = found[0], publisher._writer
        layout, changes = publisher._compare(head.version, tensors)
        baseline = _whole_copy(head.version, layout, changes)
        whole = writer.whole(head.version, layout, baseline.arrays, {}, None)
        if whole.root != head.root:
            raise Forked(
                f"version {head.version} as it was made again (fingerprint {whole.root[:16]}) is not the one that "
                f"chain {chain} holds ({head.root[:16]})"
            )
        writer.begin(whole.layout)
        writer.head, writer.head_tag = found
        publisher._baseline, publisher._root = baseline, head.root
        publisher._since = Since(head.version, head.root)
        return publisher

    def publish(
        self,
        version: int,
        tensors: Mapping[str, np.ndarray],
        metadata: Metadata | None = None,
        canary: Canary | None = None,
    ) -> Published:
        """Publish now; returns when HEAD shows the version. The tensors must not change until then.

        Raises NonFiniteError (nothing is published), ValueError (tensors differ in name, dtype or shape from the
        version before, or the version does not grow), ChainLost (another publisher), StoreError.
        """
        layout, arrays = self._checked(version, lambda: baselines.examine(version, tensors, self._tags))
        self.wait()
        old = self._baseline
        if old is None:
            first = Baseline(version, layout, [array.copy() for array in arrays])
            return self._publish(version, layout, None, first, dict(metadata or {}), canary)
        check_successor(old, version, layout)
        return self._publish(version, layout, Given(old, arrays), old, dict(metadata or {}), canary)

    def submit(
        self,
        version: int,
        tensors: Mapping[str, np.ndarray],
        metadata: Metadata | None = None,
        canary: Canary | None = None,
    ) -> None:
        """Publish in the background. What differs from the version before is copied before this returns; tensors are
        taken out of the mapping one at a time.

        Raises what `publish` raises about the tensors at once, and any error of an earlier submission.
        """
        with self._changed:
            self._raise_error()
        with self._memory:
            layout, changes = self._compare(version, tensors)
            with self._changed:
                self._raise_error()
                self._pending = _Pending(version, layout, changes, dict(metadata or {}), canary)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def wait(self, seconds: float = 600.0) -> list[Published]:
        """Wait for the background; returns what it published since the last call. Raises its error, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._pending is None and not self._busy, seconds):
                writer = self._writer
                raise TimeoutError(f"{writer.store.url} took no weights of chain {writer.chain} in {seconds:g} s")
            self._raise_error()
            done, self._done = self._done, []
            return done

    def _compare(self, version: int, tensors: Mapping[str, np.ndarray]) -> tuple[list[TensorInfo], list[Change | None]]:
        old = self._baseline
        return self._checked(version, lambda: baselines.compare(version, tensors, self._tags, old))

    def _checked(self, version: int, look: Callable[[], _T]) -> _T:
        """Look at a version's tensors; the other ranks hear at once that there is something wrong with them."""
        try:
            return look()
        except ValueError as error:
            self._ranks.fail(f"{version:06d}-tensors", str(error))
            raise

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None)
            with self._memory, self._changed:
                pending, self._pending, self._busy = self._pending, None, True
                assert pending is not None
            published, failure = None, None
            try:
                published = self._take(pending)
            except Exception as error:  # belongs to whoever calls submit or wait next
                failure = error
            with self._changed:
                self._busy = False
                self._error = self._error or failure
                if failure is not None:
                    self._pending = None  # it was compared with what did not come to be
                if published is not None:
                    self._done.append(published)
                self._changed.notify_all()
            del pending
            if failure is not None:
                return

    def _take(self, new: _Pending) -> Published:
        old = self._baseline
        if old is None:
            first = _whole_copy(new.version, new.layout, new.changes)
            return self._publish(new.version, new.layout, None, first, new.metadata, new.canary)
        check_successor(old, new.version, new.layout)
        with self._memory:
            staged = Staged(old, new.changes)
        new.changes.clear()
        return self._publish(new.version, new.layout, staged, old, new.metadata, new.canary)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _publish(
        self,
        version: int,
        layout: list[TensorInfo],
        fresh: Fresh | None,
        old: Baseline,
        metadata: Metadata,
        canary: Canary | None,
    ) -> Published:
        """A delta of `fresh` over `old`, or, where there is nothing `fresh`, the chain's first anchor of `old`."""
        started = time.monotonic()
        arrays = old.arrays if fresh is None else fresh.arrays
        try:
            whole = self._writer.whole(version, layout, arrays, metadata, canary)
            if fresh is None:
                self._writer.begin(whole.layout)
                manifest = self._writer.anchor(layout, arrays, whole)
            else:
                manifest = self._delta(fresh, old, whole)
            frames.give_back()
            link = self._writer.commit(manifest)
        except BaseException:
            self._since.drop()
            if fresh is not None:
                with self._memory:
                    fresh.reject()
            raise
        published = self._report(manifest, link, started)
        with self._memory:
            if fresh is not None:
                fresh.accept()
            self._baseline, self._root = Baseline(version, layout, old.arrays), whole.root
        self._since.keep()
        if self._since.version < 0:
            self._since = Since(version, whole.root)
        self._for_late_readers(whole)
        frames.give_back()
        return published

    def _delta(self, fresh: Fresh, old: Baseline, whole: Whole) -> Manifest:
        def one(number: int, first: int, last: int) -> tuple[bytes, int]:
            old_N, new_N = fresh.frame(first, last)
            changed = int(np.count_nonzero(old_N != new_N))
            if self._skipping and changed:
                self._since.note(number, old_N, new_N)
            return codec.encode(old_N, new_N, threads=frames.threads_inside(old_N.size)), changed

        return self._writer.delta("delta", old.version, self._root, whole, old.layout, one)

    def _skip(self, now: Baseline, whole: Whole) -> Manifest:
        base = self._since

        def one(number: int, first: int, last: int) -> tuple[bytes, int]:
            now_N = join(now.arrays[first:last])
            then_N = base.before(number, now_N)
            changed = int(np.count_nonzero(then_N != now_N))
            return codec.encode(then_N, now_N, threads=frames.threads_inside(now_N.size)), changed

        return self._writer.delta("skip", base.version, base.root, whole, now.layout, one)

    def _for_late_readers(self, whole: Whole) -> None:
        """A skip delta or an anchor, when one is due; then delete what no reader needs any more."""
        writer, now = self._writer, self._baseline
        assert writer.head is not None and now is not None
        started, links = time.monotonic(), writer.head.links
        self._skipping = self._skipping and not chains.dense(links, self._since.version)
        if not self._skipping:
            self._since.forget()
        if self._skipping and chains.skip_due(links, self._since.version):
            manifest = self._skip(now, whole)
            deltas = sum(link.bytes for link in links if link.version > self._since.version and link.form == "delta")
            if sum(blob.size for blob in manifest.objects) < deltas:
                self._report(manifest, writer.commit(manifest), started)
        if len([link for link in links if link.version > self._since.version and link.form == "delta"]) >= chains.SKIP:
            self._since, self._skipping = Since(whole.version, whole.root), True
        if chains.anchor_due(writer.head.links, self._anchor_every):
            started = time.monotonic()
            manifest = writer.anchor(now.layout, now.arrays, whole)
            self._report(manifest, writer.commit(manifest), started)
            if self._ranks.rank == 0:
                self._collect()

    def _collect(self) -> None:
        writer = self._writer
        try:
            collect(writer.store, writer.chain)
        except (ChainError, StoreError, OSError) as error:  # the next anchor's turn; nobody needs the room now
            log.warning("old versions of chain %s were not deleted: %s", writer.chain, error)
            if self._metrics is not None:
                self._metrics.log("event", text=f"old versions of chain {writer.chain} were not deleted: {error}")

    def _report(self, manifest: Manifest, link: Link, started: float) -> Published:
        published = Published(
            version=manifest.version,
            form=manifest.kind,
            bytes=link.bytes,
            bytes_full=manifest.bytes_full,
            changed=manifest.changed / max(1, manifest.elements),
            seconds=time.monotonic() - started,
        )
        if self._metrics is not None and self._ranks.rank == 0:
            self._metrics.log("publish", **asdict(published))
        return published


def _whole_copy(version: int, layout: list[TensorInfo], changes: list[Change | None]) -> Baseline:
    """A baseline of changes that are all whole tensors, which it takes over."""
    arrays = [
        change.values.reshape(info.shape) if change is not None else np.zeros(info.shape, f"<u{info.bits // 8}")
        for info, change in zip(layout, changes, strict=True)
    ]
    return Baseline(version, layout, arrays)
