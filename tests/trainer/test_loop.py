"""Pins the trainer as a service, against an orchestrator peer that speaks real HTTP and a real store: order of
publication and commit, resume (2N = N + N), batches without signal, steps that aren't finite, malformed
rollouts, and SIGTERM."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
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
from stretto.model.checkpoint import bf16_bits
from stretto.records import PAUSED_HEADER, Batch, Trained, decode, encode
from stretto.trainer.checkpoint import CheckpointError
from stretto.trainer.client import OrchestratorError
from stretto.trainer.loop import TrainerError, train
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
    committed: int | None = None  # what the ledger says
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
            self.chain, self.committed = said["chain"], said["version"]
            self.calls.append(("version", said["version"]))
        else:
            said = decode(body, Trained)
            assert said.version == said.batch + 1
            self.committed = said.version
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
            if self.path == "/status":
                self.answer(200, json.dumps({"version": peer.committed, "chain": peer.chain}).encode())
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


def test_ASY_4_batches_become_versions(run, peer, maker):
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


def test_LED_2_twice_two_steps_equal_four_bit_for_bit(run, peer, maker):
    for version in range(4):
        give(peer, maker.batch(version=version))
    train(config(run), run, peer.url)
    whole = weights(peer)
    state = (run / "checkpoints" / "v000004" / "resume" / "state.safetensors").read_bytes()

    forget(run, peer)
    train(config(run, steps=2), run, peer.url)
    assert (peer.calls[-1], peer.chain) == (("trained", 2), "run-1")
    peer.calls.clear()
    train(config(run), run, peer.url)
    assert peer.calls[0] == ("trained", 2) and set(peer.calls[1:]) == set(calls_of(2, 3))
    assert peer.chain == "run-1", "it goes on with the chain it left"
    assert equal(weights(peer), whole)
    assert (run / "checkpoints" / "v000004" / "resume" / "state.safetensors").read_bytes() == state
    assert (run / "checkpoints" / "v000004" / "tokenizer.json").read_text() == "{}"
    # A run that is complete has nothing to say but that.
    peer.calls.clear()
    train(config(run), run, peer.url)
    assert peer.calls == [("trained", 4)] and equal(weights(peer), whole)


def calls_of(*versions: int) -> list[tuple[str, int]]:
    return [call for version in versions for call in (("batch", version), ("trained", version + 1))]


def forget(run: Path, peer: Peer) -> None:
    """As if the run had not begun; the batches stay."""
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    peer.chain, peer.committed = "", None


def test_LED_3_versions_after_the_checkpoint_are_made_again_and_go_on_the_same_chain(run, peer, maker):
    for version in range(4):
        give(peer, maker.batch(version=version))
    train(config(run), run, peer.url)
    whole, chain = weights(peer), peer.chain
    peer.calls.clear()

    # Killed at version 3, whose last checkpoint was that of version 2 (the later ones are taken away).
    forget(run, peer)
    train(config(run, steps=3, checkpoint_every=2), run, peer.url)
    (run / "checkpoints" / "latest").write_text("v000002")
    published = [line["version"] for line in lines(run, "publish")]
    peer.calls.clear()
    train(config(run), run, peer.url)
    assert peer.calls[:2] == [("batch", 2), ("trained", 3)], (
        "the batch after the checkpoint again, then HEAD is compared"
    )
    assert peer.calls[2:] == calls_of(3)
    assert equal(weights(peer), whole) and chain != peer.chain == "run-1"
    assert [line["version"] for line in lines(run, "publish")] == [*published, 4], "nothing is published twice"
    assert [line["version"] for line in lines(run, "step")] == [1, 2, 3, 4], "nor said twice"
    assert any("made again from the checkpoint of version 2" in line["text"] for line in lines(run, "event"))


def test_a_version_that_was_published_but_not_committed_is_committed_first(run, peer, maker):
    for version in range(4):
        give(peer, maker.batch(version=version))
    train(config(run, steps=2), run, peer.url)
    peer.committed = 1  # the word was lost with the process: HEAD is ahead of the ledger
    shutil.rmtree(run / "checkpoints")
    peer.calls.clear()
    train(config(run, steps=3), run, peer.url)
    assert peer.calls == [("batch", 0), ("batch", 1), ("trained", 2), *calls_of(2)]


def test_a_published_version_never_comes_to_mean_other_weights(run, peer, maker):
    """As on hardware that adds in another order each time; here the learning rate was changed in between."""
    for version in range(3):
        give(peer, maker.batch(version=version))
    train(config(run, steps=2), run, peer.url)
    old = weights(peer)
    shutil.rmtree(run / "checkpoints")
    peer.calls.clear()
    train(config(run, steps=2, lr=2e-3), run, peer.url)
    assert peer.calls == [("batch", 0), ("batch", 1), ("trained", 2)] and peer.chain == "run-0"
    assert equal(weights(peer), old)
    assert equal(bf16_bits(huggingface.load(run / "checkpoints" / "v000002")), old), "it trains what is served"
    (alarm,) = [line["text"] for line in lines(run, "event") if line.get("alarm") and "made again" in line["text"]]
    assert "goes on from the published one" in alarm and "run-0" in alarm


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


def test_the_guard_is_said_once_and_counts_on_after_a_restart(run, peer, maker):
    """Rollouts of another policy than they say: every token is far away. Smaller steps, one sentence."""
    give(peer, maker.batch(version=0))
    for version in range(1, 4):
        give(peer, far(maker.batch(version=version, sampled_by=version - 1)))
    train(config(run, steps=2), run, peer.url)
    train(config(run, steps=4), run, peer.url)
    slowed = [line["text"] for line in lines(run, "event") if "trainer.guard (0.05)" in line["text"]]
    assert len(slowed) == 2 and "step to version 2: the policy has moved by 0." in slowed[0]  # once per start
    scales = [line["lr_scale"] for line in lines(run, "step")]
    assert 1.0 == scales[0] > scales[1] > scales[2] > scales[3] > 0, "it does not start again at 1 after the restart"
    assert {line["lr"] for line in lines(run, "step")} == {5e-4, 1e-3}, "the schedule is logged as it is"


def far(data):
    """The batch, had each token been less than half as likely when it was sampled."""
    rollouts = []
    for rollout in data.rollouts:
        segments = []
        for segment in rollout.segments:
            logprobs = (segment.logprobs_T - 0.8).astype("<f4").tobytes()
            segments.append(msgspec.structs.replace(segment, logprobs=logprobs))
        rollouts.append(msgspec.structs.replace(rollout, segments=segments))
    data.rollouts = rollouts
    return data


def test_a_missing_checkpoint_is_said(run, peer, maker):
    """Never a silent start from the base model."""
    for version in range(4):
        give(peer, maker.batch(version=version))
    train(config(run, checkpoint_every=1), run, peer.url)
    (run / "checkpoints" / "latest").unlink()
    train(config(run), run, peer.url)
    said = [line["text"] for line in lines(run, "event") if line.get("alarm") and "checkpoint" in line["text"]]
    assert len(said) == 1 and "latest is missing" in said[0] and "goes on from" in said[0] and "v000004" in said[0]

    for path in (run / "checkpoints").glob("v*"):
        (path / "resume" / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no other whole checkpoint"):
        train(config(run), run, peer.url)

    shutil.rmtree(run / "checkpoints")
    train(config(run), run, peer.url)
    said = [line["text"] for line in lines(run, "event") if line.get("alarm") and "checkpoint" in line["text"]]
    assert "holds no checkpoint, though this run has trained before" in said[1]


def hotter(data):
    """The rollouts as an engine would have sampled them at another temperature than it says."""
    rollouts = []
    for rollout in data.rollouts:
        (segment,) = rollout.segments
        logprobs = (2.5 * segment.logprobs_T).astype("<f4").tobytes()
        rollouts.append(
            msgspec.structs.replace(rollout, segments=[msgspec.structs.replace(segment, logprobs=logprobs)])
        )
    return dataclasses.replace(data, rollouts=rollouts)


def test_ENG_9_the_first_batch_decides_whether_engine_and_trainer_compute_the_same_policy(run, peer, maker):
    give(peer, hotter(maker.batch(version=0)))
    with pytest.raises(TrainerError, match="do not compute the same policy") as caught:
        train(config(run), run, peer.url)
    assert "k3 is" in str(caught.value) and "temperature" in str(caught.value)
    assert peer.head() == 0 and ("trained", 1) not in peer.calls and not (run / "checkpoints").exists()


def test_ENG_9_a_difference_that_comes_later_is_an_alarm(run, peer, maker):
    give(peer, maker.batch(version=0))
    give(peer, hotter(maker.batch(version=1)))
    train(config(run, steps=2, mismatch_every=1), run, peer.url)
    said = [line["text"] for line in lines(run, "event") if line.get("alarm")]
    assert any(text.startswith("step to version 2:") and "jumped" in text for text in said)
    assert any("more than twice or less than half" in text for text in said)


def test_each_step_says_how_well_engine_and_trainer_agree_by_lag(run, peer, maker):
    give(peer, maker.batch(version=0))
    give(peer, maker.batch(version=1, sampled_by=0))
    train(config(run, steps=2), run, peer.url)
    first, second = (line["agreement"] for line in lines(run, "step"))
    assert set(first) == {"all", "0"} and set(second) == {"all", "1"}
    assert first["0"]["k3"] < 1e-9 < second["1"]["k3"] and first["0"]["coverage"] == 1.0
    assert {"k1", "mean_dlogp", "p99_dlogp", "max_dlogp", "mean_dp", "f2", "disagreement", "replaced"} <= set(
        first["0"]
    )


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
