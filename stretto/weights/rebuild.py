"""The reader's side: from what one holds to the version HEAD names, verified bit by bit.

    delta:   fetch ──▶ patches, beside ──▶ what they would make has the manifest's hashes? ──▶ write in place
    anchor:  fetch file by file, beside ──▶ has the manifest's hashes? ──▶ the new state

Every tensor's hash is checked before anything is written, so a delta on a wrong base, a damaged object or a broken
coder can't get further than here, and a base is one whole version at any time. Whatever fails is left out and the next
cheapest path is tried (deltas, skips, anchors); each detour is reported in a sentence.

Memory beside the base: a delta's bytes and patches and a few frames. A base is let go before an anchor takes its place,
of which there are the tensors and a few files. The patches remain as `changes`, for engines that hold the base.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from stretto.records import Canary
from stretto.weights import chain as chains
from stretto.weights import codec, frames
from stretto.weights.chain import Blob, ChainError, Frame, Head, Link, Manifest, TensorInfo
from stretto.weights.codec import CodecError, Patch
from stretto.weights.frames import in_order, join
from stretto.weights.patchfile import Change
from stretto.weights.state import tensor_hash
from stretto.weights.store import Store, StoreError
from stretto.weights.tensorfile import unpack

DOWNLOADS = 4
"""Objects of a delta fetched at once."""


@dataclass(frozen=True)
class State:
    """One version in memory: tensors as unsigned integers, with their dtype tags. `rebuild` writes into them."""

    version: int
    root: str
    tensors: dict[str, np.ndarray]
    tags: dict[str, str]
    layout: tuple[Blob, list[TensorInfo]] | None = None  # kept, so that it is fetched once


@dataclass
class Rebuilt:
    state: State
    form: str = "delta"  # "anchor" if the way began at one
    bytes: int = 0  # fetched
    fetch_seconds: float = 0.0
    apply_seconds: float = 0.0
    write_seconds: float = 0.0  # of apply_seconds: writing decoded deltas in place
    path: list[str] = field(default_factory=list)  # "anchor 0", "delta 1", "skip 8": what was followed
    notes: list[str] = field(default_factory=list)  # what went wrong on the way, for people
    parent: str = ""  # root that `changes` start from: the base's; empty if the way was another
    changes: list[Change] = field(default_factory=list)
    canary: Canary | None = None


class Mismatch(ChainError):
    """Base and delta do not make what was published: one of them is not what it claims to be."""


def rebuild(
    store: Store,
    head: Head,
    base: State | None = None,
    reached: Callable[[State], object] = lambda state: None,
    dropped: Callable[[], object] = lambda: None,
) -> Rebuilt:
    """The state of `head`, from `base` if that is cheaper or from an anchor. The arrays of `base` are taken over:
    deltas are written into them, and before an anchor is fetched they are let go, which `dropped` is told. `reached` is
    told each version on the way: what is held if this raises.

    Raises ChainError with every reason if no path works, StoreError if the store itself fails.
    """
    links = list(head.links)
    result = Rebuilt(base or State(-1, "", {}, {}), parent=base.root if base else "")
    trusted = False  # the base was made here, from verified bytes
    held = base
    while True:
        if base is not None and base.root == head.root:
            result.state = replace(base, version=head.version)
            if not result.path:
                result.canary = _canary(store, head, result)
            return result
        try:
            path = chains.plan(links, None if base is None else base.version, head.version)
        except ChainError as error:
            raise ChainError("; ".join([*result.notes, str(error)])) from None
        if not path:  # the base has HEAD's version, but other bits
            what = f"version {head.version} here is not the one of chain {head.chain}"
            if trusted:
                raise ChainError("; ".join([*result.notes, f"HEAD says root {head.root[:16]}, but {what}"]))
            result.notes.append(f"{what}; fetching an anchor")
            base = None
            continue
        link = path[0]
        if link.parent is None and held is not None:
            held.tensors.clear()  # whoever holds it: memory has room for one more copy, not for two
            base = held = None
            dropped()
        try:
            base = held = _step(store, head.chain, link, base, result)
            frames.give_back()
            trusted = True
            reached(base)
        except (Mismatch, CodecError) as error:
            if link.parent is None or trusted:
                result.notes.append(f"cannot use the {link.form} to version {link.version}: {error}")
                links.remove(link)
            else:  # the base is distrusted before the delta is
                result.notes.append(f"{error}; fetching an anchor")
                base = None
        except ChainError as error:
            result.notes.append(f"cannot use the {link.form} to version {link.version}: {error}")
            links.remove(link)


def _step(store: Store, chain: str, link: Link, base: State | None, result: Rebuilt) -> State:
    """Follow one link; adds to the times and bytes of `result`."""
    started = time.monotonic()
    manifest = chains.read_manifest(store, chain, link)
    if link.parent is not None and base is not None and manifest.parent_root != base.root:
        raise Mismatch(
            f"the delta to version {link.version} was made from root {str(manifest.parent_root)[:16]}, "
            f"version {base.version} here has root {base.root[:16]}"
        )
    if base is not None and base.layout is not None and base.layout[0] == manifest.layout:
        layout = base.layout[1]
    else:
        layout = chains.read_layout(store, manifest)
    hashes = _hashes(manifest, layout)
    if link.parent is None:
        waited, tensors, tags = _anchor(store, manifest, layout, hashes)
        result.form, result.parent, result.changes = "anchor", "", []
    else:
        assert base is not None
        waited, tensors, tags = _delta(store, manifest, layout, hashes, base, result)
    result.canary = manifest.canary
    result.bytes += link.bytes
    result.fetch_seconds += waited
    result.apply_seconds += time.monotonic() - started - waited
    result.path.append(f"{link.form} {link.version}")
    return State(link.version, manifest.root, tensors, tags, (manifest.layout, layout))


def _hashes(manifest: Manifest, layout: list[TensorInfo]) -> list[bytes]:
    hashes = [manifest.hashes[at : at + 16] for at in range(0, len(manifest.hashes), 16)]
    if len(hashes) != len(layout):
        raise Mismatch(f"version {manifest.version} has {len(hashes)} hashes for {len(layout)} tensors")
    if chains.layout_root(layout, hashes) != manifest.root:
        raise Mismatch(f"the tensor hashes of version {manifest.version} do not make its root")
    return hashes


def _anchor(
    store: Store, manifest: Manifest, layout: list[TensorInfo], hashes: list[bytes]
) -> tuple[float, dict[str, np.ndarray], dict[str, str]]:
    """Seconds of waiting for the store, tensors and tags."""
    tensors: dict[str, np.ndarray] = {}
    tags: dict[str, str] = {}
    waited, started = 0.0, time.monotonic()
    for blob, data in zip(manifest.wanted, in_order(lambda b: chains.fetch(store, b), manifest.wanted), strict=True):
        waited += time.monotonic() - started
        try:
            found, found_tags = unpack(data)
        except ValueError as error:
            raise ChainError(f"object {blob.key} cannot be read: {error}") from error
        tensors |= found
        tags |= found_tags
        del data
        started = time.monotonic()
    if tensors.keys() != {info.name for info in layout}:
        odd = sorted(tensors.keys() ^ {info.name for info in layout})[0]
        raise Mismatch(f"version {manifest.version} and its layout disagree about tensor {odd}")
    ordered = [tensors[info.name] for info in layout]
    for info, array, found_hash, expected in zip(layout, ordered, in_order(tensor_hash, ordered), hashes, strict=True):
        if array.shape != info.shape or tags[info.name] != info.tag or found_hash != expected:
            raise _not_published(info, manifest)
    return waited, tensors, tags


def _delta(
    store: Store,
    manifest: Manifest,
    layout: list[TensorInfo],
    hashes: list[bytes],
    base: State,
    result: Rebuilt,
) -> tuple[float, dict[str, np.ndarray], dict[str, str]]:
    """Seconds of waiting for the store, tensors and tags. `base` is written to when all of it is known to be right."""
    if base.tensors.keys() != {info.name for info in layout}:
        odd = sorted(base.tensors.keys() ^ {info.name for info in layout})[0]
        raise Mismatch(f"version {manifest.version} and version {base.version} here disagree about tensor {odd}")
    if sorted(number for frame in manifest.frames for number in frame.tensors) != list(range(len(layout))):
        raise Mismatch(f"the frames of version {manifest.version} are not one for each tensor")
    started = time.monotonic()
    numbers = range(len(manifest.objects))
    blobs = list(in_order(lambda number: _fetch(store, manifest, layout, number), numbers, DOWNLOADS))
    waited = time.monotonic() - started

    def one(frame: Frame) -> list[Patch]:
        infos = [layout[number] for number in frame.tensors]
        arrays = [base.tensors[info.name] for info in infos]
        for info, array in zip(infos, arrays, strict=True):
            if array.shape != info.shape or base.tags[info.name] != info.tag:
                raise _not_published(info, manifest)
        data = memoryview(blobs[frame.blob])[frame.start : frame.start + frame.size]
        old_N = join(arrays)
        try:
            patches = codec.decode(old_N, data, old_N.shape, old_N.dtype, frames.threads_inside(old_N.size))
        except CodecError as error:
            raise CodecError(f"tensors {infos[0].name} to {infos[-1].name}: {error}") from error
        for number, found in zip(frame.tensors, frames.hashes(patches, arrays), strict=True):
            if found != hashes[number]:
                raise _not_published(layout[number], manifest)
        return patches

    decoded = list(in_order(one, manifest.frames))
    blobs.clear()
    started = time.monotonic()
    for number, frame in enumerate(manifest.frames):
        patches, decoded[number] = decoded[number], []
        names = [layout[index].name for index in frame.tensors]
        arrays = [base.tensors[name] for name in names]
        frames.write(patches, arrays)
        result.write_seconds += time.monotonic() - started
        result.changes += frames.changes(patches, arrays, names) if result.parent else []
        started = time.monotonic()
    if 2 * sum(change.nbytes for change in result.changes) > manifest.bytes_full:
        result.parent, result.changes = "", []  # a whole file costs no more
    return waited, base.tensors, base.tags


def _fetch(store: Store, manifest: Manifest, layout: list[TensorInfo], number: int) -> bytes:
    """An object of a delta; the error says which tensors it holds."""
    try:
        return chains.fetch(store, manifest.objects[number])
    except ChainError as error:
        inside = [layout[index].name for frame in manifest.frames if frame.blob == number for index in frame.tensors]
        which = f"tensors {inside[0]} to {inside[-1]}" if inside else "no tensor"
        raise ChainError(f"{error} (it holds {which})") from error


def _canary(store: Store, head: Head, result: Rebuilt) -> Canary | None:
    """Of a version that was there already."""
    link = next((link for link in head.links if link.version == head.version), None)
    if link is None:
        return None
    try:
        return chains.read_manifest(store, head.chain, link).canary
    except (ChainError, StoreError) as error:
        result.notes.append(f"version {head.version} goes without its canary: {error}")
        return None


def _not_published(info: TensorInfo, manifest: Manifest) -> Mismatch:
    return Mismatch(f"tensor {info.name} of version {manifest.version} has not the bits that were published")
