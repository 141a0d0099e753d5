"""`stretto weights`: list the versions of a run's chains, check them, take one out, delete what nobody needs."""

from __future__ import annotations

from pathlib import Path

from stretto.watch.display import size
from stretto.weights import inspect
from stretto.weights.chain import ChainError
from stretto.weights.collect import collect
from stretto.weights.readers import Seen, readers
from stretto.weights.store import Store, StoreError


def weights(
    verb: str, url: str, folders: list[str], chain: str | None, version: int | None, check: bool, dry: bool
) -> int:
    """Exit code. ValueError, ChainError, StoreError: a sentence for the user."""
    if len(folders) != (verb == "export"):
        raise ValueError("give export, and only export, one folder: stretto weights export URL --version N DIR")
    if version is not None and verb not in ("verify", "export"):
        raise ValueError(f"--version goes with verify and export; {verb} looks at all versions")
    if dry and verb != "gc":
        raise ValueError("--dry-run goes with gc")
    if check and verb != "inspect":
        raise ValueError("--verify goes with inspect; stretto weights verify URL does it alone")
    if "://" not in url and not Path(url).is_dir():
        raise ValueError(
            f"{url} holds no chain of weights: there is no such folder (a run's store is runs/<name>/store)"
        )
    store = Store(url)
    names = [chain] if chain else inspect.chain_ids(store)
    if not names:
        raise ValueError(f"{url} holds no chain of weights (a run's store is runs/<name>/store)")
    if verb == "export":
        return _export(store, names[-1], Path(folders[0]), version)
    if verb == "verify":
        return _verify(store, names, version)
    if verb == "gc":
        return _collect(store, names, dry)
    problems = 0
    for name in names:
        print(name)
        _list(store, name)
        if check:
            problems += _check(store, name, None)
    return 1 if problems else 0


def _list(store: Store, chain: str) -> None:
    for entry in inspect.versions(store, chain):
        smaller = entry.bytes_full / max(1, entry.bytes)
        origin = entry.form if entry.form != "skip" else f"skip {entry.parent}"
        print(
            f"  {entry.version:>6}  {origin:<7} {size(entry.bytes):>9}  {smaller:6.1f} × smaller  "
            f"{entry.changed:6.1%} changed  {entry.root[:16]}"
        )
    try:
        for seen in readers(store, chain):
            print(f"  {_reader(seen)}")
    except (StoreError, OSError) as error:
        print(f"  readers are not known: {error}")


def _verify(store: Store, chains: list[str], version: int | None) -> int:
    problems = known = 0
    for chain in chains:
        if (
            version is not None
            and len(chains) > 1
            and version not in {e.version for e in inspect.versions(store, chain)}
        ):
            continue
        known += 1
        print(chain)
        problems += _check(store, chain, version)
    if not known:
        raise ValueError(
            f"no chain in {store.url} has a version {version} that can be rebuilt; see stretto weights inspect"
        )
    return 1 if problems else 0


def _check(store: Store, chain: str, version: int | None) -> int:
    found = inspect.verify(store, chain, version)
    intact = "every version is intact" if version is None else f"version {version} is intact"
    print("\n".join(f"  {sentence}" for sentence in found) or f"  {intact}")
    return len(found)


def _export(store: Store, chain: str, folder: Path, version: int | None) -> int:
    try:
        written = inspect.export(store, chain, folder, version)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error}") from error
    print(f"version {written} of chain {chain} is in {folder}")
    return 0


def _collect(store: Store, chains: list[str], dry: bool) -> int:
    for chain in chains:
        try:
            found = collect(store, chain, dry)
        except ChainError as error:
            raise ValueError(str(error)) from error
        verb = "would be deleted" if dry else "deleted"
        print(f"{chain}: {len(found.deleted)} objects {verb}; versions from {found.floor} on are kept")
        for seen in found.held_by:
            print(f"  older ones are kept for {_reader(seen)}")
        for seen in found.gone:
            print(f"  forgotten: {_reader(seen)}")
    return 0


def _reader(seen: Seen) -> str:
    serves = "nothing yet" if seen.reader.serves is None else f"version {seen.reader.serves}"
    state = "" if seen.alive else ", taken for dead"
    return f"reader {seen.reader.cluster}: serves {serves}, heard of {seen.age:.0f} s ago{state}"
