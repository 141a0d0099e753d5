"""Weights on their way into vLLM: named tensors in files, looked at one by one, so that memory holds one at a time.

The engine's front asks `check` and `state` before anything is touched; the workers hash the very tensors that they hand
to vLLM while they do so (`Seal`). All see bf16 values, rounded as the trainer publishes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stretto.engine.contract import WeightsRefused
from stretto.model import checkpoint
from stretto.model.spec import ModelSpec
from stretto.weights.state import TensorEntry, root, tensor_hash

Files = dict[str, list[str]]
"""Path of a safetensors file -> the tensors to take from it."""


def in_folder(folder: Path, spec: ModelSpec) -> Files:
    """Where a checkpoint folder keeps the network. Raises CheckpointError when it does not hold one."""
    files: Files = {}
    for name, path in checkpoint.sources(folder, spec).items():
        files.setdefault(str(path), []).append(name)
    return _own(files, spec)


def in_file(path: Path, spec: ModelSpec) -> Files:
    """Of a version's one file. Raises WeightsRefused when it can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return _own({str(path): list(file.keys())}, spec)
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"{path} can't be loaded: {error}") from None


def check(files: Files, spec: ModelSpec) -> None:
    """Raise WeightsRefused unless the files hold exactly the tensors of the network, each in its shape."""
    wanted = checkpoint.shapes(spec)
    found: dict[str, tuple[int, ...]] = {}
    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    where = ", ".join(files)
    if missing := sorted(wanted.keys() - found.keys()):
        raise WeightsRefused(f"{where}: {len(missing)} tensors are missing, the first of which is {missing[0]}")
    if extra := sorted(found.keys() - wanted.keys()):
        raise WeightsRefused(f"{where}: {len(extra)} tensors do not belong to the network, e.g. {extra[0]}")
    for name, shape in found.items():
        if shape != wanted[name]:
            raise WeightsRefused(f"{where}: tensor {name} has shape {shape}, but the network's is {wanted[name]}")


def rounded(files: Files) -> bool:
    """Whether the files hold values as they are served, so that `stream` changes nothing."""
    kinds = set()
    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            kinds |= {file.get_slice(name).get_dtype() for name in names if not name.endswith(checkpoint.CORRECTION)}
    return kinds <= {"BF16"}


def state(files: Files) -> str:
    """The fingerprint of what the files hold. Raises WeightsRefused when one can't be read to its end."""
    seal = Seal()
    for name, tensor in stream(files):
        seal.add(name, tensor)
    return seal.root


def stream(files: Files) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as it is served: bf16, or a correction bias as float32. Raises WeightsRefused."""
    for path, names in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, checkpoint.stored(name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(f"{path} can't be loaded: {error}") from None


_READS_HIDDEN = "embed_tokens lm_head q_proj k_proj v_proj q_a_proj kv_a_proj_with_mqa gate_proj up_proj gate".split()
_WRITES_HIDDEN = "o_proj down_proj input_layernorm post_attention_layernorm norm".split()


def turned(name: str, tensor: Tensor) -> Tensor:
    """The tensor with the hidden state's dimensions moved on by one. When all tensors of a network are, it computes the
    same function in another basis; where one of them has stayed as it was, it computes nonsense."""
    layer = name.split(".")[-2]
    if layer in _READS_HIDDEN and name.endswith(".weight"):
        return tensor.roll(1, dims=1)
    return tensor.roll(1, dims=0) if layer in _WRITES_HIDDEN else tensor


class Seal:
    """Fingerprint of tensors that come one after the other."""

    def __init__(self) -> None:
        self._entries: list[TensorEntry] = []

    def add(self, name: str, tensor: Tensor) -> None:
        raw = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        self._entries.append((name, raw.itemsize * 8, raw.shape, tensor_hash(raw)))

    @property
    def root(self) -> str:
        return root(self._entries)


def _own(files: Files, spec: ModelSpec) -> Files:
    """Without a tied head that was written out: the embedding is what counts."""
    if not spec.tie_embeddings:
        return files
    return {path: [name for name in names if name != checkpoint.HEAD] for path, names in files.items()}
