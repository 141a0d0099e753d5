"""A store that misbehaves: it answers 503, slowly, cut off or not at all; the disk is full; versions come reordered.

The network's faults are made by a proxy in front of a real S3 API.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stretto.weights import chain as chains
from stretto.weights import inspect
from stretto.weights.chain import ChainError, Head
from stretto.weights.publisher import Publisher
from stretto.weights.rebuild import State, rebuild
from stretto.weights.state import fingerprint
from stretto.weights.store import Store, StoreError

Tensors = dict[str, np.ndarray]
Step = Callable[..., Tensors]
FILES = {"config.json": b"{}"}


class Proxy:
    """Passes requests on to `target`, unless told to misbehave."""

    def __init__(self, target: str) -> None:
        self.refuse = 0  # requests still to be answered with 503
        self.cut = ""  # of answers for keys with this in them only half is sent
        self.seconds = 0.0  # each answer waits so long
        self.seen: list[int] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                with contextlib.suppress(ConnectionError):  # whoever asked has gone away
                    self.pass_on()

            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                time.sleep(proxy.seconds)
                if proxy.refuse:
                    proxy.refuse -= 1
                    status, headers, data = 503, {}, b"<Error><Code>SlowDown</Code></Error>"
                else:
                    names = {
                        k.title(): v for k, v in self.headers.items() if k.lower() not in ("host", "accept-encoding")
                    }
                    names.setdefault("Content-Type", "application/octet-stream")  # or urllib calls it a form
                    request = urllib.request.Request(target + self.path, body or None, names, method=self.command)
                    try:
                        with urllib.request.urlopen(request, timeout=30) as reply:
                            status, headers, data = reply.status, dict(reply.headers), reply.read()
                    except urllib.error.HTTPError as error:
                        status, headers, data = error.code, dict(error.headers), error.read()
                proxy.seen.append(status)
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                        self.send_header(name, value)
                length = headers.get("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if proxy.cut and proxy.cut in self.path:
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                elif self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def proxied(s3: Callable[[], Store]) -> Iterator[tuple[Proxy, Store, Store]]:
    """The proxy, the store through it, and the store itself."""
    direct = s3()
    backend = direct._backend.store  # type: ignore[union-attr]
    proxy = Proxy(backend.config["endpoint"])
    store = Store(
        direct.url,
        endpoint=proxy.url,
        access_key_id="test",
        secret_access_key="test",
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "2s"},
        retry_config={
            "max_retries": 3,
            "retry_timeout": timedelta(seconds=5),
            "backoff": {
                "init_backoff": timedelta(milliseconds=10),
                "max_backoff": timedelta(milliseconds=50),
                "base": 2,
            },
        },
    )
    yield proxy, store, direct
    proxy.server.shutdown()


def head_of(store: Store) -> Head:
    found = chains.read_head(store, "run-0")
    assert found is not None
    return found[0]


def test_a_store_that_answers_503_now_and_then_is_asked_again(
    proxied: tuple[Proxy, Store, Store], model: Tensors, step: Step
) -> None:
    proxy, store, _ = proxied
    publisher, state = Publisher(store, "run-0", FILES), None
    for version in range(4):
        proxy.refuse = 2
        model = step(model, version)
        publisher.publish(version, model)
        proxy.refuse = 2
        state = rebuild(store, head_of(store), state).state
        assert state.root == fingerprint(model)
    assert proxy.seen.count(503) >= 16


def test_WGT_1_the_baseline_moves_only_with_head(
    proxied: tuple[Proxy, Store, Store], model: Tensors, step: Step
) -> None:
    """A store that is down: an error that names it, nothing visible, and the next delta starts at what is there."""
    proxy, store, direct = proxied
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(0, model)
    base = rebuild(direct, head_of(direct)).state
    proxy.refuse = 1000
    with pytest.raises(StoreError, match=r"cannot create weights/run-0/.* in s3://bucket"):
        publisher.publish(1, step(model, 1))
    with pytest.raises(StoreError, match="cannot read weights/run-0/HEAD in s3://bucket"):
        chains.read_head(store, "run-0")
    proxy.refuse = 0
    assert head_of(direct).version == 0
    newer = step(model, 2)
    publisher.publish(2, newer)
    link = head_of(store).links[-1]
    assert (link.parent, link.version) == (0, 2)
    assert rebuild(store, head_of(store), base).state.root == fingerprint(newer)


def test_a_slow_store_is_waited_for_and_one_that_hangs_is_named(
    proxied: tuple[Proxy, Store, Store], model: Tensors
) -> None:
    proxy, store, direct = proxied
    Publisher(direct, "run-0", FILES).publish(0, model)
    proxy.seconds = 0.2
    assert rebuild(store, head_of(store)).state.root == fingerprint(model)
    proxy.seconds = 3.0
    with pytest.raises(StoreError, match="cannot read weights/run-0/HEAD"):
        chains.read_head(store, "run-0")


def test_a_transfer_that_breaks_off_changes_nothing(
    proxied: tuple[Proxy, Store, Store], model: Tensors, step: Step
) -> None:
    proxy, store, direct = proxied
    publisher = Publisher(direct, "run-0", FILES)
    publisher.publish(0, model)
    base = rebuild(direct, head_of(direct)).state
    publisher.publish(1, step(model, 1))
    proxy.cut = "/deltas/"
    with pytest.raises((StoreError, ChainError), match="deltas"):
        rebuild(store, head_of(store), base)
    assert fingerprint(base.tensors) == base.root == fingerprint(model)
    proxy.cut = ""
    assert rebuild(store, head_of(store), base).state.root == fingerprint(step(model, 1))


class _Full(Store):
    """A disk with room for so many more bytes."""

    room = 10**9

    def put_new(self, key: str, data: bytes) -> bool:
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device", key)
        self.room -= len(data)
        return super().put_new(key, data)


@pytest.mark.parametrize("room", [0, 300, 700])
def test_a_full_disk_leaves_the_old_version_and_the_next_try_goes_through(
    tmp_path: Path, model: Tensors, step: Step, room: int
) -> None:
    store = _Full(tmp_path)
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(0, model)
    store.room = room
    with pytest.raises(OSError, match="No space left on device"):
        publisher.publish(1, step(model, 1))
    assert rebuild(store, head_of(store)).state.root == fingerprint(model)
    store.room = 10**9
    publisher.publish(2, step(model, 2))
    assert rebuild(store, head_of(store)).state.root == fingerprint(step(model, 2))
    assert inspect.verify(store, "run-0") == []


def _chain(store: Store, model: Tensors, step: Step, versions: int) -> tuple[Head, State]:
    """HEAD of a chain, and its version 0."""
    publisher = Publisher(store, "run-0", FILES)
    publisher.publish(0, model)
    first = rebuild(store, head_of(store)).state
    for version in range(1, versions):
        model = step(model, version)
        publisher.publish(version, model)
    return head_of(store), first


def _copy(state: State) -> State:
    return replace(state, tensors={name: array.copy() for name, array in state.tensors.items()})


def test_reordered_and_repeated_versions_make_no_difference(tmp_path: Path, model: Tensors, step: Step) -> None:
    store = Store(tmp_path)
    head, first = _chain(store, model, step, 5)
    shuffled = msgspec.structs.replace(head, links=[*head.links[::-1], *head.links])
    built = rebuild(store, shuffled, _copy(first))
    assert built.state.root == head.root and built.notes == []
    for base in (None, built.state):
        assert rebuild(store, shuffled, base).state.root == head.root


def test_a_link_to_another_versions_manifest_is_refused(tmp_path: Path, model: Tensors, step: Step) -> None:
    store = Store(tmp_path)
    head, first = _chain(store, model, step, 4)
    one, two = (link for link in head.links if link.form == "delta" and link.version in (1, 2))
    swapped = [msgspec.structs.replace(one, manifest=two.manifest) if link is one else link for link in head.links]
    wrong = msgspec.structs.replace(head, links=[link for link in swapped if link.form == "delta" or link.version == 0])
    with pytest.raises(ChainError, match=r"describes version 2 of chain run-0 \(parent 1\), HEAD of run-0 says 1"):
        rebuild(store, wrong, _copy(first))


def test_a_manifest_without_its_shard_is_named(tmp_path: Path, model: Tensors, step: Step) -> None:
    store = Store(tmp_path)
    head, first = _chain(store, model, step, 3)
    (key,) = (key for key in store.list() if "/deltas/000002" in key)
    store.delete(key)
    only = msgspec.structs.replace(
        head, links=[link for link in head.links if link.form == "delta" or link.version == 0]
    )
    with pytest.raises(ChainError, match=f"cannot use the delta to version 2: object {key} is missing from"):
        rebuild(store, only, _copy(first))
    assert any(key in problem for problem in inspect.verify(store, "run-0", 2))


def test_WGT_7_a_dirty_folder_is_harmless(tmp_path: Path, model: Tensors, step: Step) -> None:
    """Leftovers of other starts, under every name that a publisher may think of."""
    store = Store(tmp_path)
    for name in (
        "deltas/000001-from-000000-0000/0",
        "anchors/000000-0000/model.safetensors",
        "manifests/000001-x.json",
    ):
        store.put(f"weights/run-0/{name}", b"rubbish")
    head, first = _chain(store, model, step, 3)
    assert rebuild(store, head, _copy(first)).state.root == rebuild(store, head).state.root == head.root
    assert inspect.verify(store, "run-0") == []


LEAVING = """
import logging, sys
from pathlib import Path
from stretto.config import WeightsConfig
from stretto.weights.follower import follow
logging.basicConfig()
follow(sys.argv[1], "run-0", "a", [], None, Path(sys.argv[2]), WeightsConfig(), None)
"""


def test_a_follower_leaves_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """It listens and says nothing: SIGTERM ends the follower within seconds, not after all retries."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = os.environ | {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us"}
        environment |= {"AWS_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "AWS_ALLOW_HTTP": "true"}
        command = [sys.executable, "-c", LEAVING, "s3://bucket/runs", str(tmp_path / "cache")]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            silent.settimeout(30)
            connection, _ = silent.accept()  # it has asked
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            _, said = process.communicate(timeout=40)
            connection.close()
        finally:
            process.kill()
    assert time.monotonic() - begun < 15
    assert process.returncode == 0
    assert "the store has not answered yet: going without" in said
