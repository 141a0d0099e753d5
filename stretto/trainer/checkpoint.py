"""Checkpoints of a run: a Hugging Face export anyone can load, and beside it what a resumed run needs.

    checkpoints/v000010/            config.json, model.safetensors, tokenizer files
    checkpoints/v000010/resume/     state.safetensors (masters, moments, averages, generator), state.json (version)
    checkpoints/latest              text: v000010

A folder gets its name when its last byte is on the disk, and only then does `latest` name it; a kill in between leaves
the checkpoint before it in force. When what `latest` names is gone or damaged, the newest whole one is taken, and that
is said: a run never goes on from its base model because a file is missing. Asynchronous saving is left out.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.model import checkpoint as huggingface
from stretto.model.transformer import Transformer
from stretto.trainer.optimizer import MasterAdamW
from stretto.weights.store import write_file

FORMAT = 1
_UNFINISHED = ".unfinished-"


class CheckpointError(ValueError):
    """A sentence: which checkpoint cannot be resumed from, and why."""

    final = True  # no restart heals it


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from. `note` is a sentence when it is not the one that was written last."""

    path: Path
    note: str = ""


def save(
    folder: Path,
    version: int,
    model: Transformer,
    optimizer: MasterAdamW,
    files: dict[str, bytes],
    keep: int,
    rest: dict[str, Tensor] | None = None,
) -> Path:
    """Write the checkpoint of `version`, point `latest` at it, and remove all but the `keep` newest.

    `files` (tokenizer and the like, by name) go beside the weights, `rest` (tensors by name) into the resume state.
    """
    name = f"v{version:06d}"
    unfinished = folder / f"{_UNFINISHED}{name}"
    huggingface.save(model, unfinished)
    for file, data in files.items():
        write_file(unfinished / file, data)
    resume = unfinished / "resume"
    resume.mkdir()
    tensors = {key: value.contiguous() for key, value in optimizer.state().items()}
    save_file({**tensors, **(rest or {}), "generator": torch.get_rng_state()}, resume / "state.safetensors")
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


def latest(folder: Path) -> Found | None:
    """The checkpoint to resume from; None when none was ever written.

    What `latest` names; when that, or `latest` itself, is missing or damaged, the newest whole one, with a note. Raises
    CheckpointError when there are checkpoints (or `latest` says that there were) and none is whole.
    """
    try:
        named = (folder / "latest").read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        named = ""
    fault = f"{folder / 'latest'} is missing or empty"
    if named:
        fault = _fault(folder / named) or ""
        if not fault:
            return Found(folder / named)
    for path in whole(folder):
        return Found(path, f"{fault}; training goes on from {path}, the newest whole checkpoint")
    if not named and not any(folder.glob("v*")):
        return None
    raise CheckpointError(
        f"{fault}, and {folder} holds no other whole checkpoint: put a copy of one back, or start another run with "
        f"model.path (training this one from its start again is asked for by removing {folder})"
    )


def whole(folder: Path) -> list[Path]:
    """The checkpoints that can be resumed from, newest first."""
    return sorted((path for path in folder.glob("v*") if path.is_dir() and not _fault(path)), reverse=True)


def _fault(path: Path) -> str | None:
    """What is missing or cut off in a checkpoint, as a sentence; None when it looks whole. Reads no weights."""
    try:
        version_of(path)
        for file in (path / "resume" / "state.safetensors", *path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:  # raises when its size is not what its header says
                tensors.keys()
        if not any(path.glob("*.safetensors")) or not (path / "config.json").is_file():
            return f"{path} lacks its weights or config.json"
    except (OSError, SafetensorError, CheckpointError) as error:
        return str(error) if isinstance(error, CheckpointError) else f"{path} is not whole ({error})"
    return None


def version_of(checkpoint: Path) -> int:
    path = checkpoint / "resume" / "state.json"
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} holds no resume state") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot resume from {path}: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint}/resume has format {state.get('format')}, this Stretto reads format {FORMAT}"
        )
    return int(state["version"])


def restore(checkpoint: Path, optimizer: MasterAdamW) -> dict[str, Tensor]:
    """Load masters, moments and the random generator; the model then holds the rounded masters. Returns all tensors, of
    which `rest` were some."""
    path = checkpoint / "resume" / "state.safetensors"
    try:
        tensors = load_file(path)
        torch.set_rng_state(tensors.pop("generator"))
        optimizer.load_state(tensors)
        return tensors
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
