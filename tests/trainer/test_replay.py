"""Pins: a run's recorded batches, trained again alone, give what was logged, bit for bit, from the start or from a
checkpoint, under objectives with a state of their own too; and a step that would come out otherwise is found."""

from __future__ import annotations

import json

import pytest

from stretto.cli import main
from stretto.config import Config, dump, load_run, parse
from stretto.model import checkpoint as huggingface
from stretto.rollouts.ledger import Ledger
from stretto.trainer import checkpoint
from stretto.trainer.learner import Learner
from stretto.trainer.replay import ReplayError, replay
from stretto.watch.metrics import Metrics
from stretto.weights.store import Store

STEPS = 5


def train(tmp_path, maker, **trainer) -> Config:
    """A run of five versions as the services leave it, with a checkpoint of version 3."""
    huggingface.save(maker.model, tmp_path / "start")
    tree = {"steps": STEPS, "lr": 1e-3, "decay_steps": 2, **trainer}
    config = parse(
        {"run": {"name": "run", "root": str(tmp_path)}, "model": {"path": str(tmp_path / "start")}, "trainer": tree}
    )
    run = config.run_dir
    run.mkdir()
    (run / "config.toml").write_text(dump(config))
    store, ledger, learner = Store(config.store_url), Ledger(run / "ledger.sqlite"), Learner(config, None)
    with Metrics(run / "metrics.jsonl", "trainer") as metrics:
        for version in range(STEPS):
            data = maker.batch(version=version, sampled_by=max(0, version - 1))
            for item, payload in zip(data.batch.items, data.payloads, strict=True):
                store.put(item.key, payload)
            ledger.cut(data.batch, [])
            step = learner.step(learner.prepare(data.batch, data.payloads))
            metrics.log(
                "step", version=step.version, loss=step.report.loss, grad_norm=step.report.grad_norm, lr=step.lr
            )
            if step.version == 3:
                learner.save(run / "checkpoints")
    ledger.close()
    return config


@pytest.mark.parametrize("settings", [{}, {"preset": "decoupled-ppo"}, {"kl": 0.1}, {"kl": 0.1, "reference": "ema"}])
def test_LED_2_replay_equals_the_log_from_the_start_and_from_a_checkpoint(tmp_path, maker, settings):
    """2N steps are N, a restart and N: learning rate, average, guard and moments go on where they were."""
    config = train(tmp_path, maker, **settings)
    whole = list(replay(config, config.run_dir))
    assert [c.step.version for c in whole] == [1, 2, 3, 4, 5] and {c.difference for c in whole} == {0.0}
    assert [c.step.lr for c in whole] == [5e-4, 1e-3, 1e-3, 1e-3, 5e-4]
    end = list(replay(config, config.run_dir, first=4))
    assert [(c.step.version, c.difference) for c in end] == [(4, 0.0), (5, 0.0)]
    for a, b in zip(whole[3:], end, strict=True):
        assert (a.step.lr, a.step.report.loss, a.step.report.grad_norm) == (
            b.step.lr,
            b.step.report.loss,
            b.step.report.grad_norm,
        )


def test_it_starts_at_the_newest_whole_checkpoint_before(tmp_path, maker):
    config = train(tmp_path, maker)
    folder = config.run_dir / "checkpoints"
    state = folder / "v000003" / "resume" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    assert checkpoint.whole(folder) == []
    assert [c.difference for c in replay(config, config.run_dir, first=4, last=4)] == [0.0]


def test_what_would_come_out_otherwise_is_found(tmp_path, maker):
    config = train(tmp_path, maker)
    assert all(
        c.difference > 1e-3 for c in replay(load_run(config.run_dir, ["trainer.normalizer=token"]), config.run_dir)
    )


def test_the_run_is_not_touched(tmp_path, maker):
    def contents():
        """Without SQLite's notes about who reads (-shm, -wal)."""
        files = [path for path in run.rglob("*") if path.is_file() and ".sqlite-" not in path.name]
        return {path: path.read_bytes() for path in files}

    config = train(tmp_path, maker)
    run = config.run_dir
    before = contents()
    list(replay(config, run))
    assert before == contents()


def test_sentences(tmp_path, maker):
    config = train(tmp_path, maker)
    for first, last in ((0, 2), (4, 3), (1, 6)):
        with pytest.raises(ReplayError, match="has trained 1 to 5"):
            list(replay(config, config.run_dir, first, last))
    (config.run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ReplayError, match="logged no step"):
        list(replay(config, config.run_dir))


def test_the_command(tmp_path, maker, capsys):
    run = train(tmp_path, maker).run_dir
    assert main(["train", "--replay", str(run)]) == 0
    assert "5 steps replayed as logged, 5 of them equal to the bit" in " ".join(capsys.readouterr().out.split())
    assert main(["train", "--replay", str(run), "--steps", "2-3", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["version"], line["difference"]) for line in lines] == [(2, 0.0), (3, 0.0)]
    assert main(["train", "--replay", str(run), "--steps", "2", "trainer.preset=cispo"]) == 0
    assert "under another configuration" in " ".join(capsys.readouterr().out.split())
    log = (run / "metrics.jsonl").read_text().splitlines()
    changed = {**json.loads(log[1]), "loss": 7.0}
    (run / "metrics.jsonl").write_text("\n".join([log[0], json.dumps(changed), *log[2:], ""]))
    assert main(["train", "--replay", str(run)]) == 1
    assert "the first one version 2" in " ".join(capsys.readouterr().out.split())
    for words, sentence in (
        (["--steps", "x"], "no range of versions"),
        (["--name", "y"], "only --steps, --json and overrides"),
        (["quickstart"], "only --steps, --json and overrides"),
    ):
        assert main(["train", "--replay", str(run), *words]) == 1
        assert sentence in capsys.readouterr().err
