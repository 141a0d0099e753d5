"""Staleness 0 is the plain loop: sample, grade, learn, load; then again. Bit for bit, through kills of everything.

`plain` below is that loop, 40 lines without an orchestrator, a ledger, workers, a publisher or a follower. It uses the
same engine, harness, grader and learner, each rollout for itself, one after the other. The system plays the same
rollouts side by side, and in one run is killed with -9 and resumed on the way; all must end with the same weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from stretto.config import Config, dump, load
from stretto.engine.client import EngineClient
from stretto.grading.grader import Grader
from stretto.harness.chat import Chat
from stretto.harness.ending import Ending
from stretto.harness.loop import play
from stretto.launch.local import Processes, free_port, service
from stretto.model.checkpoint import bf16_bits
from stretto.records import Batch, BatchItem, Lease, Receipt, Sampling, decode, encode
from stretto.rollouts.advantages import advantages, has_signal
from stretto.rollouts.record import payload, receipt
from stretto.rollouts.seeds import derive
from stretto.rollouts.source import Prompts
from stretto.sandbox.pool import BoxPool
from stretto.tasks.folder import read_all
from stretto.trainer.learner import Learner
from stretto.weights.chain import read_head
from stretto.weights.state import fingerprint
from stretto.weights.store import Store
from stretto.weights.tensorfile import default_tag, pack

STEPS = 4
SETTINGS = [
    "model.numerics=exact",
    "rollouts.max_staleness=0",
    "rollouts.groups_per_step=2",
    "rollouts.group_size=4",
    "rollouts.concurrency=16",
    "engine.slots=16",
    "sandbox.seconds=20",  # however busy the machine is: what a tool says must not depend on it
    "grading.seconds=20",
    "tasks.train=24",
    "tasks.heldout=0",
    "tasks.new_templates=0",
    "trainer.lr=1e-3",
    "trainer.warmup_steps=1",
    "trainer.mismatch_every=0",
    "trainer.checkpoint_every=3",
    "eval.every=0",
    "launch.clusters=1",
]


async def plain(config: Config, run: Path, engine: EngineClient, session: aiohttp.ClientSession) -> list[str]:
    """The fingerprint of each version."""
    learner, chat = Learner(config, None), Chat(config.model.folder)
    prompts, ordinals = Prompts(read_all(run / "tasks" / "train"), config.run.seed), itertools.count()
    found = [fingerprint(bf16_bits(learner.model))]
    async with boxes(config) as pool:
        grader = Grader(config.grading, pool)

        async def attempt(ordinal: int, member: int, version: int) -> tuple[bytes, Receipt]:
            draw, group = derive(config.run.seed, "sampling", ordinal, member), f"g{ordinal:07d}"
            sampling = Sampling(temperature=config.rollouts.temperature, top_p=config.rollouts.top_p, seed=draw)
            where = {"engine": engine.url, "version": version, "deadline": time.time() + 600}
            task, name = prompts.task(ordinal), f"{group}-{member:02d}"
            lease = Lease(rollout=name, group=group, purpose="train", task=task, sampling=sampling, **where)
            played = await play(lease, engine, chat, pool, config.harness)
            seed = derive(config.run.seed, "grading", group)
            submitted = played.ending is Ending.SUBMITTED
            grade = (await grader.grade(task, [played.files], seed))[0] if submitted else None
            rollout = payload(lease, played, grade, config.grading, worker="plain", started=0.0, ended=0.0)
            return encode(rollout), receipt(rollout, version)

        for version in range(STEPS):
            groups: list[list[tuple[bytes, Receipt]]] = []
            while len(groups) < config.rollouts.groups_per_step or not any(signal_of(group) for group in groups):
                for ordinal in itertools.islice(ordinals, config.rollouts.groups_per_step):
                    members = range(config.rollouts.group_size)
                    groups.append([await attempt(ordinal, member, version) for member in members])
            batch, payloads = batch_of(groups, version)
            learner.step(learner.prepare(batch, payloads))
            found.append(fingerprint(bf16_bits(learner.model)))
            path, tensors = run / f"plain-{version + 1}.safetensors", bf16_bits(learner.model)
            path.write_bytes(pack(tensors, {name: default_tag(array) for name, array in tensors.items()}))
            update = {"version": version + 1, "path": str(path), "fingerprint": found[-1]}
            async with session.post(f"{engine.url}/update_weights", json=update) as answer:
                assert answer.status == 200, await answer.text()
        await grader.close()
    return found


def signal_of(group: list[tuple[bytes, Receipt]]) -> bool:
    return has_signal([word.reward for _, word in group])


def batch_of(groups: list[list[tuple[bytes, Receipt]]], version: int) -> tuple[Batch, list[bytes]]:
    items, payloads = [], []
    for group in filter(signal_of, groups):
        values = advantages([word.reward for _, word in group])
        for (data, word), advantage in zip(group, values, strict=True):
            whose = {"rollout": word.rollout, "group": word.group, "key": word.key}
            items.append(BatchItem(**whose, reward=word.reward, advantage=advantage, oldest_version=version))
            payloads.append(data)
    rollouts = sum(len(group) for group in groups)
    counts = {"groups": len(groups), "rollouts": rollouts, "dropped_equal": 0, "solve_rate": 0.0}
    return Batch(run="plain", version=version, items=items, **counts, staleness=[0] * len(items)), payloads


@contextlib.asynccontextmanager
async def boxes(config: Config):
    pool = BoxPool(config.sandbox)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def run_plain(config: Config, run: Path) -> list[str]:
    (run / "config.toml").write_text(dump(config))
    processes = Processes(run)
    port = free_port("127.0.0.1")
    flags = {"run": run, "name": "engine", "host": "127.0.0.1", "port": port, "model": config.model.folder}
    child = processes.start("engine", service("engine", **flags, version=0), f"http://127.0.0.1:{port}")

    async def go() -> list[str]:
        async with aiohttp.ClientSession() as session:
            return await plain(config, run, EngineClient(str(child.url), session), session)

    try:
        processes.wait_ready([child])
        return asyncio.run(go())
    finally:
        processes.stop()


def stretto(root: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stretto.cli", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def batches(run: Path) -> list[Batch]:
    with contextlib.closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        return [decode(record, Batch) for (record,) in db.execute("SELECT record FROM batches ORDER BY version")]


def content(batch: Batch) -> list[tuple[str, float, float]]:
    """What is trained; a rollout that was leased again has another number, not other tokens."""
    return [(item.rollout.partition("r")[0], item.reward, item.advantage) for item in batch.items]


def head(run: Path) -> tuple[int, str]:
    store = Store(run / "store")
    chain = store.list("weights")[0].split("/")[1]
    found = read_head(store, chain)
    assert found is not None
    return found[0].version, found[0].root


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of 2N steps that nothing disturbed."""
    root = tmp_path_factory.mktemp("whole")
    process = stretto(root, "train", "--name", "x", *SETTINGS, f"trainer.steps={STEPS}")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    return root / "runs" / "x"


def test_ASY_2_staleness_0_equals_the_plain_loop_bit_for_bit(whole, tmp_path):
    place = ["run.name=plain", f"run.root={json.dumps(str(tmp_path))}"]
    config = load("quickstart", [*SETTINGS, f"trainer.steps={STEPS}", *place])
    run = tmp_path / "plain"
    run.mkdir()
    (run / "tasks").symlink_to(whole / "tasks")
    fingerprints = run_plain(config, run)
    assert len(set(fingerprints)) == STEPS + 1, "the weights move at every step"
    assert head(whole) == (STEPS, fingerprints[-1])


def test_LED_1_2N_steps_equal_N_a_kill_and_N(whole, tmp_path):
    run = tmp_path / "runs" / "x"
    process = stretto(tmp_path, "train", "--name", "x", *SETTINGS, f"trainer.steps={STEPS}")
    try:
        end = time.monotonic() + 200
        while not (run / "ledger.sqlite").exists() or len(batches_so_far(run)) < STEPS // 2 + 1:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)  # and all of its services die with it, in the middle of a step
        process.communicate(timeout=30)
    time.sleep(0.5)
    process = stretto(tmp_path, "resume", "x")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert [content(batch) for batch in batches(run)] == [content(batch) for batch in batches(whole)]
    assert head(run) == head(whole)


def batches_so_far(run: Path) -> list[Batch]:
    try:
        return batches(run)
    except sqlite3.OperationalError:
        return []
