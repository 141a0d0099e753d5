"""`[mtp]` in a recipe: heads learn with the network, then alone on one that stays as it is; resumed runs are equal to
the bit, and what comes out is a checkpoint with heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from places import furnished

from stretto.config import ConfigError
from stretto.midtrain.run import midtrain
from stretto.model import checkpoint
from stretto.model.spec import load_spec

pytest.importorskip("rensa", reason="the [corpus] extra is not installed")

PHASES = [
    {"name": "plain", "tokens": 300, "lr": 1e-2, "warmup_steps": 2, "heads": "off"},
    {"name": "both", "tokens": 1600, "lr": 1e-2, "warmup_steps": 2},
    {"name": "last", "tokens": 800, "lr": 1e-2, "warmup_steps": 2, "heads": "alone"},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnished(tmp_path_factory.mktemp("midtrain"))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def written(place: Path, out: str, phases: list[dict] = PHASES, mtp: str = "guesses = 2", **changes: object) -> Path:
    settings = {"model": "model", "corpus": ["corpus-rows"], "out": out, "row": 64, "batch_rows": 4, "micro_rows": 2}
    settings |= {"numerics": "exact", "save_every": 3, "average": 0.5, **changes}
    lines = ["[midtrain]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    lines += ["[mtp]", mtp] if mtp else []
    for phase in phases:
        lines += ["[[phase]]", *(f"{key} = {json.dumps(value)}" for key, value in phase.items())]
    path = place / f"{out}.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_heads_learn_with_the_network_then_alone_and_N_plus_N_equals_2N_to_the_bit(place: Path, numerics: str) -> None:
    out = place / f"heads-{numerics}"
    whole = midtrain(written(place, out.name, numerics=numerics))
    path = written(place, f"{out.name}-parts", numerics=numerics)
    for steps in (1, 2, 4, 3):
        midtrain(path, stop_after=steps)
    assert weights(whole) == weights(midtrain(path))

    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = {name: [line for line in told if line.get("phase") == name] for name in ("plain", "both", "last")}
    assert all(line["mtp"] is None for line in steps["plain"])
    losses = [line["mtp"] for line in (*steps["both"], *steps["last"])]
    assert losses[-1] < 0.7 * losses[0], losses
    assert 0 < steps["last"][-1]["agreement"] <= 1
    assert steps["both"][-1]["loss"] < steps["plain"][0]["loss"] - 0.3

    assert checkpoint.load_heads(out / "0-plain") is None
    heads = checkpoint.load_heads(whole)
    assert heads is not None and heads.spec.mtp_layers == 1 == load_spec(whole).mtp_layers
    before, after = (checkpoint.load(out / name).state_dict() for name in ("1-both", "2-last"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "a network left alone stays"
    taught = checkpoint.load_heads(out / "1-both")
    assert taught is not None
    pairs = zip(taught.parameters(), heads.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)


def test_a_run_begins_with_the_heads_of_its_checkpoint(place: Path) -> None:
    first = midtrain(written(place, "first", PHASES[1:2]))
    alone = [{"name": "more", "tokens": 200, "lr": 1e-9, "heads": "alone"}]
    again = midtrain(written(place, "again", alone, model="first/final", average=0.0))
    given, found = (checkpoint.load_heads(folder) for folder in (first, again))
    assert given is not None and found is not None
    for one, other in zip(given.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-2)
    with pytest.raises(ConfigError, match=r"mtp.depth is 2, but .* has 1 heads"):
        midtrain(written(place, "deeper", alone, mtp="depth = 2", model="first/final"))


def test_rows_too_short_for_a_guess_teach_no_head(place: Path) -> None:
    path = written(place, "short", [{"name": "both", "tokens": 200, "lr": 1e-3}], mtp="guesses = 80")
    midtrain(path)
    told = [json.loads(line) for line in (place / "short" / "metrics.jsonl").read_text().splitlines()]
    assert told[-1]["mtp"] == 0.0


def test_heads_without_a_table_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"sets heads = alone, but there is no table \[mtp\]"):
        midtrain(written(place, "tableless", PHASES[2:], mtp=""))
