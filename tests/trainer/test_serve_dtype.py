"""What is served is what is trained, also in fp8: the trainer computes with what it publishes, the engine with the same
values; scales travel as tensors of their own and hardly ever change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.config import Config, ConfigError, parse
from stretto.engine.standby import Standby
from stretto.model import checkpoint, served
from stretto.model.numerics import Numerics
from stretto.model.spec import load_spec
from stretto.records import WeightsOrder
from stretto.trainer import resume
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.publishing import canary
from stretto.weights import chain as chains
from stretto.weights import inspect, patchfile
from stretto.weights.publisher import Publisher
from stretto.weights.rebuild import rebuild
from stretto.weights.state import fingerprint
from stretto.weights.store import Store
from stretto.weights.tensorfile import save

from ..engine.conftest import SPEC

EXACT = Numerics(exact=True)


class Run:
    """An fp8 chain made by real optimizer steps, with random gradients."""

    def __init__(self, folder: Path, lr: float = 1e-3) -> None:
        self.model = checkpoint.random_init(SPEC, seed=1, numerics=EXACT)
        self.optimizer = MasterAdamW(self.model, (0.9, 0.97), 0.0, "fp8")
        self.store, self.version, self.lr = Store(folder), -1, lr
        config = served.config_of(json.dumps(SPEC.to_hf()).encode(), "fp8")
        tags = served.tags(self.bits())
        self.publisher = Publisher(self.store, "run-0", {"config.json": config}, anchor_every=50, tags=tags)
        self.generator = torch.Generator().manual_seed(0)

    def bits(self) -> served.Bits:
        return served.Bits(checkpoint.named_tensors(self.model), "fp8")

    def step(self) -> None:
        if self.version >= 0:
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=self.generator)
            self.optimizer.step(self.lr)
        self.version += 1
        self.publisher.submit(self.version, self.bits(), canary=canary(self.model))
        self.publisher.wait()


def head_of(store: Store) -> chains.Head:
    found = chains.read_head(store, "run-0")
    assert found is not None
    return found[0]


def test_WGT_8_trainer_chain_and_engine_hold_the_same_values(tmp_path: Path) -> None:
    run, standby, state, serving = Run(tmp_path / "store", lr=3e-5), Standby(SPEC, EXACT), None, ""
    live = Standby(SPEC, EXACT).copy
    for version in range(6):
        run.step()
        built = rebuild(run.store, head_of(run.store), state)
        state = built.state
        assert state.root == fingerprint(run.bits()) == fingerprint(state.tensors)
        path = tmp_path / "file"
        if version:
            assert built.parent == serving
            patchfile.save(path, built.changes, state.tags)
        else:
            save(path, state.tensors, state.tags)
        order = WeightsOrder(
            version=version,
            fingerprint=state.root,
            path=str(path),
            parent=serving if version else "",
            canary=built.canary,
        )
        assert standby.prepare(order, live, serving) == 0.0  # the engine says what the trainer says, to the bit
        live, serving = standby.exchange(live), state.root
        standby.settle(live)
        for name, tensor in checkpoint.named_tensors(run.model).items():
            assert torch.equal(live.named[name], tensor), name


def test_an_anchor_and_an_export_are_fp8_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path / "store")
    for _ in range(3):
        run.step()
    inspect.export(run.store, "run-0", tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert load_spec(tmp_path / "export") == SPEC
    again = checkpoint.load(tmp_path / "export")
    for name, tensor in checkpoint.named_tensors(run.model).items():
        assert torch.equal(checkpoint.named_tensors(again)[name], tensor), name
    assert inspect.verify(run.store, "run-0") == []


def test_scales_hardly_ever_change_and_deltas_are_smaller_than_in_bf16(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", lr=1e-5)
    run.step()
    before = dict(run.bits())
    changed = scales = 0
    for _ in range(4):
        run.step()
        after = dict(run.bits())
        for name, array in after.items():
            if name.endswith(served.SCALE):
                changed += int(np.count_nonzero(array != before[name]))
                scales += array.size
        before = after
    print(f"{changed} of {scales} scales changed in 4 steps")
    assert changed <= scales / 100


def test_a_published_version_of_another_start_is_taken_over(tmp_path: Path) -> None:
    run = Run(tmp_path / "store")
    for _ in range(3):
        run.step()
    other = checkpoint.random_init(SPEC, seed=2)
    optimizer = MasterAdamW(other, (0.9, 0.97), 0.0, "fp8")
    assert resume.take_published(run.store, "run-0", other, optimizer) > 0.5
    assert fingerprint(served.Bits(checkpoint.named_tensors(other), "fp8")) == fingerprint(run.bits())


@pytest.mark.parametrize("key", ["serve_dtype = fp8", "kv = drain"])
def test_what_vllm_does_not_honour_is_refused_at_the_start(key: str) -> None:
    name, value = key.split(" = ")
    tree = {"engine": {"backend": "vllm"}, "weights": {name: value}, "rollouts": {"top_p": 1.0}}
    with pytest.raises(ConfigError, match=f"weights.{name} is {value}"):
        parse(tree)
    assert isinstance(parse({"weights": {name: value}}), Config)
