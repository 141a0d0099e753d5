"""`stretto midtrain CONFIG`: N + N equals 2N to the bit, ranks share the same rows, a phase stretches the context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import furnished, python

from stretto.config import ConfigError
from stretto.midtrain import recipe as recipes
from stretto.midtrain.bits import bits_per_byte
from stretto.midtrain.corpus.document import Document
from stretto.midtrain.learner import Learner
from stretto.midtrain.recipe import Phase, learning_rate
from stretto.midtrain.run import midtrain
from stretto.midtrain.tokens.marks import Encoder
from stretto.midtrain.tokens.mixture import Stream
from stretto.midtrain.tokens.shards import Shards
from stretto.model import checkpoint
from stretto.model.spec import load_spec

pytest.importorskip("rensa", reason="the [corpus] extra is not installed")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnished(tmp_path_factory.mktemp("midtrain"))


def recipe(place: Path, out: str, **changes: object) -> Path:
    settings = {"model": "model", "corpus": ["corpus-rows"], "out": out, "row": 64}
    settings |= {
        "batch_rows": 4,
        "micro_rows": 2,
        "numerics": "exact",
        "save_every": 3,
        "z_loss": 1e-4,
    }
    phases = [
        {"name": "bulk", "tokens": 1500, "lr": 1e-2, "warmup_steps": 2},
        {"name": "long", "tokens": 800, "lr": 5e-3, "row": 128, "rope_theta": 1e6, "mixture": {"python": 1.0}},
    ]
    path = place / f"{out}.toml"
    lines = ["[midtrain]", *(f"{key} = {json.dumps(value)}" for key, value in {**settings, **changes}.items())]
    lines += ["[evaluation]", "every = 4", 'bpb = "corpus-rest"', 'fim = "corpus-rest"']
    for phase in phases:
        lines += ["[[phase]]"]
        lines += [f"{k} = {json.dumps(v) if not isinstance(v, dict) else '{ python = 1.0 }'}" for k, v in phase.items()]
    path.write_text("\n".join(lines))
    return path


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_N_plus_N_equals_2N_to_the_bit_over_both_phases(place: Path, optimizer: str) -> None:
    whole = midtrain(recipe(place, f"whole-{optimizer}", optimizer=optimizer))
    path = recipe(place, f"parts-{optimizer}", optimizer=optimizer)
    for steps in (2, 3, 1):
        assert midtrain(path, stop_after=steps) == place / f"parts-{optimizer}"
    parts = midtrain(path)
    assert weights(whole) == weights(parts)
    assert midtrain(path) == parts, "a finished run is finished"
    lines = [json.loads(line) for line in (whole.parent / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "midtrain"]
    assert losses[-1] < losses[0] - 0.3, losses
    bits = [line for line in lines if line["kind"] == "bits"]
    assert bits[-1]["all"] == bits[-1]["python"] < bits[0]["all"] < 9
    matches = [line["all"] for line in lines if line["kind"] == "fim"]
    assert len(matches) == len(bits) and all(0 <= one["match"] <= 1 and one["spans"] == 4 for one in matches)
    spec = load_spec(whole)
    assert (spec.rope_theta, spec.max_positions) == (1e6, 128) and (whole / "tokenizer.json").is_file()


def test_two_ranks_learn_from_the_same_rows_as_one(place: Path) -> None:
    whole = midtrain(recipe(place, "alone"))
    path = recipe(place, "pair")
    code = f"from pathlib import Path; from stretto.midtrain.run import midtrain; midtrain(Path({str(path)!r}))"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    subprocess.run(
        [*command, sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240
    )
    told = [
        [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("alone", "pair")
    ]
    seen = [[(line["seen"], line["learnt"]) for line in lines if line["kind"] == "midtrain"] for lines in told]
    assert seen[0] == seen[1]
    losses = [[line["loss"] for line in lines if line["kind"] == "midtrain"] for lines in told]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5)
    assert losses[0] == pytest.approx(losses[1], abs=0.2), "sums in another order, the same rows"
    assert (place / "pair" / "final" / "model.safetensors").is_file() and whole.is_dir()


def test_the_loss_does_not_depend_on_how_rows_are_cut_into_micro_batches(place: Path) -> None:
    path = recipe(place, "whole")
    settings = recipes.load(path).midtrain
    midtrain(path)
    found = []
    for micro in (1, 2, 4):
        model = checkpoint.random_init(load_spec(place / "model"), 0)
        learner = Learner(model, settings.model_copy(update={"micro_rows": micro, "balance": 0.0, "z_loss": 0.0}))
        rows = Stream(Shards.open(place / "whole" / "shards" / "64").domains, 0).batch(
            4, {"python": 1, "transcript": 1}
        )
        found.append((learner.step(rows, 0.0).loss, learner.step(rows, 0.0).grad_norm))
    assert found[0] == pytest.approx(found[1], rel=1e-5) and found[0] == pytest.approx(found[2], rel=1e-5)


def test_a_step_that_is_not_finite_stops_before_anything_changes(place: Path) -> None:
    path = recipe(place, "whole")
    settings = recipes.load(path).midtrain
    model = checkpoint.random_init(load_spec(place / "model"), 0)
    rows = Stream(Shards.open(place / "whole" / "shards" / "64").domains, 0).batch(4, {"python": 1})
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        Learner(model, settings).step(rows, 1e-2)
    pairs = zip(before, model.parameters(), strict=True)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


def test_bits_per_byte_of_a_uniform_model_is_log2_of_its_vocabulary_a_token(place: Path) -> None:
    midtrain(recipe(place, "whole"))
    encoder = Encoder(place / "whole" / "tokenizer")
    model = checkpoint.random_init(load_spec(place / "model"), 0)
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    text = python(99)
    documents = [Document(source="s", repository="r", path="p", text=text, language="python")]
    found = bits_per_byte(model, encoder, documents, window=16)
    tokens = len(encoder.encode([text])[0])
    assert found["python"].bits_per_byte == pytest.approx(9.0 * tokens / len(text), rel=1e-4)


def test_the_schedule_warms_up_holds_and_decays() -> None:
    phase = Phase(name="p", tokens=1000, lr=1.0, warmup_steps=4, stable=0.5, floor=0.1)
    assert [learning_rate(phase, step, 0) for step in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert learning_rate(phase, 9, 500) == 1.0 and learning_rate(phase, 9, 1000) == pytest.approx(0.1)
    assert learning_rate(phase, 9, 750) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"corpus": ["nowhere"]}, "holds no complete corpus"),
        ({"model": "nothing"}, "no checkpoint folder"),
        ({"rows": 3}, "did you mean"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_sentence(place: Path, change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        midtrain(recipe(place, "refused", **change))


def test_a_mixture_that_sums_to_zero_or_names_nothing_is_refused(place: Path) -> None:
    path = recipe(place, "mixed")
    text = path.read_text()
    path.write_text(text.replace("{ python = 1.0 }", "{ python = 0.0 }"))
    with pytest.raises(ConfigError, match="sum to more"):
        midtrain(path)
    path.write_text(text.replace("{ python = 1.0 }", "{ cobol = 1.0 }"))
    with pytest.raises(ValueError, match="names cobol; the shards have python"):
        midtrain(path)
