"""Checkpoints of a run: a Hugging Face export anyone can load, and beside it what a resumed run needs.

    checkpoints/v000010/            config.json, model.safetensors, tokenizer files
    checkpoints/v000010/resume/     state.safetensors (masters, moments, generator), state.json (version)
    checkpoints/latest              text: v000010

A folder gets its name when its last byte is on the disk, and only then does `latest` name it; a kill in between leaves
the checkpoint before it in force. Asynchronous saving is left out.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stretto.model import checkpoint as huggingface
from stretto.model.transformer import Transformer
from stretto.trainer.optimizer import MasterAdamW
from stretto.weights.store import write_file

FORMAT = 1
_UNFINISHED = ".unfinished-"


class CheckpointError(ValueError):
    """A sentence: which checkpoint cannot be resumed from, and why."""


def save(
    folder: Path, version: int, model: Transformer, optimizer: MasterAdamW, files: dict[str, bytes], keep: int
) -> Path:
    """Write the checkpoint of `version`, point `latest` at it, and remove all but the `keep` newest.

    `files` (tokenizer and the like, by name) go beside the weights.
    """
    name = f"v{version:06d}"
    unfinished = folder / f"{_UNFINISHED}{name}"
    huggingface.save(model, unfinished)
    for file, data in files.items():
        write_file(unfinished / file, data)
    resume = unfinished / "resume"
    resume.mkdir()
    tensors = {key: value.contiguous() for key, value in optimizer.state().items()}
    save_file({**tensors, "generator": torch.get_rng_state()}, resume / "state.safetensors")
    (resume / "state.json").write_text(json.dumps({"format": FORMAT, "version": version}))
    for path in (*resume.iterdir(), resume, unfinished):
        _flush(path)
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)  # left by a run killed before it could name it in `latest`
    unfinished.rename(target)
    _flush(folder)
    write_file(folder / "latest", name.encode())
    _prune(folder, keep)
    return target


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from, if there is one. Raises CheckpointError when `latest` names a missing folder."""
    try:
        name = (folder / "latest").read_text().strip()
    except FileNotFoundError:
        return None
    if not (folder / name / "resume" / "state.json").is_file():
        whole = sorted(path.parent.parent.name for path in folder.glob("v*/resume/state.json"))
        instead = f"write one of {', '.join(whole)} into it" if whole else "and none is left, so start another run"
        raise CheckpointError(f"{folder / 'latest'} names {name!r}, where no resume state lies: {instead}")
    return folder / name


def version_of(checkpoint: Path) -> int:
    path = checkpoint / "resume" / "state.json"
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"cannot resume from {path}: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint}/resume has format {state.get('format')}, this Stretto reads format {FORMAT}"
        )
    return int(state["version"])


def restore(checkpoint: Path, optimizer: MasterAdamW) -> None:
    """Load masters, moments and the random generator; the model then holds the rounded masters."""
    path = checkpoint / "resume" / "state.safetensors"
    try:
        tensors = load_file(path)
        torch.set_rng_state(tensors.pop("generator"))
        optimizer.load_state(tensors)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot resume from {path}: {error}") from error


def _prune(folder: Path, keep: int) -> None:
    folders = [path for path in folder.iterdir() if path.is_dir()]
    finished = sorted(path for path in folders if path.name.startswith("v"))
    for old in [*finished[:-keep], *(path for path in folders if path.name.startswith("."))]:
        shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    """Onto the disk, before a rename makes it visible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
