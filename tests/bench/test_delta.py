"""`bench delta`: every coder gives back the bits, sizes are what they say, and bad input gets a sentence."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from stretto.bench import delta as bench
from stretto.bench.delta_coders import GAP16, OURS, XOR, coders
from stretto.bench.delta_pairs import given
from stretto.bench.steps import real_steps
from stretto.config import ModelConfig
from stretto.weights.codec_report import synthetic_step
from stretto.weights.tensorfile import pack

MASTERS = {"a": np.random.default_rng(0).normal(0, 0.02, (300, 400)).astype(np.float32), "b": np.ones(7, np.float32)}


def save(folder: Path, tensors: dict[str, np.ndarray], tag: str = "BF16") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(pack(tensors, dict.fromkeys(tensors, tag)))
    return folder


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 1.0])
@pytest.mark.parametrize("coder", coders(), ids=lambda coder: coder.name)
def test_every_coder_gives_back_the_bits(coder: bench.Coder, share: float) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 14, 300_000).astype(np.uint16)
    new = np.where(rng.random(old.size) < share, old + 3, old).astype(np.uint16)
    assert bench._checked(coder, old, new) > 0 or not share


def test_two_folders(tmp_path: Path) -> None:
    old, new = synthetic_step(MASTERS, 1e-5, seed=0)
    folders = save(tmp_path / "old", old), save(tmp_path / "new", new)
    bench.delta(*folders, tmp_path / "out.json", Console(quiet=True))
    data = json.loads((tmp_path / "out.json").read_text())
    rows = {row["coder"]: row for row in data["rows"]}
    assert rows.keys() >= {OURS, "XOR, zstd-1", "gap16 + value, zstd-1"}
    assert rows[OURS]["bytes"] == min(row["bytes"] for row in rows.values())
    checks = data["checks"]
    assert 1 < checks["ratio_to_conditional_bound_max"]["value"] < 1.1
    assert checks["smaller_than_every_other_row"]["ok"] is True
    assert checks["smaller_than_gap16_zstd_min"]["value"] > 2.5 == checks["smaller_than_gap16_zstd_min"]["limit"]


def test_what_cannot_be_measured_is_neither_held_nor_missed(tmp_path: Path) -> None:
    """A small pair shows no speed and one chunk no second core; a pair of a few elements not even a size."""
    few = {"a": np.zeros(10, np.uint16), "none": np.zeros(0, np.uint16)}, {"a": np.ones(10, np.uint16)}
    few[1]["none"] = few[0]["none"]
    small = synthetic_step(MASTERS, 1e-5, seed=0)
    for name, (old, new), sized in (("few", few, False), ("small", small, True)):
        (tmp_path / name).mkdir()
        folders = save(tmp_path / name / "old", old), save(tmp_path / name / "new", new)
        assert bench.delta(*folders, tmp_path / "out.json", Console(quiet=True))
        checks = json.loads((tmp_path / "out.json").read_text())["checks"]
        for check, verdict in checks.items():
            measured = sized and check.startswith(("ratio", "smaller"))
            assert (verdict["value"] is not None, verdict["ok"] is not None, "why" in verdict) == (
                (True, True, False) if measured else (False, False, True)
            ), check


def test_two_cores_are_judged_only_where_there_are_two() -> None:
    row = bench.Row("pair", OURS, 0.01, 1, 10**8, 1.0, 1.0, 1e-5, 1.0, 1.0, 1.0, 1.0, 1.2, 1.9, 0.5, 0.1, 3.0)
    others = [replace(row, coder=name, bytes=3) for name in (XOR, GAP16)]
    assert bench.check([row, *others], 1.95)["encode_speedup_two"]["ok"] is False
    assert bench.check([row, *others], 1.95)["decode_speedup_two"]["ok"] is True
    busy = bench.check([row, *others], 1.3)["encode_speedup_two"]
    assert busy["ok"] is None and "1.30 times as fast" in busy["why"]


def test_a_sharded_checkpoint_is_one_pair(tmp_path: Path) -> None:
    old, new = synthetic_step(MASTERS, 1e-5, seed=0)
    folders = []
    for name, side in (("old", old), ("new", new)):
        folders.append(save(tmp_path / name, {"a": side["a"]}))
        (folders[-1] / "model-2.safetensors").write_bytes(pack({"b": side["b"]}, {"b": "BF16"}))
    pair = given(*folders)
    assert pair.old.keys() == {"a", "b"} and np.array_equal(pair.new["b"], new["b"])
    (folders[0] / "again.safetensors").write_bytes(pack({"b": old["b"]}, {"b": "BF16"}))
    with pytest.raises(ValueError, match="tensor b is in .* and in another file"):
        given(*folders)


def test_real_steps_are_of_the_size_the_learning_rate_says() -> None:
    small, large = real_steps(ModelConfig().folder, "nano", (1e-6, 1e-5))
    shares = []
    for pair in (small, large):
        differ = sum(int(np.count_nonzero(pair.old[name] != pair.new[name])) for name in pair.old)
        shares.append(differ / sum(array.size for array in pair.old.values()))
    assert 0.001 < shares[0] < 0.01 and 5 < shares[1] / shares[0] < 12


def test_bad_input_gets_a_sentence(tmp_path: Path) -> None:
    old, new = synthetic_step(MASTERS, 1e-5, seed=0)
    good = save(tmp_path / "good", old)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"nothing")
    cases = {
        "give both --old and --new": (good, None),
        "is not a folder with safetensors": (good, tmp_path / "empty"),
        "not a safetensors file": (good, tmp_path / "broken"),
        "only .*good has tensor b": (good, save(tmp_path / "fewer", {"a": new["a"]})),
        r"tensor a is BF16 \[300, 400\]": (good, save(tmp_path / "shape", {"a": new["a"][:5], "b": new["b"]})),
        "tensor a is BF16.*U8": (
            good,
            save(tmp_path / "type", {name: array.astype(np.uint8) for name, array in new.items()}, "U8"),
        ),
        "are the same": (good, save(tmp_path / "same", old)),
    }
    for sentence, folders in cases.items():
        with pytest.raises(ValueError, match=sentence):
            bench.delta(*folders, None, Console(quiet=True))
