"""Pins: a checkpoint is whole or not there, loads anywhere, and continues bit for bit; the newest few are kept."""

import json
import shutil

import pytest
import torch

from stretto.config import TrainerConfig
from stretto.model import checkpoint as huggingface
from stretto.model.checkpoint import random_init
from stretto.trainer import checkpoint
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.step import Distribution, learn


def optimizer_of(model):
    return MasterAdamW(model, (0.9, 0.97), 0.0)


@pytest.fixture
def trained(maker):
    optimizer = optimizer_of(maker.model)
    learn(
        maker.model, optimizer, maker.prepare(maker.batch()).samples, TrainerConfig(), Distribution(1.0, 1.0), lr=1e-3
    )
    return maker.model, optimizer


def write(folder, version, trained, keep=3):
    return checkpoint.save(folder, version, *trained, files={"tokenizer.json": b"{}"}, keep=keep)


def test_export_and_resume_state_are_those_of_the_run(tmp_path, trained, spec):
    assert checkpoint.latest(tmp_path) is None
    path = write(tmp_path, 7, trained)
    assert (tmp_path / "latest").read_text() == "v000007" and checkpoint.latest(tmp_path) == checkpoint.Found(path)
    assert checkpoint.version_of(path) == 7 and (path / "tokenizer.json").exists()
    exported = huggingface.load(path)
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), trained[0].parameters(), strict=True))
    other = random_init(spec, seed=9)
    resumed = optimizer_of(other)
    checkpoint.restore(path, resumed)
    assert trained[1].state().keys() == resumed.state().keys()
    assert all(torch.equal(value, resumed.state()[key]) for key, value in trained[1].state().items())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), trained[0].parameters(), strict=True))


def test_older_checkpoints_and_leftovers_go(tmp_path, trained):
    (tmp_path / ".unfinished-v000002").mkdir(parents=True)
    for version in (1, 2, 3, 10):
        write(tmp_path, version, trained, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "v000003", "v000010"]


def test_a_kill_while_saving_leaves_the_one_before(tmp_path, trained, monkeypatch):
    write(tmp_path, 1, trained)

    def killed(*args):
        raise KeyboardInterrupt

    for place in ("huggingface.save", "save_file", "write_file"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"stretto.trainer.checkpoint.{place}", killed)
            write(tmp_path, 2, trained)
        latest = checkpoint.latest(tmp_path)
        assert latest is not None and latest.path.name == "v000001" and not latest.note
        checkpoint.restore(latest.path, trained[1])
    assert write(tmp_path, 2, trained).name == "v000002"
    assert checkpoint.latest(tmp_path).path.name == "v000002"


def test_sentences(tmp_path, trained):
    path = write(tmp_path, 1, trained)
    state = path / "resume" / "state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(checkpoint.CheckpointError, match="cannot resume from"):
        checkpoint.restore(path, trained[1])
    (path / "resume" / "state.json").write_text(json.dumps({"format": 99, "version": 1}))
    with pytest.raises(checkpoint.CheckpointError, match="format 99"):
        checkpoint.version_of(path)
    (path / "resume" / "state.json").write_text("x")
    with pytest.raises(checkpoint.CheckpointError, match=r"cannot resume from .*state\.json"):
        checkpoint.version_of(path)


def remove(path):
    path.unlink()


def empty(path):
    path.write_text("")


def cut(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 10])


def misname(path):
    path.write_text("v000004")


@pytest.mark.parametrize(
    ("damage", "file", "expected", "note"),
    [
        (remove, "latest", "v000003", "latest is missing or empty"),
        (empty, "latest", "v000003", "latest is missing or empty"),
        (misname, "latest", "v000003", "v000004 holds no resume state"),
        (remove, "v000003/resume/state.json", "v000002", "v000003 holds no resume state"),
        (cut, "v000003/resume/state.json", "v000002", "cannot resume from"),
        (remove, "v000003/resume/state.safetensors", "v000002", "v000003 is not whole"),
        (cut, "v000003/resume/state.safetensors", "v000002", "v000003 is not whole"),
        (cut, "v000003/model.safetensors", "v000002", "v000003 is not whole"),
        (remove, "v000003/model.safetensors", "v000002", "lacks its weights"),
        (remove, "v000003/config.json", "v000002", "lacks its weights or config.json"),
    ],
)
def test_what_is_missing_or_damaged_is_said_and_the_newest_whole_one_taken(
    tmp_path, trained, damage, file, expected, note
):
    for version in (1, 2, 3):
        write(tmp_path, version, trained)
    damage(tmp_path / file)
    found = checkpoint.latest(tmp_path)
    assert found.path.name == expected
    assert note in found.note and f"goes on from {found.path}" in found.note
    checkpoint.restore(found.path, trained[1])


def test_nothing_whole_is_refused_not_taken_for_a_new_run(tmp_path, trained):
    for version in (1, 2):
        write(tmp_path, version, trained)
        cut(tmp_path / f"v00000{version}" / "resume" / "state.safetensors")
    with pytest.raises(
        checkpoint.CheckpointError, match=r"v000002 is not whole.*no other whole checkpoint: put a copy"
    ):
        checkpoint.latest(tmp_path)
    for path in tmp_path.glob("v*"):
        shutil.rmtree(path)
    with pytest.raises(checkpoint.CheckpointError, match="v000002 holds no resume state"):
        checkpoint.latest(tmp_path)  # `latest` says that there was one
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path) is None


def test_more_tensors_go_along(tmp_path, trained):
    model, optimizer = trained
    path = checkpoint.save(tmp_path, 1, model, optimizer, {}, 3, rest={"ema/x": torch.arange(3.0)})
    assert torch.equal(checkpoint.restore(path, optimizer)["ema/x"], torch.arange(3.0))
