"""Look at a chain from outside: list its versions, check every byte, take one out as a checkpoint folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto.weights import chain as chains
from stretto.weights.chain import ChainError, Head, Link, Metadata
from stretto.weights.codec import CodecError
from stretto.weights.rebuild import rebuild
from stretto.weights.store import Store, write_file
from stretto.weights.tensorfile import save


@dataclass(frozen=True)
class Entry:
    """One way to one version."""

    version: int
    form: str
    parent: int | None
    bytes: int
    bytes_full: int
    changed: float
    root: str
    metadata: Metadata


def chain_ids(store: Store) -> list[str]:
    """Chains that have a version."""
    return sorted(key.split("/")[1] for key in store.list("weights") if key.endswith("/HEAD"))


def versions(store: Store, chain: str) -> list[Entry]:
    """What HEAD links to, oldest first. ChainError if there is no such chain."""
    entries = []
    for link in _head(store, chain).links:
        m = chains.read_manifest(store, chain, link)
        changed = m.changed / max(1, m.elements)
        entries.append(Entry(m.version, m.kind, m.parent, link.bytes, m.bytes_full, changed, m.root, m.metadata))
    return entries


def verify(store: Store, chain: str, version: int | None = None) -> list[str]:
    """Rebuild every version HEAD links to (or only one), each in every way; one sentence per problem, empty if all is
    well. ChainError for a version that HEAD does not know."""
    head, problems = _head(store, chain), []
    if version is not None:
        _at(store, head, version)
    for link in head.links:
        if version not in (None, link.version):
            continue
        others = [other for other in head.links if other.version < link.version]
        try:
            manifest = chains.read_manifest(store, chain, link)
            # A HEAD that knows no other way to this version.
            part = Head(
                format=head.format, chain=chain, version=link.version, root=manifest.root, links=[*others, link]
            )
            notes = rebuild(store, part).notes
            for blob in manifest.objects if not notes else ():  # also those that no reader needs
                chains.fetch(store, blob)
            problems += [f"version {link.version}: {note}" for note in notes]
        except (ChainError, CodecError) as error:
            problems.append(f"version {link.version}: {error}; {_remedy(head, link)}")
    return problems


def _remedy(head: Head, broken: Link) -> str:
    """What remains of a version one way to which is broken."""
    others = [link for link in head.links if link is not broken and link.version <= broken.version]
    try:
        way = chains.plan(others, None, broken.version)
    except ChainError:
        return (
            "no other way leads there: put the object back from a copy, or wait for the next anchor (a trainer that "
            "starts anew writes one at once)"
        )
    names = ", ".join(f"{link.form} {link.version}" for link in way)
    return f"readers take another way ({names}); put the object back from a copy to have this one again"


def export(store: Store, chain: str, folder: Path, version: int | None = None) -> int:
    """Write a version (the newest by default) as a checkpoint folder that transformers loads; returns the version.

    Configuration and tokenizer come from the last anchor before it. FileExistsError if the folder has files in it.
    """
    head = _head(store, chain)
    if version is not None and version != head.version:
        head = _at(store, head, version)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: give a new folder")
    state = rebuild(store, head).state
    anchor = [link for link in head.links if link.parent is None and link.version <= head.version][-1]
    for blob in chains.read_manifest(store, chain, anchor).objects:
        name = blob.key.rsplit("/", 1)[1]
        if not name.endswith((".safetensors", ".safetensors.index.json")):
            write_file(folder / name, chains.fetch(store, blob))
    save(folder / chains.MODEL_FILE, state.tensors, state.tags)
    return head.version


def _head(store: Store, chain: str) -> Head:
    found = chains.read_head(store, chain)
    if found is None:
        known = ", ".join(chain_ids(store)) or "none"
        raise ChainError(f"there is no chain {chain} in {store.url}; known: {known}")
    return found[0]


def _at(store: Store, head: Head, version: int) -> Head:
    """HEAD as it was at `version`."""
    links = [link for link in head.links if link.version <= version]
    if not links or links[-1].version != version:
        known = sorted({link.version for link in head.links})
        raise ChainError(f"version {version} cannot be rebuilt any more; available are {known[0]} to {known[-1]}")
    root = chains.read_manifest(store, head.chain, links[-1]).root
    return Head(format=head.format, chain=head.chain, version=version, root=root, links=links)
