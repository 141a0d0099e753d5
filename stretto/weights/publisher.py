"""The trainer's side: turn named tensors into the next version of a chain.

    publisher = Publisher(store, "run1-0", files)          one per chain; it creates the chain
    publisher.publish(0, tensors)                          anchor
    publisher.submit(1, tensors)                           delta, in the background; training goes on
    publisher.wait()                                       raises what went wrong

The baseline of a delta is the bytes last published, never weights held elsewhere. Every delta is against it, so a
publisher that falls behind drops the versions in between and sends one larger delta. A new anchor for late joiners is
added after HEAD has moved: nobody waits for it. A restarted trainer takes a new chain id; nothing is ever overwritten.

Left out: several ranks, each with the tensors it owns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from stretto.weights import chain as chains
from stretto.weights import codec
from stretto.weights.chain import Blob, ChainLost, Frame, Head, Link, Manifest, Metadata, TensorInfo
from stretto.weights.state import bits, tensor_hash
from stretto.weights.store import Store
from stretto.weights.tensorfile import count_nonfinite, default_tag, pack

if TYPE_CHECKING:
    from stretto.watch.metrics import Metrics

FRAME_ELEMENTS = 1 << 22
"""Small tensors are coded together up to this size: an expert by itself is too little to learn statistics from."""

OBJECT_BYTES = 64 << 20
"""A delta object is closed when it holds so much, so that readers can fetch several at once."""


class NonFiniteError(ValueError):
    """The weights hold infinities or NaNs; such a version never appears."""


@dataclass(frozen=True)
class Published:
    """What became of one version. `bytes` is what a follower fetches for it, manifest included."""

    version: int
    form: str  # "anchor" or "delta"
    bytes: int
    bytes_full: int
    changed: float  # share of elements that differ from the previous published version; 1 for the first
    seconds: float


@dataclass(frozen=True)
class _State:
    """Our own copy of one version: tensors in the order of the layout."""

    version: int
    layout: list[TensorInfo]
    arrays: list[np.ndarray]
    metadata: Metadata


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
    ) -> None:
        if anchor_every < 1:
            raise ValueError(f"anchor_every is {anchor_every}: use 1 or more")
        if chains.MODEL_FILE in files:
            raise ValueError(f"files holds {chains.MODEL_FILE}, which the publisher writes: leave it out")
        found = chains.read_head(store, chain)
        if found is not None:
            raise ChainLost(
                f"chain {chain} exists in {store.url}, at version {found[0].version}: "
                "give a new chain id, a chain is never overwritten"
            )
        self._store, self._chain, self._files = store, chain, dict(files)
        self._anchor_every, self._metrics, self._tags = anchor_every, metrics, dict(tags or {})
        self._layout_blob: Blob | None = None
        self._baseline: _State | None = None
        self._baseline_hashes: list[bytes] = []
        self._head: Head | None = None
        self._head_tag: str | None = None
        self._since_anchor = 0
        # The background: `_pending` is the newest state not yet begun; a newer one replaces it.
        self._changed = threading.Condition()
        self._pending: _State | None = None
        self._busy = False
        self._error: Exception | None = None
        self._done: list[Published] = []
        self._thread: threading.Thread | None = None

    def publish(self, version: int, tensors: Mapping[str, np.ndarray], metadata: Metadata | None = None) -> Published:
        """Publish now; returns when HEAD shows the version.

        Raises NonFiniteError (nothing is published), ValueError (tensors differ in name, dtype or shape from the
        version before, or the version does not grow), ChainLost (another publisher), StoreError.
        """
        state = self._snapshot(version, tensors, metadata)
        self.wait()
        return self._publish(state)

    def submit(self, version: int, tensors: Mapping[str, np.ndarray], metadata: Metadata | None = None) -> None:
        """Publish in the background. The tensors are copied before this returns.

        Raises what `publish` raises about the tensors at once, and any error of an earlier submission.
        """
        state = self._snapshot(version, tensors, metadata)
        with self._changed:
            self._raise_error()
            self._pending = state
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, seconds: float = 600.0) -> list[Published]:
        """Wait for the background; returns what it published since the last call. Raises its error, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._pending is None and not self._busy, seconds):
                raise TimeoutError(f"{self._store.url} took no weights of chain {self._chain} in {seconds:g} s")
            self._raise_error()
            done, self._done = self._done, []
            return done

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None)
                state, self._pending, self._busy = self._pending, None, True
            assert state is not None
            published, failure = None, None
            try:
                published = self._publish(state)
            except Exception as error:  # belongs to whoever calls submit or wait next
                failure = error
            with self._changed:
                self._busy = False
                self._error = self._error or failure
                if published is not None:
                    self._done.append(published)
                self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _snapshot(self, version: int, tensors: Mapping[str, np.ndarray], metadata: Metadata | None) -> _State:
        """Copy, check and order the tensors."""
        if not tensors:
            raise ValueError(f"version {version} has no tensors")
        layout, arrays = [], []
        for name in sorted(tensors):
            array = tensors[name]
            tag = self._tags.get(name) or default_tag(array)
            bad = count_nonfinite(array, tag)
            if bad:
                raise NonFiniteError(
                    f"tensor {name} of version {version} has {bad} values that are infinite or NaN: not published"
                )
            layout.append(TensorInfo(name, tag, array.dtype.itemsize * 8, tuple(array.shape)))
            arrays.append(bits(np.array(array, order="C", copy=True)))
        return _State(version, layout, arrays, dict(metadata or {}))

    def _publish(self, state: _State) -> Published:
        started = time.monotonic()
        hashes = [tensor_hash(array) for array in state.arrays]
        root = chains.layout_root(state.layout, hashes)
        if self._baseline is None:
            self._layout_blob = self._write_layout(state.layout)
            manifest = self._write_anchor(state, hashes, root)
        else:
            _check_successor(self._baseline, state)
            manifest = self._write_delta(self._baseline, state, hashes, root)
        link = self._write_manifest(manifest)
        self._move_head(state.version, root, link)
        self._baseline, self._baseline_hashes = state, hashes
        published = self._report(manifest, link, started)
        self._since_anchor += 1
        if self._since_anchor > self._anchor_every:
            started = time.monotonic()
            manifest = self._write_anchor(state, hashes, root)
            link = self._write_manifest(manifest)
            self._move_head(state.version, root, link)
            self._report(manifest, link, started)
            self._since_anchor = 1
        return published

    def _write_layout(self, layout: list[TensorInfo]) -> Blob:
        data = chains.dump(layout)
        return chains.write_new(self._store, f"{self._prefix}/layouts/{chains.digest(data)[:16]}.json", data)

    def _write_anchor(self, state: _State, hashes: list[bytes], root: str) -> Manifest:
        names = [info.name for info in state.layout]
        weights = pack(dict(zip(names, state.arrays, strict=True)), {info.name: info.tag for info in state.layout})
        folder = f"{self._prefix}/anchors/{state.version:06d}-{root[:16]}"
        files = {**self._files, chains.MODEL_FILE: weights}
        objects = [chains.write_new(self._store, f"{folder}/{name}", data) for name, data in files.items()]
        return self._manifest("anchor", state, hashes, root, objects=objects, changed=_elements(state))

    def _write_delta(self, old: _State, new: _State, hashes: list[bytes], root: str) -> Manifest:
        name = f"{new.version:06d}-from-{old.version:06d}-{root[:16]}"
        objects: list[Blob] = []
        frames: list[Frame] = []
        body = bytearray()
        changed = 0

        def close() -> None:
            key = f"{self._prefix}/deltas/{name}/{len(objects)}"
            objects.append(chains.write_new(self._store, key, bytes(body)))
            body.clear()

        for first, last in group(new.layout):
            old_N, new_N = join(old.arrays[first:last]), join(new.arrays[first:last])
            changed += int(np.count_nonzero(old_N != new_N))
            data = codec.encode(old_N, new_N)
            frames.append(Frame(len(objects), len(body), len(data), first, last))
            body += data
            if len(body) >= OBJECT_BYTES:
                close()
        if body:
            close()
        return self._manifest("delta", new, hashes, root, objects=objects, frames=frames, changed=changed)

    def _manifest(
        self,
        kind: str,
        state: _State,
        hashes: list[bytes],
        root: str,
        objects: list[Blob],
        changed: int,
        frames: list[Frame] | None = None,
    ) -> Manifest:
        old = self._baseline if kind == "delta" else None
        assert self._layout_blob is not None
        return Manifest(
            format=chains.FORMAT,
            chain=self._chain,
            version=state.version,
            kind=kind,
            parent=None if old is None else old.version,
            parent_root=None if old is None else chains.layout_root(old.layout, self._baseline_hashes),
            root=root,
            layout=self._layout_blob,
            hashes=b"".join(hashes),
            objects=objects,
            frames=frames or [],
            changed=changed,
            elements=_elements(state),
            bytes_full=sum(array.nbytes for array in state.arrays),
            metadata=state.metadata,
        )

    def _write_manifest(self, manifest: Manifest) -> Link:
        data = chains.dump(manifest)
        origin = "anchor" if manifest.parent is None else f"from-{manifest.parent:06d}"
        key = f"{self._prefix}/manifests/{manifest.version:06d}-{origin}-{chains.digest(data)[:16]}.json"
        blob = chains.write_new(self._store, key, data)
        size = blob.size + sum(wanted.size for wanted in manifest.wanted)
        return Link(manifest.version, manifest.parent, size, blob)

    def _move_head(self, version: int, root: str, link: Link) -> None:
        links = _recent([*(self._head.links if self._head else []), link])
        head = Head(format=chains.FORMAT, chain=self._chain, version=version, root=root, links=links)
        self._head_tag = chains.move_head(self._store, head, self._head_tag)
        self._head = head

    def _report(self, manifest: Manifest, link: Link, started: float) -> Published:
        published = Published(
            version=manifest.version,
            form=manifest.kind,
            bytes=link.bytes,
            bytes_full=manifest.bytes_full,
            changed=manifest.changed / max(1, manifest.elements),
            seconds=time.monotonic() - started,
        )
        if self._metrics is not None:
            self._metrics.log("publish", **asdict(published))
        return published

    @property
    def _prefix(self) -> str:
        return f"weights/{self._chain}"


def group(layout: list[TensorInfo]) -> list[tuple[int, int]]:
    """Ranges of neighbours of equal width that are coded as one, up to FRAME_ELEMENTS (a larger tensor is alone)."""
    ranges: list[tuple[int, int]] = []
    elements = 0
    for index, info in enumerate(layout):
        size = int(np.prod(info.shape, dtype=np.int64))
        if ranges and layout[index - 1].bits == info.bits and elements + size <= FRAME_ELEMENTS:
            ranges[-1] = (ranges[-1][0], index + 1)
            elements += size
        else:
            ranges.append((index, index + 1))
            elements = size
    return ranges


def join(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _elements(state: _State) -> int:
    return sum(array.size for array in state.arrays)


def _recent(links: list[Link]) -> list[Link]:
    """Links back to the last anchor but one: whoever is further behind takes an anchor anyway."""
    anchors = [link.version for link in links if link.parent is None]
    oldest = anchors[-2:][0]
    return [link for link in links if link.version > oldest or (link.version == oldest and link.parent is None)]


def _check_successor(old: _State, new: _State) -> None:
    if new.version <= old.version:
        raise ValueError(f"version {new.version} cannot follow version {old.version}: versions grow")
    if new.layout == old.layout:
        return
    before, after = {info.name: info for info in old.layout}, {info.name: info for info in new.layout}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise ValueError(
                f"tensor {name} was {_describe(before.get(name))} in version {old.version} and is "
                f"{_describe(after.get(name))} in version {new.version}: start a new chain when the model changes"
            )


def _describe(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.tag} {list(info.shape)}"
