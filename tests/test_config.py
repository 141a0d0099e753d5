"""The configuration tree: unknown keys name the nearest one, overrides apply, what is dumped loads again."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.config import Config, ConfigError, dump, load, load_run, parse


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.learning_rat=1", "unknown key trainer.learning_rat; did you mean trainer."),
        ("trainer.stepz=1", "unknown key trainer.stepz; did you mean trainer.steps?"),
        ("trainr.steps=1", "unknown key trainr; did you mean trainer?"),
        ("rollouts.max_stalenes=1", "did you mean rollouts.max_staleness?"),
        ("trainer.steps=0", "trainer.steps: Input should be greater than 0"),
        ("trainer.correction=clip", "trainer.correction: Input should be 'none', 'tis', 'sequence-tis', 'icepop',"),
        ("trainer.lr=inf", "trainer.lr: Input should be a finite number"),
        ("trainer.betas=[0.9, 1.0]", "trainer.betas.1: Input should be less than 1"),
        ("trainer.steps.x=1", "trainer.steps"),
        ("trainer.steps", "not of the form a.b=c"),
    ],
)
def test_wrong_keys_and_values_are_sentences(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match="trainer|rollouts|form") as error:
        load("quickstart", ["trainer.steps=5", override] if override == "trainer.steps.x=1" else [override])
    assert sentence in str(error.value)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse({"trainer": {"stepz": 1, "lr": -1}})
    assert "trainer.stepz" in str(error.value) and "trainer.lr" in str(error.value)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"rollouts": {"min_group": 20}}, ("rollouts.min_group", "rollouts.group_size")),
        ({"rollouts": {"group_size": 1, "min_group": 1}}, ("baseline",)),
        ({"run": {"store": "memory:///"}}, ("run.store", "share")),
        ({"run": {"name": ""}}, ("run.name", "folder")),
        ({"run": {"name": "../elsewhere"}}, ("run.name", "folder")),
        ({"run": {"seed": -1}}, ("run.seed",)),
        ({"run": {"seed": 2**63}}, ("run.seed",)),
        ({"harness": {"max_tokens": 5000}}, ("harness.max_tokens", "engine.max_tokens")),
    ],
)
def test_impossible_combinations_are_refused(tree: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(tree)
    assert all(word in str(error.value) for word in words)


def test_overrides_are_typed() -> None:
    config = load("quickstart", ["trainer.lr=1e-3", "run.name=x y", "trainer.replay=false", "trainer.betas=[0.8, 0.9]"])
    assert (config.trainer.lr, config.run.name, config.trainer.replay) == (1e-3, "x y", False)
    assert config.trainer.betas == (0.8, 0.9)


def test_unknown_names_list_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quickstart"):
        load("quikstart")
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.toml"):
        load(tmp_path / "gone.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read .*binary\.toml"):
        load(tmp_path / "binary.toml")
    (tmp_path / "bad.toml").write_text("[trainer\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "bad.toml")


def test_dump_loads_again(tmp_path: Path) -> None:
    config = load("quickstart", ['run.name="a \\"quoted\\" name"', "harness.system_prompt='two\\nlines'"])
    (tmp_path / "config.toml").write_text(dump(config))
    assert load(tmp_path / "config.toml") == config


def test_the_store_is_the_runs_own_or_the_one_said(tmp_path: Path) -> None:
    config = parse({"run": {"name": "a", "root": str(tmp_path)}})
    assert config.store_url == str(tmp_path / "a" / "store")
    assert parse({"run": {"store": "s3://bucket/a"}}).store_url == "s3://bucket/a"
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "config.toml").write_text(dump(config))
    again = load_run(tmp_path / "moved", ["trainer.steps=3"])
    assert (again.run_dir, again.trainer.steps) == (tmp_path / "moved", 3)
    assert again.store_url == str(tmp_path / "moved" / "store")


def test_every_option_has_its_sentence() -> None:
    for section, field in Config.model_fields.items():
        for name, option in field.annotation.model_fields.items():  # type: ignore[union-attr]
            assert option.description, f"{section}.{name} has no sentence under it"
