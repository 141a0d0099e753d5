"""The chain: versions as a log of anchors and deltas in the object store.

    weights/<chain>/HEAD                                   version, root, and a link to every manifest worth knowing
                    layouts/<hash>.json                    names, dtypes, shapes: the same for all versions
                    manifests/000012-from-000011-<hash>.json
                    deltas/000012-from-000011-<hash>/0     coded differences; 000016-from-000008 is a skip
                    anchors/000000-<hash>/model.safetensors, config.json, tokenizer.json ...   loadable by anybody
                    readers/<cluster>-<random>             who reads what (`readers.py`)

Written in this order: objects, manifest, HEAD by compare-and-set. So a version is visible when its last byte is, and
whatever a killed publisher leaves behind is named by nobody. All names hold a hash of what they name, so leftovers
and a second publisher can't collide. Trust runs the same way: HEAD holds the manifests' hashes, a manifest those of
its objects and of every tensor before (one root) and after.

A reader at any version goes along the cheapest path of links to HEAD (`plan`). The rules at the end of this file say
when an anchor or a skip is worth writing; they look at links only, so that all ranks of a trainer come to the same
answer. Old objects are deleted by `collect.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import blake3
import msgspec

from stretto.records import Canary
from stretto.weights.state import root
from stretto.weights.store import Store

FORMAT = 2
"""Version of HEAD and of manifests. A reader refuses any other by name."""

MODEL_FILE = "model.safetensors"
"""Of an anchor in one file. Larger ones have several, and an index, as Hugging Face writes it."""

SKIP = 8
"""A skip delta spans so many versions."""

SPARSE = 16
"""Deltas that together reach 1/SPARSE of an anchor have no skip. The way back is remembered as deltas of that size, so
this bounds its memory to as little."""

Metadata = dict[str, str | int | float]


class ChainError(RuntimeError):
    """A sentence that names the object, tensor or version that is wrong."""


class ChainLost(ChainError):
    """Another publisher owns the chain."""


class Blob(msgspec.Struct, frozen=True):
    """An immutable object: where it lies and what it must hold."""

    key: str
    size: int
    blake3: str


class TensorInfo(msgspec.Struct, frozen=True):
    name: str
    tag: str  # "BF16", ...
    bits: int
    shape: tuple[int, ...]


class Frame(msgspec.Struct, frozen=True):
    """One coded piece of a delta: some tensors of the layout, flattened and joined."""

    blob: int  # index into `Manifest.objects`
    start: int
    size: int
    tensors: tuple[int, ...]  # indices into the layout


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """How to get to `version`: by itself (anchor) or from `parent` (delta)."""

    format: int
    chain: str  # run-scoped: no two runs or restarts share one
    version: int
    kind: str  # "anchor", "delta" or "skip"
    parent: int | None
    parent_root: str | None  # fingerprint that the base must have
    root: str  # fingerprint of the result
    layout: Blob
    hashes: bytes  # 16 bytes per tensor of the layout, of the result
    objects: list[Blob]
    frames: list[Frame] = []  # of a delta
    changed: int = 0  # elements that differ from the parent
    elements: int = 0
    bytes_full: int = 0  # of all tensors, uncoded
    metadata: Metadata = {}
    canary: Canary | None = None  # what engines must say under these weights

    @property
    def wanted(self) -> list[Blob]:
        """The objects a reader needs: of an anchor only the weights."""
        return [blob for blob in self.objects if self.kind != "anchor" or blob.key.endswith(".safetensors")]


class Link(msgspec.Struct, frozen=True):
    """An edge of the graph of versions. `parent` None: an anchor. `bytes`: all a reader fetches for it."""

    version: int
    parent: int | None
    bytes: int
    manifest: Blob
    skip: bool = False  # a second way to a version that a delta leads to

    @property
    def form(self) -> str:
        return "anchor" if self.parent is None else "skip" if self.skip else "delta"


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The one mutable object of a chain."""

    format: int
    chain: str
    version: int
    root: str
    links: list[Link]  # back to the last anchor but one


def plan(links: Iterable[Link], base: int | None, target: int) -> list[Link]:
    """The path to `target` that costs the fewest bytes, starting at `base` or at an anchor.

    Empty if base is the target. ChainError if no path exists.
    """
    cost: dict[int, tuple[int, list[Link]]] = {} if base is None else {base: (0, [])}
    for link in sorted(links, key=lambda link: (link.version, link.bytes)):
        before = (0, []) if link.parent is None else cost.get(link.parent)
        if before is not None and (link.version not in cost or before[0] + link.bytes < cost[link.version][0]):
            cost[link.version] = (before[0] + link.bytes, [*before[1], link])
    if target not in cost:
        raise ChainError(f"no anchor or delta leads to version {target}")
    return cost[target][1]


def recent(links: list[Link]) -> list[Link]:
    """Links back to the last anchor but one: whoever is further behind takes an anchor anyway."""
    anchors = [link.version for link in links if link.parent is None]
    oldest = anchors[-2:][0]
    return [
        link
        for link in links
        if (link.version == oldest and link.parent is None)
        or (link.version > oldest and (link.parent is None or link.parent >= oldest))
    ]


def anchor_due(links: list[Link], every: int) -> bool:
    """Whether a late joiner should get a new anchor: after `every` versions, or when the way from the last one costs
    twice as much as an anchor alone."""
    newest = max(link.version for link in links)
    last = [link for link in links if link.parent is None][-1]
    since = [link for link in links if link.version > last.version and link.form == "delta"]
    way = plan([last, *(link for link in links if link.version > last.version)], None, newest)
    return len(since) >= every or sum(link.bytes for link in way) > 2 * last.bytes


def skip_due(links: list[Link], base: int) -> bool:
    """Whether a skip from `base` to the newest version is worth trying."""
    known = any(link.version == base for link in links)
    return known and len(_deltas(links, base)) >= SKIP and not dense(links, base)


def dense(links: list[Link], base: int) -> bool:
    """Whether so much changed since `base` that remembering what, for a skip, is too dear."""
    last = [link for link in links if link.parent is None][-1]
    return sum(link.bytes for link in _deltas(links, base)) * SPARSE > last.bytes


def _deltas(links: list[Link], base: int) -> list[Link]:
    return [link for link in links if link.version > base and link.form == "delta"]


def head_key(chain: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", chain):
        raise ChainError(f"{chain!r} is not a chain id: use up to 100 letters, digits, dots, dashes and underscores")
    return f"weights/{chain}/HEAD"


def read_head(store: Store, chain: str, known: tuple[Head, str] | None = None) -> tuple[Head, str] | None:
    """HEAD and its entity tag; None if nothing was published yet. `known` is an earlier answer, to save reading it."""
    key = head_key(chain)
    try:
        found = store.get_if_changed(key, known[1]) if known else store.get_with_tag(key)
    except KeyError:
        return None
    return known if found is None else (parse(found[0], Head, key), found[1])


def move_head(store: Store, head: Head, expected: str | None) -> str:
    """Make `head` visible; returns its tag. ChainLost if HEAD is no longer the one with tag `expected`."""
    key = head_key(head.chain)
    data = dump(head)
    tag = store.swap(key, data, expected)
    if tag is not None:
        return tag
    found = read_head(store, head.chain)
    if found is not None and dump(found[0]) == data:
        return found[1]  # our own write, whose answer was lost on the way
    where = "is gone" if found is None else f"is at version {found[0].version}"
    raise ChainLost(
        f"version {head.version} was not published: HEAD of chain {head.chain} in {store.url} {where}, moved by "
        "another publisher; stop one of the two, or start this one with a new chain id"
    )


def write_new(store: Store, key: str, data: bytes) -> Blob:
    """Write an immutable object. An equal one that lies there is as good; a different one is a ChainError."""
    blob = Blob(key, len(data), digest(data))
    if not store.put_new(key, data) and digest(store.get(key)) != blob.blake3:
        raise ChainError(f"{key} in {store.url} exists with other content: start with a new chain id")
    return blob


def fetch(store: Store, blob: Blob) -> bytes:
    """The bytes of `blob`; ChainError that names the object if it is missing, cut off or damaged."""
    try:
        data = store.get(blob.key)
    except KeyError:
        raise ChainError(f"object {blob.key} is missing from {store.url}") from None
    if len(data) != blob.size:
        raise ChainError(f"object {blob.key} in {store.url} is cut off: it has {len(data)} of {blob.size} bytes")
    if digest(data) != blob.blake3:
        raise ChainError(f"object {blob.key} in {store.url} is damaged: its BLAKE3 hash is not the manifest's")
    return data


def read_manifest(store: Store, chain: str, link: Link) -> Manifest:
    manifest = parse(fetch(store, link.manifest), Manifest, link.manifest.key)
    if (manifest.chain, manifest.version, manifest.parent) != (chain, link.version, link.parent):
        raise ChainError(
            f"{link.manifest.key} describes version {manifest.version} of chain {manifest.chain} "
            f"(parent {manifest.parent}), HEAD of {chain} says {link.version} (parent {link.parent})"
        )
    return manifest


def read_layout(store: Store, manifest: Manifest) -> list[TensorInfo]:
    return _decode(fetch(store, manifest.layout), list[TensorInfo], manifest.layout.key)


def layout_root(layout: list[TensorInfo], hashes: list[bytes]) -> str:
    """The fingerprint of tensors described by `layout` whose bits have these hashes."""
    return root((t.name, t.bits, t.shape, hashed) for t, hashed in zip(layout, hashes, strict=True))


def dump(record: Any) -> bytes:
    """JSON, so that a person can read it with `cat`."""
    return msgspec.json.encode(record)


def digest(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


def parse(data: bytes, kind: type[Any], key: str) -> Any:
    """Read a record that has a `format`; ChainError when it is another one, or damaged."""
    version = _decode(data, dict[str, Any], key).get("format")
    if version != FORMAT:
        raise ChainError(f"{key} has format {version}, this program reads format {FORMAT}: update the older side")
    return _decode(data, kind, key)


def _decode(data: bytes, kind: Any, key: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ChainError(f"{key} cannot be read: {error}") from error
