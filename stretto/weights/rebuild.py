"""The reader's side: from what one holds to the version HEAD names, verified bit by bit.

Every tensor's hash is checked after every step, so a delta on a wrong base, a damaged object or a broken coder can't
get further than here. Whatever fails is left out and the next cheapest path is tried, ending at an anchor; each
detour is reported in a sentence. The base is never written to: until the caller swaps, nothing has happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from stretto.weights import chain as chains
from stretto.weights import codec
from stretto.weights.chain import Blob, ChainError, Head, Link, Manifest, TensorInfo
from stretto.weights.codec import CodecError
from stretto.weights.publisher import join
from stretto.weights.state import tensor_hash
from stretto.weights.store import Store
from stretto.weights.tensorfile import unpack

DOWNLOADS = 4
"""Objects fetched at once."""


@dataclass(frozen=True)
class State:
    """One version in memory: tensors as unsigned integers, with their dtype tags."""

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
    notes: list[str] = field(default_factory=list)  # what went wrong on the way, for people


def rebuild(store: Store, head: Head, base: State | None = None) -> Rebuilt:
    """The state of `head`, from `base` if that is cheaper or from an anchor.

    Raises ChainError with every reason if no path works, StoreError if the store itself fails.
    """
    links = list(head.links)
    result = Rebuilt(base or State(-1, "", {}, {}))
    while True:
        if base is not None and base.root == head.root:
            result.state = replace(base, version=head.version)
            return result
        try:
            path = chains.plan(links, None if base is None else base.version, head.version)
        except ChainError as error:
            raise ChainError("; ".join([*result.notes, str(error)])) from None
        if not path:  # the base has HEAD's version, but other bits
            result.notes.append(f"version {head.version} here is not the one of chain {head.chain}; fetching an anchor")
            base = None
            continue
        state, link = base if path[0].parent is not None else None, path[0]
        try:
            for link in path:
                state = _step(store, head.chain, link, state, result)
            assert state is not None
            result.state, result.form = state, "anchor" if path[0].parent is None else "delta"
            if state.root != head.root:
                raise ChainError(f"version {state.version} has root {state.root[:16]}, HEAD says {head.root[:16]}")
            return result
        except (Mismatch, CodecError) as error:
            if path[0].parent is None:
                result.notes.append(f"cannot use the {link.form} to version {link.version}: {error}")
                links.remove(link)
            else:  # the base is distrusted before the delta is
                result.notes.append(f"{error}; fetching an anchor")
                base = None
        except ChainError as error:
            result.notes.append(f"cannot use the {link.form} to version {link.version}: {error}")
            links.remove(link)


class Mismatch(ChainError):
    """Base and delta do not make what was published: one of them is not what it claims to be."""


def _step(store: Store, chain: str, link: Link, base: State | None, result: Rebuilt) -> State:
    """Follow one link; adds to the times and bytes of `result`."""
    started = time.monotonic()
    manifest = chains.read_manifest(store, chain, link)
    if base is not None and manifest.parent_root != base.root and link.parent is not None:
        raise Mismatch(
            f"the delta to version {link.version} was made from root {str(manifest.parent_root)[:16]}, "
            f"version {base.version} here has root {base.root[:16]}"
        )
    if base is not None and base.layout is not None and base.layout[0] == manifest.layout:
        layout = base.layout[1]
    else:
        layout = chains.read_layout(store, manifest)
    blobs = _fetch_all(store, manifest.wanted)
    fetched = time.monotonic()
    if manifest.kind == "anchor":
        tensors, tags = _open_anchor(blobs[0], manifest.wanted[0])
    else:
        assert base is not None
        tensors, tags = _apply(manifest, layout, blobs, base), base.tags
    _verify(manifest, layout, tensors, tags)
    result.bytes += link.bytes
    result.fetch_seconds += fetched - started
    result.apply_seconds += time.monotonic() - fetched
    return State(link.version, manifest.root, tensors, tags, (manifest.layout, layout))


def _fetch_all(store: Store, blobs: Iterable[Blob]) -> list[bytes]:
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        return list(pool.map(lambda blob: chains.fetch(store, blob), blobs))


def _open_anchor(data: bytes, blob: Blob) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        return unpack(data)
    except ValueError as error:
        raise ChainError(f"object {blob.key} cannot be read: {error}") from error


def _apply(manifest: Manifest, layout: list[TensorInfo], blobs: list[bytes], base: State) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for frame in manifest.frames:
        infos = layout[frame.first : frame.last]
        old_N = join([base.tensors[info.name] for info in infos])
        data = memoryview(blobs[frame.blob])[frame.start : frame.start + frame.size]
        new_N = codec.decode(old_N, data, old_N.shape, old_N.dtype)
        offset = 0
        for info in infos:
            size = int(np.prod(info.shape, dtype=np.int64))
            tensors[info.name] = new_N[offset : offset + size].reshape(info.shape)
            offset += size
    return tensors


def _verify(manifest: Manifest, layout: list[TensorInfo], tensors: dict[str, np.ndarray], tags: dict[str, str]) -> None:
    """Mismatch naming the first tensor that is not what the manifest says."""
    if tensors.keys() != {info.name for info in layout}:
        odd = sorted(tensors.keys() ^ {info.name for info in layout})[0]
        raise Mismatch(f"version {manifest.version} and its layout disagree about tensor {odd}")
    hashes = [manifest.hashes[at : at + 16] for at in range(0, len(manifest.hashes), 16)]
    if len(hashes) != len(layout):
        raise Mismatch(f"version {manifest.version} has {len(hashes)} hashes for {len(layout)} tensors")
    for info, expected in zip(layout, hashes, strict=True):
        array = tensors[info.name]
        if array.shape != info.shape or tags[info.name] != info.tag or tensor_hash(array) != expected:
            raise Mismatch(f"tensor {info.name} of version {manifest.version} has not the bits that were published")
    if chains.layout_root(layout, hashes) != manifest.root:
        raise Mismatch(f"the tensor hashes of version {manifest.version} do not make its root")
