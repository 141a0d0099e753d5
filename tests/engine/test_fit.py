"""A checkpoint whose weights are missing, cut off or damaged is found before there is a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stretto.config import ModelConfig
from stretto.engine.fit import whole


def test_the_shipped_model_is_whole() -> None:
    whole(ModelConfig().folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_weights_that_are_cut_off_are_named(tmp_path: Path, keep: int) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ModelConfig().folder, folder)
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{file.name} is cut off or damaged"):
        whole(folder)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \*.safetensors file"):
        whole(tmp_path)
