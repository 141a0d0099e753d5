"""The trainer's side: turn named tensors into the next version of a chain.

    publisher = Publisher(store, "run1-0", files)          one per chain; it creates the chain
    publisher.publish(0, tensors)                          anchor
    publisher.submit(1, tensors)                           delta, in the background; training goes on
    publisher.wait()                                       raises what went wrong

The baseline of a delta is the bytes last published, never weights held elsewhere. Every delta is against it, so a
publisher that falls behind drops the versions in between and sends one larger delta. What only late readers need (a
new anchor, a skip delta) is added after HEAD has moved: nobody waits for it. A restarted trainer goes on with its chain
if it holds the very bits that HEAD names (`go_on`), and takes a new chain id otherwise; nothing is ever overwritten.

Memory: the baseline, and the frames being encoded or the anchor's file being written. With `submit` also the tensors on
their way, and one set that waits. Several ranks, each with the tensors it owns, publish together (`ranks.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stretto.weights import chain as chains
from stretto.weights import codec, frames
from stretto.weights.chain import Blob, ChainError, ChainLost, Frame, Head, Link, Manifest, Metadata, TensorInfo
from stretto.weights.collect import collect
from stretto.weights.frames import Since, group, in_order, join
from stretto.weights.ranks import Alone
from stretto.weights.state import bits, tensor_hash
from stretto.weights.store import Store, StoreError
from stretto.weights.tensorfile import count_nonfinite, default_tag, index, pack, shards

if TYPE_CHECKING:
    from stretto.watch.metrics import Metrics

OBJECT_BYTES = 64 << 20
"""A delta object is closed when it holds so much, so that readers can fetch several at once."""

ANCHOR_BYTES = 256 << 20
"""An anchor's files hold so much each; a larger tensor is alone in its file."""

log = logging.getLogger(__name__)


_Encode = Callable[[int, int, int], tuple[bytes, int]]


class Forked(ChainError):
    """What this publisher holds is not what the chain's HEAD names: it must not write there."""


class NonFiniteError(ValueError):
    """The weights hold infinities or NaNs; such a version never appears."""


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
class _State:
    """One version of the tensors that this rank owns, in the order of its layout."""

    version: int
    layout: list[TensorInfo]
    arrays: list[np.ndarray]
    metadata: Metadata
    ours: bool  # the arrays are a copy that nobody else writes to


class _Tensors(msgspec.Struct, frozen=True):
    """What one rank says about its tensors before anything is written."""

    layout: list[TensorInfo]
    hashes: bytes


class _Part(msgspec.Struct, frozen=True):
    """What one rank wrote for a version."""

    objects: list[Blob]
    frames: list[Frame] = []
    changed: int = 0
    files: dict[str, str] = {}  # of an anchor: tensor -> file


@dataclass(frozen=True)
class _Whole:
    """A version over all ranks."""

    version: int
    layout: list[TensorInfo]
    hashes: list[bytes]
    root: str
    at: dict[str, int]  # tensor -> index in the layout
    metadata: Metadata

    @property
    def nbytes(self) -> int:
        return sum(_elements(info) * info.bits // 8 for info in self.layout)


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
        self._store, self._chain, self._files = store, chain, dict(files)
        self._anchor_every, self._metrics, self._tags = anchor_every, metrics, dict(tags or {})
        self._ranks = ranks or Alone()
        self._layout_blob: Blob | None = None
        self._baseline: _State | None = None
        self._root = ""  # of the baseline, over all ranks
        self._since = Since(-1, "")  # what changed since the base of the next skip
        self._skipping = True
        self._head: Head | None = None
        self._head_tag: str | None = None
        # The background: `_pending` is the newest state not yet begun; a newer one replaces it.
        self._changed = threading.Condition()
        self._pending: _State | None = None
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
        head, publisher._head_tag = found
        state = publisher._snapshot(head.version, tensors, None, copy=True)
        whole = publisher._whole(state)
        if whole.root != head.root:
            raise Forked(
                f"version {head.version} as it was made again (fingerprint {whole.root[:16]}) is not the one that "
                f"chain {chain} holds ({head.root[:16]})"
            )
        publisher._layout_blob = publisher._write_layout(whole.layout)
        publisher._baseline, publisher._root, publisher._head = state, head.root, head
        publisher._since = Since(head.version, head.root)
        return publisher

    def publish(self, version: int, tensors: Mapping[str, np.ndarray], metadata: Metadata | None = None) -> Published:
        """Publish now; returns when HEAD shows the version. The tensors must not change until then.

        Raises NonFiniteError (nothing is published), ValueError (tensors differ in name, dtype or shape from the
        version before, or the version does not grow), ChainLost (another publisher), StoreError.
        """
        state = self._snapshot(version, tensors, metadata, copy=False)
        self.wait()
        return self._publish(state)

    def submit(self, version: int, tensors: Mapping[str, np.ndarray], metadata: Metadata | None = None) -> None:
        """Publish in the background. The tensors are copied before this returns.

        Raises what `publish` raises about the tensors at once, and any error of an earlier submission.
        """
        state = self._snapshot(version, tensors, metadata, copy=True)
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
            del state  # the baseline has what is needed of it

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _snapshot(
        self, version: int, tensors: Mapping[str, np.ndarray], metadata: Metadata | None, copy: bool
    ) -> _State:
        """Check and order the tensors; with `copy`, they are the caller's to change afterwards."""
        layout, arrays = [], []
        try:
            if not tensors:
                raise ValueError(f"version {version} has no tensors")
            for name in sorted(tensors):
                array = tensors[name]
                tag = self._tags.get(name) or default_tag(array)
                bad = count_nonfinite(array, tag)
                if bad:
                    raise NonFiniteError(
                        f"tensor {name} of version {version} has {bad} values that are infinite or NaN: not published"
                    )
                layout.append(TensorInfo(name, tag, array.dtype.itemsize * 8, tuple(array.shape)))
                arrays.append(bits(np.array(array, order="C", copy=True) if copy else array))
        except ValueError as error:
            self._ranks.fail(f"{version:06d}-tensors", str(error))
            raise
        return _State(version, layout, arrays, dict(metadata or {}), copy)

    def _publish(self, state: _State) -> Published:
        started = time.monotonic()
        if self._baseline is not None:
            _check_successor(self._baseline, state)
        whole = self._whole(state)
        if self._baseline is None or self._head is None:
            self._layout_blob = self._write_layout(whole.layout)
            manifest = self._write_anchor(state, whole)
        else:
            manifest = self._write_delta(state, whole)
        frames.give_back()
        link = self._commit(manifest)
        published = self._report(manifest, link, started)
        self._move_baseline(state, whole.root)
        self._for_late_readers(whole)
        frames.give_back()
        return published

    def _whole(self, state: _State) -> _Whole:
        """What all ranks have of this version."""
        hashes = b"".join(in_order(tensor_hash, state.arrays))
        label = f"{state.version:06d}-tensors"
        said = self._ranks.gather(label, msgspec.msgpack.encode(_Tensors(state.layout, hashes)))
        found: dict[str, tuple[TensorInfo, bytes, int]] = {}
        for rank, data in enumerate(said):
            part = msgspec.msgpack.decode(data, type=_Tensors)
            for number, info in enumerate(part.layout):
                if info.name in found:
                    raise ChainError(
                        f"tensor {info.name} of version {state.version} was given by rank {found[info.name][2]} and "
                        f"by rank {rank}: each tensor has one owner"
                    )
                found[info.name] = info, part.hashes[16 * number : 16 * number + 16], rank
        if self._ranks.rank == 0:
            self._ranks.clear(state.version)  # all ranks are here, so none waits for an older version
        names = sorted(found)
        layout, parts = [found[name][0] for name in names], [found[name][1] for name in names]
        root = chains.layout_root(layout, parts)
        return _Whole(state.version, layout, parts, root, {n: i for i, n in enumerate(names)}, state.metadata)

    def _move_baseline(self, state: _State, root: str) -> None:
        if state.ours:
            self._baseline = state
        elif self._baseline is None:
            arrays = [array.copy() for array in state.arrays]
            self._baseline = _State(state.version, state.layout, arrays, state.metadata, True)
        else:
            for ours, theirs in zip(self._baseline.arrays, state.arrays, strict=True):
                np.copyto(ours, theirs)
            self._baseline = _State(state.version, state.layout, self._baseline.arrays, state.metadata, True)
        self._root = root
        if self._since.version < 0:
            self._since = Since(state.version, root)

    def _for_late_readers(self, whole: _Whole) -> None:
        """A skip delta or an anchor, when one is due; then delete what no reader needs any more."""
        assert self._head is not None and self._baseline is not None
        started, links = time.monotonic(), self._head.links
        self._skipping = self._skipping and not chains.dense(links, self._since.version)
        if not self._skipping:
            self._since.forget()
        if self._skipping and chains.skip_due(links, self._since.version):
            manifest = self._write_skip(whole)
            deltas = sum(link.bytes for link in links if link.version > self._since.version and link.form == "delta")
            if sum(blob.size for blob in manifest.objects) < deltas:
                self._report(manifest, self._commit(manifest), started)
        if len([link for link in links if link.version > self._since.version and link.form == "delta"]) >= chains.SKIP:
            self._since, self._skipping = Since(whole.version, whole.root), True
        if chains.anchor_due(self._head.links, self._anchor_every):
            started = time.monotonic()
            manifest = self._write_anchor(self._baseline, whole)
            self._report(manifest, self._commit(manifest), started)
            if self._ranks.rank == 0:
                self._collect()

    def _collect(self) -> None:
        try:
            collect(self._store, self._chain)
        except (ChainError, StoreError, OSError) as error:  # the next anchor's turn; nobody needs the room now
            log.warning("old versions of chain %s were not deleted: %s", self._chain, error)
            if self._metrics is not None:
                self._metrics.log("event", text=f"old versions of chain {self._chain} were not deleted: {error}")

    def _write_layout(self, layout: list[TensorInfo]) -> Blob:
        data = chains.dump(layout)
        return chains.write_new(self._store, f"{self._prefix}/layouts/{chains.digest(data)[:16]}.json", data)

    def _write_anchor(self, state: _State, whole: _Whole) -> Manifest:
        folder = f"{self._prefix}/anchors/{whole.version:06d}-{whole.root[:16]}"
        arrays = {info.name: array for info, array in zip(state.layout, state.arrays, strict=True)}
        tags = {info.name: info.tag for info in state.layout}
        pieces = shards({name: array.nbytes for name, array in arrays.items()}, ANCHOR_BYTES)
        single = self._ranks.world == 1 and len(pieces) == 1
        objects: list[Blob] = []
        files: dict[str, str] = {}
        for number, names in enumerate(pieces):
            file = chains.MODEL_FILE if single else f"model-{self._ranks.rank:05d}-{number:05d}.safetensors"
            data = pack({name: arrays[name] for name in names}, tags)
            objects.append(chains.write_new(self._store, f"{folder}/{file}", data))
            files |= dict.fromkeys(names, file)
        parts = self._parts(f"{whole.version:06d}-anchor", _Part(objects, files=files))
        objects = [blob for part in parts for blob in part.objects]
        if self._ranks.rank == 0:
            beside = dict(self._files)
            if not single:
                everywhere = {name: file for part in parts for name, file in part.files.items()}
                beside["model.safetensors.index.json"] = index(everywhere, whole.nbytes)
            objects += [chains.write_new(self._store, f"{folder}/{name}", data) for name, data in beside.items()]
        return self._manifest("anchor", None, "", whole, objects, [], sum(map(_elements, whole.layout)))

    def _write_delta(self, state: _State, whole: _Whole) -> Manifest:
        assert self._baseline is not None
        old = self._baseline.arrays

        def one(number: int, first: int, last: int) -> tuple[bytes, int]:
            old_N, new_N = join(old[first:last]), join(state.arrays[first:last])
            where = np.flatnonzero(old_N != new_N)
            if self._skipping:
                self._since.note(number, old_N, where)
            return codec.encode(old_N, new_N, threads=frames.threads_inside(old_N.size)), where.size

        return self._write_frames("delta", self._baseline.version, self._root, whole, state, one)

    def _write_skip(self, whole: _Whole) -> Manifest:
        assert self._baseline is not None and self._head is not None
        now, base = self._baseline, self._since

        def one(number: int, first: int, last: int) -> tuple[bytes, int]:
            now_N = join(now.arrays[first:last])
            then_N = base.before(number, now_N)
            changed = int(np.count_nonzero(then_N != now_N))
            return codec.encode(then_N, now_N, threads=frames.threads_inside(now_N.size)), changed

        return self._write_frames("skip", base.version, base.root, whole, now, one)

    def _write_frames(
        self, kind: str, parent: int, parent_root: str, whole: _Whole, state: _State, encode: _Encode
    ) -> Manifest:
        """Objects of a delta; `encode` gives the bytes of a frame and how many of its elements changed."""
        name = f"{whole.version:06d}-from-{parent:06d}-{whole.root[:16]}"
        own = "" if self._ranks.world == 1 else f"{self._ranks.rank}-"
        objects: list[Blob] = []
        coded: list[Frame] = []
        body = bytearray()
        changed = 0

        def close() -> None:
            key = f"{self._prefix}/deltas/{name}/{own}{len(objects)}"
            objects.append(chains.write_new(self._store, key, bytes(body)))
            body.clear()

        ranges = group(state.layout)
        results = in_order(lambda item: encode(item[0], *item[1]), enumerate(ranges))
        for (first, last), (data, count) in zip(ranges, results, strict=True):
            changed += count
            tensors = tuple(whole.at[info.name] for info in state.layout[first:last])
            coded.append(Frame(len(objects), len(body), len(data), tensors))
            body += data
            if len(body) >= OBJECT_BYTES:
                close()
        if body:
            close()
        parts = self._parts(f"{whole.version:06d}-{kind}", _Part(objects, coded, changed))
        objects, coded, changed = [], [], 0
        for part in parts:
            coded += [Frame(len(objects) + f.blob, f.start, f.size, f.tensors) for f in part.frames]
            objects += part.objects
            changed += part.changed
        return self._manifest(kind, parent, parent_root, whole, objects, coded, changed)

    def _parts(self, label: str, mine: _Part) -> list[_Part]:
        """Everything that is written: only when all of it is, rank 0 goes on to the manifest."""
        said = self._ranks.gather(label, msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(data, type=_Part) for data in said]

    def _manifest(
        self,
        kind: str,
        parent: int | None,
        parent_root: str,
        whole: _Whole,
        objects: list[Blob],
        coded: list[Frame],
        changed: int,
    ) -> Manifest:
        assert self._layout_blob is not None
        return Manifest(
            format=chains.FORMAT,
            chain=self._chain,
            version=whole.version,
            kind=kind,
            parent=parent,
            parent_root=parent_root or None,
            root=whole.root,
            layout=self._layout_blob,
            hashes=b"".join(whole.hashes),
            objects=objects,
            frames=coded,
            changed=changed,
            elements=sum(map(_elements, whole.layout)),
            bytes_full=whole.nbytes,
            metadata=whole.metadata,
        )

    def _commit(self, manifest: Manifest) -> Link:
        """Manifest, then HEAD, by rank 0; the other ranks learn of it."""
        data = None
        if self._ranks.rank == 0:
            self._move_head(manifest.version, manifest.root, self._write_manifest(manifest))
            assert self._head is not None
            data = chains.dump(self._head)
        label = f"{manifest.version:06d}-{manifest.kind}-head"
        head: Head = chains.parse(self._ranks.share(label, data), Head, label)
        self._head = head
        return head.links[-1]

    def _write_manifest(self, manifest: Manifest) -> Link:
        data = chains.dump(manifest)
        origin = "anchor" if manifest.parent is None else f"from-{manifest.parent:06d}"
        key = f"{self._prefix}/manifests/{manifest.version:06d}-{origin}-{chains.digest(data)[:16]}.json"
        blob = chains.write_new(self._store, key, data)
        size = blob.size + sum(wanted.size for wanted in manifest.wanted)
        return Link(manifest.version, manifest.parent, size, blob, manifest.kind == "skip")

    def _move_head(self, version: int, root: str, link: Link) -> None:
        links = chains.recent([*(self._head.links if self._head else []), link])
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
        if self._metrics is not None and self._ranks.rank == 0:
            self._metrics.log("publish", **asdict(published))
        return published

    @property
    def _prefix(self) -> str:
        return f"weights/{self._chain}"


def _elements(info: TensorInfo) -> int:
    return int(np.prod(info.shape, dtype=np.int64))


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
