"""Presets: a name sets what its table says, explicit keys win, a run can change its preset, every option acts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.cli import main
from stretto.config import ConfigError, TrainerConfig, dump, load, load_run, parse, presets

TRAINING = (
    "advantage objective clip_low clip_high correction correction_floor correction_cap off_policy_mask normalizer"
)


def test_the_default_is_a_preset_and_says_what_the_defaults_say():
    """Whoever reads the class, or makes one without a file, sees the same as `preset = "dr-grpo"`."""
    assert TrainerConfig() == TrainerConfig.model_validate({"preset": "dr-grpo"})
    bare = {name: field.default for name, field in TrainerConfig.model_fields.items()}
    assert {key: bare[key] for key in presets()["dr-grpo"]} == presets()["dr-grpo"]


@pytest.mark.parametrize("name", presets())
def test_each_sets_what_its_table_says_and_dumps_to_itself(name: str, tmp_path: Path):
    config = load("quickstart", [f"trainer.preset={name}"])
    values = config.trainer.model_dump()
    assert {key: values[key] for key in presets()[name]} == presets()[name]
    (tmp_path / "again.toml").write_text(dump(config))
    assert load(tmp_path / "again.toml") == config


def test_presets_differ():
    told = [
        tuple(load("quickstart", [f"trainer.preset={n}"]).trainer.model_dump()[k] for k in TRAINING.split())
        for n in presets()
    ]
    assert len(set(told)) == len(told)


def test_explicit_keys_win_wherever_they_stand():
    assert parse({"trainer": {"preset": "dapo", "clip_high": 0.5}}).trainer.clip_high == 0.5
    found = load("quickstart", ["trainer.clip_high=0.5", "trainer.preset=dapo"]).trainer
    assert (found.clip_high, found.clip_low, found.objective) == (0.5, 0.2, "ppo")


def test_a_run_that_goes_on_can_change_its_preset(tmp_path: Path):
    """Its config.toml names every key; those that presets set follow the new one, the others stay."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump(load("quickstart", ["trainer.preset=dapo", "trainer.kl=0.1"])))
    found = load_run(run, ["trainer.preset=cispo"]).trainer
    assert (found.preset, found.objective, found.clip_high, found.kl) == ("cispo", "cispo", 4.0, 0.1)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.preset=dappo"], "no preset is named 'dappo'; did you mean dppo? There are dr-grpo, "),
        (["trainer.preset=reinforce"], "did you mean reinforce++?"),
        (["trainer.preset=[1]"], "no preset is named '[1]'"),
        (["trainer.objective=ppo"], "correction tis weighs the proximal policy against the one that sampled"),
        (["trainer.proximal=ema"], "objective reinforce has no clip"),
        (["trainer.reference=ema"], "kl is 0"),
        (["trainer.kl=-1"], "trainer.kl"),
        (["trainer.ema_decay=1.0"], "trainer.ema_decay"),
        (["trainer.correction_cap=1.0"], "trainer.correction_cap"),
        (["trainer.correction_floor=1.5"], "trainer.correction_floor"),
        (["trainer.clip_low=2"], "trainer.clip_low"),
        (["trainer.guard=-1"], "trainer.guard"),
        (["rollouts.min_group=1"], "rollouts.min_group"),
    ],
)
def test_options_without_an_effect_and_impossible_bounds_are_refused(overrides: list[str], sentence: str):
    with pytest.raises(ConfigError) as error:
        load("quickstart", overrides)
    assert sentence in str(error.value)


def test_dry_run_prints_what_the_preset_came_to(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "quickstart", "trainer.preset=gspo", "trainer.clip_high=0.06", "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {'preset = "gspo"', 'objective = "gspo"', "clip_low = 0.03", "clip_high = 0.06"} <= set(printed)
