"""Pins the trainer as a service, against an orchestrator peer that speaks real HTTP and a real store: order of
publication and commit, resume (2N = N + N), batches without signal, steps that aren't finite, malformed
rollouts, and SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import msgspec
import numpy as np
import pytest

from stretto.config import Config, dump, parse
from stretto.model import checkpoint as huggingface
from stretto.records import PAUSED_HEADER, Batch, Trained, decode, encode
from stretto.trainer.client import OrchestratorError
from stretto.trainer.loop import TrainerError, train
from stretto.trainer.publishing import bf16_bits
from stretto.trainer.samples import BatchError
from stretto.watch.metrics import read
from stretto.weights.chain import read_head
from stretto.weights.rebuild import rebuild
from stretto.weights.store import Store


@dataclass
class Peer:
    """An orchestrator with the batches it was given. `calls` is what the trainer said, in order."""

    store: Store
    url: str = ""
    batches: dict[int, Batch] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    chain: str = ""
    heads: list[int] = field(default_factory=list)  # HEAD's version each time the trainer commits or starts
    unavailable: int = 0  # so many requests are answered by closing the connection
    paused: int = 0  # so many requests for a batch are answered while training is paused

    def head(self) -> int:
        found = read_head(self.store, self.chain)
        assert found is not None
        return found[0].version

    def post(self, path: str, body: bytes) -> None:
        if path == "/version":
            said = json.loads(body)
            self.chain = said["chain"]
            self.calls.append(("version", said["version"]))
        else:
            said = decode(body, Trained)
            assert said.version == said.batch + 1
            self.calls.append(("trained", said.version))
        self.heads.append(self.head())

    def get(self, version: int) -> bytes:
        self.calls.append(("batch", version))
        if version not in self.batches:
            time.sleep(0.05)
            return b""
        return encode(self.batches[version])


@pytest.fixture
def peer(tmp_path):
    peer = Peer(Store(tmp_path / "run" / "store"))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            if self.lost():
                return
            peer.post(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(200, b"{}")

        def do_GET(self):
            if self.lost():
                return
            peer.paused -= 1
            if peer.paused >= 0:
                time.sleep(0.1)
                self.answer(204, b"", {PAUSED_HEADER: "1"})
                return
            data = peer.get(int(parse_qs(urlparse(self.path).query)["version"][0]))
            self.answer(200 if data else 204, data)

        def lost(self) -> bool:
            peer.unavailable -= 1
            return peer.unavailable >= 0

        def answer(self, status, data, headers=()):
            self.send_response(status)
            for name in headers:
                self.send_header(name, headers[name])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    peer.url = f"http://127.0.0.1:{server.server_port}"
    yield peer
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(tmp_path, model):
    """A run folder with a starting checkpoint."""
    huggingface.save(model, tmp_path / "start")
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    (tmp_path / "run").mkdir(exist_ok=True)
    return tmp_path / "run"


def config(run: Path, **trainer: object) -> Config:
    return parse(
        {
            "run": {"name": "run", "root": str(run.parent)},
            "model": {"path": str(run.parent / "start")},
            "trainer": {"steps": 4, "lr": 1e-3, "mismatch_every": 2, "checkpoint_every": 2, **trainer},
        }
    )


def give(peer: Peer, data, change=lambda batch: batch) -> None:
    for item, payload in zip(data.batch.items, data.payloads, strict=True):
        peer.store.put(item.key, payload)
    peer.batches[data.batch.version] = change(data.batch)


def lines(run: Path, kind: str) -> list[dict]:
    return [line for line in read(run / "metrics.jsonl") if line["kind"] == kind]


def weights(peer: Peer) -> dict[str, np.ndarray]:
    head, _ = read_head(peer.store, peer.chain)
    return rebuild(peer.store, head).state.tensors


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_batches_become_versions(run, peer, maker):
    start = bf16_bits(maker.model)
    for version in range(4):
        give(peer, maker.batch(version=version, sampled_by=max(0, version - 1)))
    peer.unavailable = 2  # a restart of the orchestrator is waited for
    train(config(run), run, peer.url)
    said = [call for call in peer.calls if call[0] != "batch"]
    assert said == [("version", 0), *(("trained", v) for v in range(1, 5))]
    assert peer.calls[0] == ("version", 0), "the start version is there before any batch is asked for"
    assert peer.heads == [0, 1, 2, 3, 4], "a version is committed when HEAD shows it, not before"
    assert peer.chain == "run-0"
    assert (run / "checkpoints" / "latest").read_text() == "v000004"
    exported = huggingface.load(run / "checkpoints" / "v000004")
    assert equal(weights(peer), bf16_bits(exported)) and not equal(weights(peer), start)

    steps = lines(run, "step")
    assert [line["version"] for line in steps] == [1, 2, 3, 4]
    assert all(line["applied"] and line["grad_norm"] > 0 and line["rollouts"] == 8 for line in steps)
    assert steps[0]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert set(steps[0]["seconds"]) == {"wait", "load", "compute", "publish"}
    assert [line["version"] for line in lines(run, "publish")] == [0, 1, 2, 3, 4]
    assert {line["what"] for line in lines(run, "busy")} == {"wait", "compute", "publish"}
    measured = lines(run, "mismatch")
    assert [line["version"] for line in measured] == [2, 4]
    # The rollouts were really made by version 0; those of batch 1 also say so.
    assert measured[0]["k3"] < 1e-9 and measured[0]["stale_k3"] > 1e-9
    assert {key.split("/")[1] for key in peer.store.list("weights")} == {"run-0"}


def test_twice_two_steps_equal_four_bit_for_bit(run, peer, maker, tmp_path):
    for version in range(4):
        give(peer, maker.batch(version=version))
    train(config(run), run, peer.url)
    whole = weights(peer)
    state = (run / "checkpoints" / "v000004" / "resume" / "state.safetensors").read_bytes()

    for path in (run / "checkpoints").rglob("*"):
        if path.is_file():
            path.unlink()
    train(config(run, steps=2), run, peer.url)
    assert (peer.calls[-1], peer.chain) == (("trained", 2), "run-1")
    peer.calls.clear()
    train(config(run), run, peer.url)
    assert peer.calls[0] == ("version", 2) and peer.chain == "run-2"
    assert equal(weights(peer), whole)
    assert (run / "checkpoints" / "v000004" / "resume" / "state.safetensors").read_bytes() == state
    assert (run / "checkpoints" / "v000004" / "tokenizer.json").read_text() == "{}"
    # A run that is complete only publishes what it has.
    peer.calls.clear()
    train(config(run), run, peer.url)
    assert peer.calls == [("version", 4)] and equal(weights(peer), whole)


def test_a_batch_without_signal_is_a_version_of_equal_weights(run, peer, maker):
    give(peer, maker.batch(version=0), lambda batch: msgspec.structs.replace(batch, items=[], staleness=[]))
    train(config(run, steps=1), run, peer.url)
    assert peer.calls[-1] == ("trained", 1) and equal(weights(peer), bf16_bits(maker.model))
    assert lines(run, "step")[0]["applied"] is False and not lines(run, "event")[-1].get("alarm")


def test_a_pause_is_no_waiting(run, peer, maker, monkeypatch):
    """Nobody makes a batch while the policy is evaluated: no complaint, and no idle time in the first step."""
    monkeypatch.setattr("stretto.trainer.loop.PATIENCE_SECONDS", 0.3)
    give(peer, maker.batch(version=0))
    peer.paused = 10  # a second in all
    train(config(run, steps=1), run, peer.url)
    assert lines(run, "step")[0]["seconds"]["wait"] < 0.5
    assert all(line["end"] - line["start"] < 0.5 for line in lines(run, "busy") if line["what"] == "wait")
    assert not any("without a batch" in line["text"] for line in lines(run, "event"))


def test_waiting_is_said(run, peer, maker, monkeypatch):
    monkeypatch.setattr("stretto.trainer.loop.PATIENCE_SECONDS", 0.3)
    data = maker.batch(version=0)
    threading.Timer(1.0, give, [peer, data]).start()
    train(config(run, steps=1), run, peer.url)
    assert lines(run, "step")[0]["seconds"]["wait"] > 0.3
    assert any(f"without a batch for version 0 from {peer.url}" in line["text"] for line in lines(run, "event"))


def test_a_failed_commit_makes_no_checkpoint(run, peer, maker, monkeypatch):
    """Whatever stands in a checkpoint was committed: a resumed run is never ahead of the ledger."""
    for version in range(2):
        give(peer, maker.batch(version=version))

    def refuse(self, batch):
        raise OrchestratorError("the orchestrator is gone")

    monkeypatch.setattr("stretto.trainer.client.Orchestrator.trained", refuse)
    with pytest.raises(OrchestratorError, match="gone"):
        train(config(run, steps=2), run, peer.url)
    assert not (run / "checkpoints").exists() and peer.head() == 1


def overflowing(batch: Batch) -> Batch:
    """Finite as float64, infinite as float32."""
    items = [msgspec.structs.replace(item, advantage=1e39) for item in batch.items]
    return msgspec.structs.replace(batch, items=items)


def test_a_step_that_is_not_finite_is_skipped_alarmed_and_kept(run, peer, maker):
    start = bf16_bits(maker.model)
    give(peer, maker.batch(version=0), overflowing)
    train(config(run, steps=1), run, peer.url)
    assert peer.calls[-1] == ("trained", 1) and equal(weights(peer), start)
    alarm = next(line for line in lines(run, "event") if line.get("alarm"))
    assert "not finite" in alarm["text"]
    kept = run / "rejected" / "v000000"
    assert decode((kept / "batch.msgpack").read_bytes(), Batch) == peer.batches[0]
    assert len(list(kept.iterdir())) == 1 + len(peer.batches[0].items)


def test_three_such_steps_in_a_row_end_the_run(run, peer, maker):
    for version in range(4):
        give(peer, maker.batch(version=version), overflowing)
    with pytest.raises(TrainerError, match="not finite"):
        train(config(run), run, peer.url)
    assert peer.calls[-1] != ("trained", 3) and peer.head() == 2


def test_a_malformed_rollout_ends_the_run_and_makes_no_version(run, peer, maker):
    give(peer, maker.batch(version=0))
    item = peer.batches[0].items[3]
    peer.store.put(item.key, peer.store.get(item.key)[:-20])
    with pytest.raises(BatchError, match=f"rollout {item.rollout}"):
        train(config(run), run, peer.url)
    peer.store.delete(item.key)
    with pytest.raises(BatchError, match=f"rollout {item.rollout}: the store holds no payload"):
        train(config(run), run, peer.url)
    assert peer.head() == 0 and not (run / "checkpoints").exists()


def test_sigterm_writes_a_checkpoint_and_exits_0(run, peer, maker):
    give(peer, maker.batch(version=0))
    (run / "config.toml").write_text(dump(config(run)))
    command = [sys.executable, "-m", "stretto.launch.service", "trainer", "--run", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--orchestrator", peer.url], env=environment, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while ("batch", 1) not in peer.calls or ("trained", 1) not in peer.calls:
            assert process.poll() is None and time.monotonic() < deadline, "the trainer does not ask for a second batch"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert (run / "checkpoints" / "latest").read_text() == "v000001"
    exported = bf16_bits(huggingface.load(run / "checkpoints" / "v000001"))
    assert equal(exported, weights(peer)) and not equal(exported, bf16_bits(maker.model))
