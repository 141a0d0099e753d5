"""The engine serves the DeepSeek-V3 family: tokens, log-probs and routes are those of the whole sequence at once, and a
published version arrives with its float32 biases."""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.bench.parity import RANDOM, random_network
from stretto.config import EngineConfig
from stretto.engine.runner import Runner, Serving
from stretto.engine.scheduler import Ended
from stretto.engine.standby import Standby, WeightsRefused, model_fingerprint
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.records import GenerateRequest, Sampling
from stretto.weights.publisher import Publisher
from stretto.weights.store import Store

torch.set_num_threads(1)
SPEC = RANDOM["deepseek_v3"]


def test_what_is_served_is_what_the_network_says_of_the_whole_sequence() -> None:
    events: queue.Queue[Ended] = queue.Queue()
    model = random_network(SPEC, seed=3)
    config = EngineConfig(slots=4, max_tokens=128, prefill_tokens=32)
    deliver = lambda batch: [events.put(event) for event in batch]  # noqa: E731
    runner = Runner(model, config, serving=Serving(3, ""), seed=0, deliver=deliver)
    assert runner.cache.k[0].shape[-1] == 20 and runner.cache.v[0].shape[-1] == 16
    runner.start()
    try:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, SPEC.vocab_size, length).tolist() for length in (70, 5, 33)]
        for ids in prompts:  # longer than a chunk, shorter, and a bit longer, in one batch
            runner.submit(GenerateRequest(ids=ids, max_tokens=20, stop=[], sampling=Sampling()))
        ended = [events.get(timeout=30) for _ in prompts]
    finally:
        runner.stop()
    for event in ended:
        history, response = event.job.request.ids, event.response
        ids_T = torch.tensor(history + response.ids)
        with torch.no_grad():
            out = model(ids_T, torch.arange(len(ids_T)), PackedCausal([len(ids_T)]), capture=True)
            wanted, _ = token_logprobs(model, out.hidden_TD[len(history) - 1 : -1], torch.tensor(response.ids))
        np.testing.assert_allclose(np.frombuffer(response.logprobs, "<f4"), wanted.numpy(), atol=2e-5, rtol=0)
        ids = np.array((history + response.ids)[:-1], "<i4")
        routes = response.routes.open(ids, SPEC.route_shape, 8)
        np.testing.assert_array_equal(routes, out.routes_TLK[:-1].numpy())


def test_a_published_version_arrives_whole(tmp_path: Path) -> None:
    model = random_network(SPEC, seed=4)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = checkpoint.named_tensors(model)[name]
    assert not torch.equal(bias, bias.bfloat16().float())  # what bf16 would lose
    Publisher(Store(str(tmp_path)), "run-0", {}).publish(0, checkpoint.bf16_bits(model))
    (file,) = tmp_path.rglob("model.safetensors")
    standby = Standby(SPEC)
    standby.load(file, model_fingerprint(model))
    for key, tensor in checkpoint.named_tensors(standby.model).items():
        assert torch.equal(tensor, checkpoint.named_tensors(model)[key]), key
    bias += 1e-3
    with pytest.raises(WeightsRefused, match="fingerprint"):
        standby.load(file, model_fingerprint(model))
