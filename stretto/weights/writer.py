"""Objects, manifest, HEAD: how a version gets into the store, by one rank or by several together (`ranks.py`).

Nothing here remembers tensors; what it keeps is where the chain stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from stretto.records import Canary
from stretto.weights import chain as chains
from stretto.weights.chain import Blob, ChainError, Frame, Head, Link, Manifest, Metadata, TensorInfo
from stretto.weights.frames import group, in_order
from stretto.weights.ranks import Alone
from stretto.weights.state import tensor_hash
from stretto.weights.store import Store
from stretto.weights.tensorfile import index, pack, shards

OBJECT_BYTES = 64 << 20
"""A delta object is closed when it holds so much, so that readers can fetch several at once."""

ANCHOR_BYTES = 256 << 20
"""An anchor's files hold so much each; a larger tensor is alone in its file."""

Encode = Callable[[int, int, int], tuple[bytes, int]]
"""Frame number, first and last tensor -> bytes, and how many elements changed."""


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
class Whole:
    """A version over all ranks."""

    version: int
    layout: list[TensorInfo]
    hashes: list[bytes]
    root: str
    at: dict[str, int]  # tensor -> index in the layout
    metadata: Metadata
    canary: Canary | None

    @property
    def elements(self) -> int:
        return sum(map(_elements, self.layout))

    @property
    def nbytes(self) -> int:
        return sum(_elements(info) * info.bits // 8 for info in self.layout)


class Writer:
    """Of one chain. `files` go into each anchor beside the weights."""

    def __init__(self, store: Store, chain: str, files: Mapping[str, bytes], ranks: Alone) -> None:
        self.store, self.chain, self.ranks = store, chain, ranks
        self.head: Head | None = None
        self.head_tag: str | None = None
        self._files = dict(files)
        self._prefix = f"weights/{chain}"
        self._layout: Blob | None = None

    def whole(
        self,
        version: int,
        layout: list[TensorInfo],
        arrays: Sequence[np.ndarray],
        metadata: Metadata,
        canary: Canary | None,
    ) -> Whole:
        """What all ranks have of this version."""
        hashes = b"".join(in_order(tensor_hash, arrays))
        said = self.ranks.gather(f"{version:06d}-tensors", msgspec.msgpack.encode(_Tensors(layout, hashes)))
        found: dict[str, tuple[TensorInfo, bytes, int]] = {}
        for rank, data in enumerate(said):
            part = msgspec.msgpack.decode(data, type=_Tensors)
            for number, info in enumerate(part.layout):
                if info.name in found:
                    raise ChainError(
                        f"tensor {info.name} of version {version} was given by rank {found[info.name][2]} and "
                        f"by rank {rank}: each tensor has one owner"
                    )
                found[info.name] = info, part.hashes[16 * number : 16 * number + 16], rank
        if self.ranks.rank == 0:
            self.ranks.clear(version)  # all ranks are here, so none waits for an older version
        names = sorted(found)
        infos, parts = [found[name][0] for name in names], [found[name][1] for name in names]
        root = chains.layout_root(infos, parts)
        return Whole(version, infos, parts, root, {n: i for i, n in enumerate(names)}, metadata, canary)

    def begin(self, layout: list[TensorInfo]) -> None:
        """Names, dtypes and shapes, the same for all versions."""
        data = chains.dump(layout)
        self._layout = chains.write_new(self.store, f"{self._prefix}/layouts/{chains.digest(data)[:16]}.json", data)

    def anchor(self, layout: list[TensorInfo], arrays: Sequence[np.ndarray], whole: Whole) -> Manifest:
        folder = f"{self._prefix}/anchors/{whole.version:06d}-{whole.root[:16]}"
        named = {info.name: array for info, array in zip(layout, arrays, strict=True)}
        tags = {info.name: info.tag for info in layout}
        pieces = shards({name: array.nbytes for name, array in named.items()}, ANCHOR_BYTES)
        single = self.ranks.world == 1 and len(pieces) == 1
        objects: list[Blob] = []
        files: dict[str, str] = {}
        for number, names in enumerate(pieces):
            file = chains.MODEL_FILE if single else f"model-{self.ranks.rank:05d}-{number:05d}.safetensors"
            data = pack({name: named[name] for name in names}, tags)
            objects.append(chains.write_new(self.store, f"{folder}/{file}", data))
            del data
            files |= dict.fromkeys(names, file)
        parts = self._parts(f"{whole.version:06d}-anchor", _Part(objects, files=files))
        objects = [blob for part in parts for blob in part.objects]
        if self.ranks.rank == 0:
            beside = dict(self._files)
            if not single:
                everywhere = {name: file for part in parts for name, file in part.files.items()}
                beside["model.safetensors.index.json"] = index(everywhere, whole.nbytes)
            objects += [chains.write_new(self.store, f"{folder}/{name}", data) for name, data in beside.items()]
        return self._manifest("anchor", None, "", whole, objects, [], whole.elements)

    def delta(
        self, kind: str, parent: int, parent_root: str, whole: Whole, layout: list[TensorInfo], encode: Encode
    ) -> Manifest:
        """A delta or a skip: objects with a frame for each group of tensors."""
        name = f"{whole.version:06d}-from-{parent:06d}-{whole.root[:16]}"
        own = "" if self.ranks.world == 1 else f"{self.ranks.rank}-"
        objects: list[Blob] = []
        coded: list[Frame] = []
        body = bytearray()
        changed = 0

        def close() -> None:
            key = f"{self._prefix}/deltas/{name}/{own}{len(objects)}"
            objects.append(chains.write_new(self.store, key, bytes(body)))
            body.clear()

        ranges = group(layout)
        results = in_order(lambda item: encode(item[0], *item[1]), enumerate(ranges))
        for (first, last), (data, count) in zip(ranges, results, strict=True):
            changed += count
            tensors = tuple(whole.at[info.name] for info in layout[first:last])
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

    def commit(self, manifest: Manifest) -> Link:
        """Manifest, then HEAD, by rank 0; the other ranks learn of it."""
        data = None
        if self.ranks.rank == 0:
            link = self._write_manifest(manifest)
            links = chains.recent([*(self.head.links if self.head else []), link])
            head = Head(
                format=chains.FORMAT, chain=self.chain, version=manifest.version, root=manifest.root, links=links
            )
            self.head_tag = chains.move_head(self.store, head, self.head_tag)
            data = chains.dump(head)
        label = f"{manifest.version:06d}-{manifest.kind}-head"
        moved: Head = chains.parse(self.ranks.share(label, data), Head, label)
        self.head = moved
        return moved.links[-1]

    def _parts(self, label: str, mine: _Part) -> list[_Part]:
        """Everything that is written: only when all of it is, rank 0 goes on to the manifest."""
        said = self.ranks.gather(label, msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(data, type=_Part) for data in said]

    def _manifest(
        self,
        kind: str,
        parent: int | None,
        parent_root: str,
        whole: Whole,
        objects: list[Blob],
        coded: list[Frame],
        changed: int,
    ) -> Manifest:
        assert self._layout is not None
        return Manifest(
            format=chains.FORMAT,
            chain=self.chain,
            version=whole.version,
            kind=kind,
            parent=parent,
            parent_root=parent_root or None,
            root=whole.root,
            layout=self._layout,
            hashes=b"".join(whole.hashes),
            objects=objects,
            frames=coded,
            changed=changed,
            elements=whole.elements,
            bytes_full=whole.nbytes,
            metadata=whole.metadata,
            canary=whole.canary,
        )

    def _write_manifest(self, manifest: Manifest) -> Link:
        data = chains.dump(manifest)
        origin = "anchor" if manifest.parent is None else f"from-{manifest.parent:06d}"
        key = f"{self._prefix}/manifests/{manifest.version:06d}-{origin}-{chains.digest(data)[:16]}.json"
        blob = chains.write_new(self.store, key, data)
        size = blob.size + sum(wanted.size for wanted in manifest.wanted)
        return Link(manifest.version, manifest.parent, size, blob, manifest.kind == "skip")


def _elements(info: TensorInfo) -> int:
    return int(np.prod(info.shape, dtype=np.int64))
