"""The store: atomic writes, create-only and compare-and-set, the same for a folder, obstore's memory and S3."""

import multiprocessing
from pathlib import Path

import pytest

from stretto.weights.store import PARTIAL, Store, StoreError


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return request.getfixturevalue("s3")()
    return Store(tmp_path / "deep" / "root") if request.param == "folder" else Store("memory:///")


def test_what_is_put_is_read(store: Store) -> None:
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    store.put("a/c/d", b"")
    assert store.get("a/b") == b"two"
    assert store.get("a/c/d") == b""
    assert store.list() == ["a/b", "a/c/d"]
    assert store.list("a/c") == ["a/c/d"]
    assert store.list("nothing/here") == []
    assert store.exists("a/b") and not store.exists("a")


def test_missing_key_is_a_key_error(store: Store) -> None:
    with pytest.raises(KeyError, match="a/b"):
        store.get("a/b")
    store.delete("a/b")
    store.put("a/b", b"1")
    store.delete("a/b")
    assert not store.exists("a/b")


def test_create_only_keeps_the_first(store: Store) -> None:
    assert store.put_new("k", b"first")
    assert not store.put_new("k", b"second")
    assert store.get("k") == b"first"


def test_swap_needs_the_tag_last_seen(store: Store) -> None:
    tag = store.swap("HEAD", b"1", None)
    assert tag is not None
    assert store.swap("HEAD", b"x", None) is None
    newer = store.swap("HEAD", b"2", tag)
    assert newer is not None
    assert store.swap("HEAD", b"x", tag) is None
    assert store.get_with_tag("HEAD") == (b"2", newer)
    assert store.swap("other", b"x", newer) is None
    assert not store.exists("other")


def test_an_object_that_has_not_changed_is_not_sent_again(store: Store) -> None:
    tag = store.swap("HEAD", b"1", None)
    assert tag is not None and store.get_if_changed("HEAD", tag) is None
    newer = store.swap("HEAD", b"2", tag)
    assert store.get_if_changed("HEAD", tag) == (b"2", newer)
    with pytest.raises(KeyError):
        store.get_if_changed("other", tag)


def test_the_store_has_a_clock(store: Store) -> None:
    store.put("a", b"")
    first = store.modified("a")
    store.put("b", b"")
    assert 0 <= store.modified("b") - first < 30
    with pytest.raises(KeyError):
        store.modified("c")


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/../b", "./a", "a/", "a\\b", f"{PARTIAL}/lock"])
def test_odd_keys_are_refused(store: Store, key: str) -> None:
    with pytest.raises(StoreError, match="is not a key"):
        store.put(key, b"")


def test_a_url_that_means_nothing_is_a_sentence() -> None:
    with pytest.raises(StoreError, match="cannot open the store nonsense://x"):
        Store("nonsense://x")
    with pytest.raises(StoreError, match="takes no options, got region"):
        Store("/somewhere", region="here")


def _increment(root: str, times: int) -> None:
    store = Store(root)
    for _ in range(times):
        while True:
            data, tag = store.get_with_tag("count")
            if store.swap("count", str(int(data) + 1).encode(), tag) is not None:
                break


def test_swaps_of_several_processes_lose_nothing(tmp_path: Path) -> None:
    Store(tmp_path).put("count", b"0")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_increment, args=(str(tmp_path), 25)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert Store(tmp_path).get("count") == b"75"


def test_leftovers_of_a_crash_are_no_objects(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("a", b"1")
    (tmp_path / PARTIAL / ".123-half").write_bytes(b"hal")
    assert store.list() == ["a"]
