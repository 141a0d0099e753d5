"""`stretto serve` with vLLM as a user starts it: the shipped model and its tied head, a kill that leaves nothing
behind, a restart on the same port, a core that dies, and a named refusal of what this build can't do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import torch

from stretto.config import ModelConfig
from stretto.engine.client import EngineClient, EngineError
from stretto.launch.local import free_port
from stretto.model import checkpoint
from stretto.records import GenerateRequest, Sampling

from .conftest import TOLERANCE, Served, Version, version_of

START_SECONDS = 400.0
PROMPT = list(range(5, 60))


@contextmanager
def serve(log: Path, port: int, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    options = ["engine.backend=vllm", "engine.slots=8", *words]
    command = [sys.executable, "-m", "stretto.cli", "serve", "nano", "--port", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "serving on" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process], seconds: float = 15.0) -> bool:
    return not psutil.wait_procs(processes, seconds)[1]


async def test_killed_and_started_again(tmp_path: Path) -> None:
    log, port, unknown = tmp_path / "log", free_port("127.0.0.1"), ["engine.routes=unknown", "trainer.replay=false"]
    folder = ModelConfig().folder
    model = checkpoint.load(folder)
    shipped = Version(folder / "model.safetensors", "", model)
    with torch.no_grad():
        moved = checkpoint.load(folder)
        for parameter in moved.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.add_(0.02 * noise).copy_(parameter.to(torch.bfloat16))
    other = version_of(moved, tmp_path / "other")
    request = GenerateRequest(ids=PROMPT, max_tokens=40, stop=[], sampling=Sampling(seed=3))
    async with aiohttp.ClientSession() as session:
        served = Served(EngineClient(f"http://127.0.0.1:{port}", session), None)
        with serve(log, port, *unknown) as process:
            wait_for(process, log)
            first = await served.client.generate(request, 60)
            logprobs = np.frombuffer(first.logprobs, "<f4")
            assert np.abs(logprobs - shipped.logprobs(PROMPT, first.ids)).max() < TOLERANCE
            assert np.frombuffer(first.versions, "<i4").tolist() == [0] * 40
            assert (await served.update(1, other))["status"] == 200
            second = await served.client.generate(request, 60)
            logprobs = np.frombuffer(second.logprobs, "<f4")
            assert np.abs(logprobs - other.logprobs(PROMPT, second.ids)).max() < TOLERANCE  # the tied head's, too
            children = family(process)
            assert len(children) >= 2  # vLLM's core and its worker
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert gone(children)
        with serve(log, port, *unknown) as process:
            wait_for(process, log)
            again = await served.client.generate(request, 60)
            assert again.ids == first.ids and again.logprobs == first.logprobs
            children = family(process)
            core = next(child for child in psutil.Process(process.pid).children() if child.children())
            core.kill()  # the front says so and ends
            assert process.wait(60) == 1 and "its loop failed" in log.read_text()
            assert gone(children)
        try:
            await served.client.generate(request, 5)
        except EngineError as error:
            assert "can't be reached" in str(error)


def test_routes_that_this_build_cannot_return_are_refused_by_name(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serve(log, free_port("127.0.0.1")) as process:
        assert process.wait(START_SECONDS) == 1
    last = log.read_text().splitlines()[-1]
    assert "engine: this vLLM can't return the experts it routes to (AuxOutput Connector" in last
    assert "engine.routes = unknown with trainer.replay = false" in last
