"""Versions on the move, without HTTP: publish to a real folder, rebuild from it, damage it."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_standard

from stretto.watch.metrics import Metrics, read
from stretto.weights import chain as chains
from stretto.weights import codec, inspect
from stretto.weights.chain import Blob, ChainError, ChainLost, Head, Link, plan
from stretto.weights.publisher import NonFiniteError, Publisher
from stretto.weights.rebuild import State, rebuild
from stretto.weights.state import fingerprint
from stretto.weights.store import Store
from stretto.weights.tensorfile import unpack

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]
FILES = {"config.json": b"{}", "tokenizer.json": b"[]"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def head_of(store: Store, chain: str = "run-0") -> Head:
    found = chains.read_head(store, chain)
    assert found is not None
    return found[0]


def same(state: State, tensors: Tensors) -> bool:
    return state.tensors.keys() == tensors.keys() and all(
        np.array_equal(state.tensors[name], tensors[name]) and state.tensors[name].shape == tensors[name].shape
        for name in tensors
    )


def damage(store: Store, key: str, change: Callable[[bytearray], object]) -> None:
    data = bytearray(store.get(key))
    change(data)
    store.put(key, bytes(data))


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 0x10


def cut(data: bytearray) -> None:
    del data[-3:]


def test_a_chain_of_200_equals_the_dense_copy(store: Store, model: Tensors, step: Step) -> None:
    publisher = Publisher(store, "run-0", FILES, anchor_every=20)
    follower = laggard = None
    joins = set(np.random.default_rng(7).integers(0, 201, 12).tolist())
    for version in range(201):
        share = 1.0 if version == 30 else 0.6 if version % 7 == 0 else 0.0 if version % 11 == 0 else 0.02
        model = step(model, version, share) if version else model
        published = publisher.publish(version, model, {"lr": 1e-6})
        head = head_of(store)
        assert (head.version, head.root) == (version, fingerprint(model))
        assert published.form == ("delta" if version else "anchor")
        follower = rebuild(store, head, follower).state
        assert same(follower, model) and follower.root == head.root
        if version % 13 == 0:  # skips versions, and anchors lie in between
            laggard = rebuild(store, head, laggard).state
            assert same(laggard, model)
        if version in joins:
            assert same(rebuild(store, head).state, model)
    late = rebuild(store, head_of(store))
    assert late.form == "anchor" and late.notes == [] and same(late.state, model)
    assert inspect.verify(store, "run-0") == []
    assert len(head_of(store).links) <= 2 * 20 + 2


def test_an_anchor_is_a_checkpoint_folder(store: Store, tmp_path: Path, model: Tensors) -> None:
    Publisher(store, "run-0", FILES).publish(0, model)
    (folder,) = (tmp_path / "store" / "weights" / "run-0" / "anchors").iterdir()
    assert {path.name for path in folder.iterdir()} == {*FILES, "model.safetensors"}
    tensors, tags = unpack((folder / "model.safetensors").read_bytes())
    assert set(tags.values()) == {"BF16"}
    assert fingerprint(tensors) == fingerprint(model)


def test_WGT_8_any_dtype_and_stride_comes_back_with_its_tag(store: Store) -> None:
    tensors = {
        "f32": np.array([1.5, -0.0], np.float32),
        "f16": np.array([[1.5]], np.float16),
        "u8": np.arange(3, dtype=np.uint8),
        "f8": np.arange(3, dtype=np.uint8),
        "i32": np.array(-7, np.int32),
        "strided": np.arange(12, dtype=np.uint16).reshape(3, 4).T,
    }
    publisher = Publisher(store, "run-0", FILES, tags={"f8": "F8_E4M3"})
    publisher.publish(0, tensors)
    tensors = {name: array + array.dtype.type(1) for name, array in tensors.items()}
    publisher.publish(1, tensors)
    state = rebuild(store, head_of(store)).state
    assert state.root == fingerprint(tensors)
    assert state.tags == {"f32": "F32", "f16": "F16", "u8": "U8", "f8": "F8_E4M3", "i32": "I32", "strided": "BF16"}
    assert np.array_equal(state.tensors["f32"].view(np.float32), tensors["f32"])


def test_WGT_9_the_arrays_stay_the_callers(store: Store, model: Tensors) -> None:
    """Training on in place after publish must not move the baseline (the delta would be empty)."""
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(0, model)
    model["embed.weight"][...] += 1
    assert publisher.publish(1, model).changed > 0.2
    assert same(rebuild(store, head_of(store)).state, model)


def test_WGT_9_a_late_joiner_takes_the_last_anchor_and_is_equal(
    store: Store, model: Tensors, step: Step, tmp_path: Path
) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", "trainer")
    publisher = Publisher(store, "run-0", FILES, anchor_every=3, metrics=metrics)
    for version in range(8):
        model = step(model, version)
        publisher.publish(version, model)
    built = rebuild(store, head_of(store))
    assert same(built.state, model)
    full = sum(array.nbytes for array in model.values())
    assert full < built.bytes < 1.7 * full + 5 * 3000
    lines = [(line["version"], line["form"]) for line in read(tmp_path / "metrics.jsonl") if line["kind"] == "publish"]
    assert [version for version, form in lines if form == "anchor"] == [0, 3, 6]
    assert [version for version, form in lines if form == "delta"] == list(range(1, 8))


def test_WGT_3_a_wrong_base_is_refused_and_an_anchor_fetched(store: Store, model: Tensors, step: Step) -> None:
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(0, model)
    newer = step(model, 1)
    publisher.publish(1, newer)
    other = step(model, 99)
    reasons = {0: "the delta to version 1 was made from root", 1: "version 1 here is not the one of chain run-0"}
    for version, reason in reasons.items():
        wrong = State(version, fingerprint(other), dict(other), dict.fromkeys(other, "BF16"))
        before = fingerprint(other)
        built = rebuild(store, head_of(store), wrong)
        assert built.form == "anchor" and same(built.state, newer)
        assert built.notes[0].startswith(reason) and "fetching an anchor" in built.notes[0]
        assert fingerprint(other) == before


def test_a_base_that_lies_about_its_root_is_caught_by_tensor_hashes(store: Store, model: Tensors, step: Step) -> None:
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(0, model)
    publisher.publish(1, step(model, 1))
    lying = State(0, fingerprint(model), step(model, 99), dict.fromkeys(model, "BF16"))
    built = rebuild(store, head_of(store), lying)
    assert "has not the bits that were published" in built.notes[0]
    assert same(built.state, step(model, 1))


def test_WGT_3_what_is_there_already_is_not_fetched(store: Store, model: Tensors, step: Step) -> None:
    """A new chain that starts where the old one ended costs nothing; nor does applying twice."""
    Publisher(store, "run-0", FILES).publish(5, model)
    Publisher(store, "run-1", FILES).publish(5, model)
    state = rebuild(store, head_of(store, "run-0")).state
    built = rebuild(store, head_of(store, "run-1"), state)
    assert built.bytes == 0 and built.state.root == state.root


@pytest.mark.parametrize(("how", "word"), [(flip, "is damaged"), (cut, "is cut off")])
@pytest.mark.parametrize("kind", ["deltas/000002", "manifests/000002", "anchors/000000", "layouts"])
def test_damage_is_named(
    store: Store, model: Tensors, step: Step, kind: str, how: Callable[[bytearray], None], word: str
) -> None:
    publisher = Publisher(store, "run-0", FILES)
    for version in range(3):
        model = step(model, version)
        publisher.publish(version, model)
    base = None
    if kind.startswith(("deltas", "manifests")):
        good = head_of(store)
        first = Head(format=2, chain="run-0", version=1, root="", links=good.links[:2])
        first = msgspec.structs.replace(first, root=chains.read_manifest(store, "run-0", good.links[1]).root)
        base = rebuild(store, first).state
    (key,) = (k for k in store.list() if f"/{kind}" in k and not k.endswith((".json" if "anchor" in kind else "-",)))
    damage(store, key, how)
    with pytest.raises(ChainError, match=f"object {key} in .* {word}"):
        rebuild(store, head_of(store), base)
    assert any(key in problem for problem in inspect.verify(store, "run-0"))
    store.delete(key)
    with pytest.raises(ChainError, match=f"object {key} is missing"):
        rebuild(store, head_of(store), base)


def test_a_damaged_delta_is_gone_around(store: Store, model: Tensors, step: Step) -> None:
    publisher = Publisher(store, "run-0", FILES, anchor_every=3)
    states = []
    for version in range(5):
        model = step(model, version)
        publisher.publish(version, model)
        states.append(rebuild(store, head_of(store)).state)
    (key,) = (k for k in store.list() if "/deltas/000003" in k)
    damage(store, key, flip)
    built = rebuild(store, head_of(store), states[2])
    assert built.form == "anchor" and same(built.state, model)
    (note,) = built.notes
    assert note.startswith(f"cannot use the delta to version 3: object {key} in {store.url} is damaged: its BLAKE3")


def test_other_formats_are_refused_by_name(store: Store, model: Tensors) -> None:
    Publisher(store, "run-0", FILES).publish(0, model)
    head = json.loads(store.get("weights/run-0/HEAD"))
    store.put("weights/run-0/HEAD", json.dumps(head | {"format": 8}).encode())
    with pytest.raises(ChainError, match="HEAD has format 8, this program reads format 2"):
        chains.read_head(store, "run-0")
    store.put("weights/run-0/HEAD", b"\xff\xfe")
    with pytest.raises(ChainError, match="weights/run-0/HEAD cannot be read"):
        chains.read_head(store, "run-0")


def test_a_coder_that_errs_does_not_get_through(
    store: Store, model: Tensors, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(0, model)
    state = rebuild(store, head_of(store)).state
    encode = codec.encode
    with monkeypatch.context() as patch:  # an encoder with a bug
        patch.setattr(codec, "encode", lambda old, new, **options: encode(old, new ^ new.dtype.type(1), **options))
        publisher.publish(1, step(model, 1))
    with pytest.raises(ChainError, match=r"tensor embed.weight of version 1 has not the bits that were published"):
        rebuild(store, head_of(store), replace(state, tensors=dict(state.tensors)))  # its arrays are not written to
    assert same(state, model)


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, 0xFF81])
def test_WGT_11_non_finite_weights_are_never_published(store: Store, model: Tensors, step: Step, value: int) -> None:
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(0, model)
    bad = step(model, 1)
    bad["norm.weight"][3] = value
    for call in (publisher.publish, publisher.submit):
        with pytest.raises(NonFiniteError, match=r"tensor norm.weight of version 1 has 1 values"):
            call(1, bad)
    assert publisher.wait() == [] and head_of(store).version == 0
    assert publisher.publish(1, step(model, 1)).version == 1


def test_a_model_that_changes_shape_is_refused(store: Store, model: Tensors) -> None:
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(3, model)
    with pytest.raises(ValueError, match=r"tensor norm.weight was BF16 \[16\] in version 3 and is BF16 \[4, 4\]"):
        publisher.publish(4, model | {"norm.weight": model["norm.weight"].reshape(4, 4)})
    with pytest.raises(ValueError, match="tensor extra was absent"):
        publisher.publish(4, model | {"extra": model["scale"]})
    with pytest.raises(ValueError, match="version 3 cannot follow version 3"):
        publisher.publish(3, model)
    assert head_of(store).version == 3


def test_a_chain_is_never_overwritten(store: Store, model: Tensors) -> None:
    Publisher(store, "run-0", FILES).publish(0, model)
    with pytest.raises(ChainLost, match=r"chain run-0 exists in .* at version 0: give a new chain id"):
        Publisher(store, "run-0", FILES)
    with pytest.raises(ChainError, match="is not a chain id"):
        Publisher(store, "../run", FILES)


def test_of_two_publishers_the_second_loses(store: Store, model: Tensors, step: Step) -> None:
    first, second = Publisher(store, "run-0", FILES), Publisher(store, "run-0", FILES)
    first.publish(0, model)
    with pytest.raises(
        ChainLost, match=r"version 0 was not published: HEAD of chain run-0 .* is at version 0, moved by"
    ):
        second.publish(0, step(model, 5))
    first.publish(1, step(model, 1))
    assert same(rebuild(store, head_of(store)).state, step(model, 1))


def test_WGT_7_two_publishers_of_the_same_bytes_do_not_mix(store: Store, model: Tensors, step: Step) -> None:
    """A trainer that was thought dead and its replay: equal up to here, then each with its own step."""
    first, second = Publisher(store, "run-0", FILES), Publisher(store, "run-0", FILES)
    first.publish(0, model)
    second.publish(0, model)  # the very same HEAD: taken for a repeat of one's own write
    first.publish(1, step(model, 1))
    with pytest.raises(ChainLost, match="version 1 was not published"):
        second.publish(1, step(model, 2))
    assert same(rebuild(store, head_of(store)).state, step(model, 1))


class _SlowStore(Store):
    """Holds deltas back until told."""

    gate = threading.Event()

    def put_new(self, key: str, data: bytes) -> bool:
        if "/deltas/" in key:
            assert self.gate.wait(10)
        return super().put_new(key, data)


def test_a_publisher_that_falls_behind_merges(tmp_path: Path, model: Tensors, step: Step) -> None:
    store = _SlowStore(tmp_path)
    publisher = Publisher(store, "run-0", FILES)
    publisher.submit(0, model)
    publisher.wait()
    for version in range(1, 6):
        model = step(model, version)
        publisher.submit(version, model)
        while version == 1 and not publisher._busy:
            threading.Event().wait(0.01)
    with pytest.raises(TimeoutError, match=r"took no weights of chain run-0 in 0.05 s"):
        publisher.wait(0.05)
    store.gate.set()
    assert [published.version for published in publisher.wait()] == [1, 5]
    assert [(link.parent, link.version) for link in head_of(store).links] == [(None, 0), (0, 1), (1, 5)]
    assert same(rebuild(store, head_of(store)).state, model)


class _BrokenStore(Store):
    def put_new(self, key: str, data: bytes) -> bool:
        raise OSError(28, "No space left on device")


def test_errors_of_the_background_are_raised(tmp_path: Path, model: Tensors) -> None:
    publisher = Publisher(_BrokenStore(tmp_path), "run-0", FILES)
    publisher.submit(0, model)
    with pytest.raises(OSError, match="No space left"):
        publisher.wait()
    with pytest.raises(OSError, match="No space left"):
        publisher.submit(1, model)


def test_export_loads_anywhere(store: Store, tmp_path: Path) -> None:
    model = {"w": np.arange(6000, dtype=np.float32).reshape(2, 3000)}
    publisher = Publisher(store, "run-0", FILES)
    for version in range(3):
        publisher.publish(version, {"w": model["w"] + version}, {"lr": 0.5})
    assert inspect.export(store, "run-0", tmp_path / "out", version=1) == 1
    assert np.array_equal(load_standard((tmp_path / "out" / "model.safetensors").read_bytes())["w"], model["w"] + 1)
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
    with pytest.raises(FileExistsError, match="is not empty"):
        inspect.export(store, "run-0", tmp_path / "out")
    with pytest.raises(ChainError, match="available are 0 to 2"):
        inspect.export(store, "run-0", tmp_path / "more", version=7)
    with pytest.raises(ChainError, match=r"no chain nope in .*; known: run-0"):
        inspect.versions(store, "nope")
    assert [(e.version, e.form, e.metadata) for e in inspect.versions(store, "run-0")] == [
        (0, "anchor", {"lr": 0.5}),
        (1, "delta", {"lr": 0.5}),
        (2, "delta", {"lr": 0.5}),
    ]


def link(version: int, parent: int | None, size: int) -> Link:
    return Link(version, parent, size, Blob("", 0, ""))


def test_the_cheapest_path() -> None:
    links = [link(0, None, 100), *(link(v, v - 1, 30) for v in range(1, 9)), link(4, None, 100), link(8, 0, 50)]
    assert plan(links, 8, 8) == []
    assert [(x.parent, x.version) for x in plan(links, 7, 8)] == [(7, 8)]
    assert [(x.parent, x.version) for x in plan(links, 5, 8)] == [(5, 6), (6, 7), (7, 8)]
    assert [(x.parent, x.version) for x in plan(links, 0, 8)] == [(0, 8)]
    assert [(x.parent, x.version) for x in plan(links, 1, 7)] == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert [(x.parent, x.version) for x in plan(links, None, 5)] == [(None, 4), (4, 5)]
    with pytest.raises(ChainError, match="no anchor or delta leads to version 9"):
        plan(links, 3, 9)


@given(st.integers(1, 12), st.data())
def test_no_path_is_cheaper(length: int, data: st.DataObject) -> None:
    links = [link(0, None, 50)]
    for version in range(1, length):
        for parent in data.draw(st.sets(st.integers(0, version - 1), min_size=1, max_size=3)):
            links.append(link(version, parent, data.draw(st.integers(1, 60))))
        if data.draw(st.booleans()):
            links.append(link(version, None, data.draw(st.integers(20, 80))))
    base = data.draw(st.none() | st.integers(0, length - 1))

    def cheapest(version: int) -> int:
        if version == base:
            return 0
        ways = [(x.bytes, x.parent) for x in links if x.version == version]
        return min(size + (0 if parent is None else cheapest(parent)) for size, parent in ways)

    path = plan(links, base, length - 1)
    assert sum(x.bytes for x in path) == cheapest(length - 1)
