"""Hugging Face checkpoints in and out: names, safetensors (single file or sharded index), config.json.

Experts are stacked in memory and separate on disk; `named_tensors` gives the disk names as views into the stacks, so
that one mapping serves loading, saving and publishing. Files we write are bf16 unless asked otherwise, and appear whole
or not at all; only the routers' correction biases of DeepSeek-V3 stay float32. Heads for multi-token prediction lie
behind the last layer, as in its checkpoints; they are no part of the network, and have `load_heads` for themselves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.model import deepseek, served
from stretto.model.moe import Experts, SigmoidGate
from stretto.model.mtp import Heads
from stretto.model.norm import RMSNorm
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.served import CORRECTION, SCALE
from stretto.model.spec import CONFIG, CheckpointError, ModelSpec, load_spec
from stretto.model.transformer import Transformer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


_Module = TypeVar("_Module", bound=nn.Module)

HEAD = "lm_head.weight"
BESIDE = "mtp"
"""Where heads lie that were taught to a finished network, so that its own files stay what they are."""
SHARD_BYTES = 5_000_000_000
"""A larger checkpoint is written as several files of at most this size (or one tensor) and an index."""


def load(folder: Path | str, dtype: torch.dtype = torch.float32, numerics: Numerics = PLAIN) -> Transformer:
    """The network with its weights, fp8 ones with their scales put together. Raises CheckpointError with one sentence
    for whatever does not fit."""
    folder = Path(folder)
    model = empty(load_spec(folder), dtype, numerics)
    _fill(model, sources(folder, model.spec), folder)
    return model


def load_heads(folder: Path | str, dtype: torch.dtype = torch.float32, numerics: Numerics = PLAIN) -> Heads | None:
    """The heads for multi-token prediction of a checkpoint, or None when it has none: those in its own files, which its
    config counts, else those of a folder `mtp` in it (`save_heads`). Copies of embedding and output head beside them,
    as DeepSeek-V3 has, are not read. Raises CheckpointError."""
    folder = Path(folder)
    spec = load_spec(folder)
    if not spec.mtp_layers and (folder / BESIDE).is_dir():
        network, folder = spec, folder / BESIDE
        spec = load_spec(folder)
        if replace(spec, mtp_layers=0) != network:
            raise CheckpointError(
                f"{folder} holds heads of another network: its config.json differs from the one above"
            )
    if not spec.mtp_layers:
        return None
    with torch.device("meta"):
        heads = Heads(spec, numerics).to(dtype)
    heads = _materialised(heads)
    last = spec.layers + spec.mtp_layers
    where = {n: path for n, path in _shards(folder).items() if spec.layers <= _layer(n) < last}
    _fill(heads, {n: path for n, path in where.items() if not n.endswith(_SHARED)}, folder)
    return heads


_SHARED = (".embed_tokens.weight", ".shared_head.head.weight")


def _fill(model: Transformer | Heads, where: dict[str, Path], folder: Path) -> None:
    """Copy tensors from their files into the network."""
    scales = dict(_read({name: path for name, path in where.items() if name.endswith(SCALE)}))
    weights = {name: path for name, path in where.items() if name not in scales}
    _check_names(model, weights, str(folder))
    targets = named_tensors(model)
    for name, tensor in _read(weights):
        _copy(targets, name, tensor, str(folder), scales.get(name + SCALE))


def _read(where: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, file by file."""
    for path in sorted(set(where.values())):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if where.get(name) == path:
                        yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from None


def sources(folder: Path | str, spec: ModelSpec) -> dict[str, Path]:
    """The file of each tensor in a checkpoint folder, by Hugging Face name. Raises CheckpointError without any."""
    return _wanted(_shards(Path(folder)), spec)


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that a network has, by Hugging Face name; takes no memory for them."""
    with torch.device("meta"):
        model = Transformer(spec)
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}


def load_named(model: Transformer, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors under Hugging Face names into the network, in place, cast to its dtype; fp8 ones need their scales
    beside them. Raises CheckpointError."""
    weights = [name for name in tensors if not name.endswith(SCALE)]
    _check_names(model, weights, "the given weights")
    targets = named_tensors(model)
    for name in weights:
        _copy(targets, name, tensors[name], "the given weights", tensors.get(name + SCALE))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every weight of a network, or of its heads, under its Hugging Face name, as a detached view: writing into it
    changes the network.

    A tied head has no entry, as on disk. Names are in the order of the network, those of buffers (correction biases,
    which are not trained) behind all others.
    """
    named: dict[str, Tensor] = {}
    stacks = {id(p): m for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        full = name if name.startswith("lm_head") else f"model.{name}"
        tensor = parameter.detach()
        if id(parameter) not in stacks:
            named[full] = tensor
            continue
        prefix, _, part = full.rpartition(".")
        for expert, weight in enumerate(tensor.unbind()):
            if part == "down_proj":
                named[f"{prefix}.{expert}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2)
                named[f"{prefix}.{expert}.gate_proj.weight"] = gate
                named[f"{prefix}.{expert}.up_proj.weight"] = up
    return named | {f"model.{name}": buffer for name, buffer in model.named_buffers()}


def stored(name: str, tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A copy of a weight as it is in files and on the wire: bf16, rounded to nearest even, or a bias as float32."""
    return tensor.to("cpu", torch.float32 if name.endswith(CORRECTION) else dtype, copy=True).contiguous()


def bf16_bits(model: Transformer) -> dict[str, np.ndarray]:
    """All weights as `stored`, by name, without torch: bf16 as uint16 that hold its bits."""
    return dict(served.Bits(named_tensors(model), "bf16"))


def save(
    model: Transformer,
    folder: Path | str,
    tokenizer_from: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype = torch.bfloat16,
    heads: Heads | None = None,
) -> None:
    """Write config.json, model.safetensors (or shards and their index) and the tokenizer's files.

    `heads` for multi-token prediction go into the same files; without them the config says that there are none.

    Whatever is served or published is bf16; another `dtype` gives a checkpoint of that dtype back as it came.

    The folder appears under its name when its last byte is on disk. An existing folder of that name is replaced whole;
    a kill between the two renames leaves none under the name and the old one beside it, hidden.
    """
    spec = replace(model.spec, mtp_layers=heads.spec.mtp_layers if heads else 0)
    named = named_tensors(model) | (named_tensors(heads) if heads else {})
    with _appearing(Path(folder)) as staging:
        _write(named, spec, staging, shard_bytes, dtype)
        for name in TOKENIZER_FILES:
            if tokenizer_from is not None and (source := Path(tokenizer_from) / name).is_file():
                shutil.copyfile(source, staging / name)


def save_heads(heads: Heads, folder: Path | str) -> None:
    """Write heads alone, in bf16, with a config that counts them. As the folder `mtp` of a checkpoint they are found
    there."""
    with _appearing(Path(folder)) as staging:
        _write(named_tensors(heads), heads.spec, staging, SHARD_BYTES, torch.bfloat16)


def empty(spec: ModelSpec, dtype: torch.dtype = torch.float32, numerics: Numerics = PLAIN) -> Transformer:
    """The network with memory but without values: fill every tensor before use."""
    with torch.device("meta"):
        model = Transformer(spec, numerics).to(dtype)
    return _materialised(model)


def _materialised(model: _Module) -> _Module:
    """With memory in place of `meta`; correction biases are float32 whatever the rest is."""
    for gate in model.modules():
        if isinstance(gate, SigmoidGate):
            gate.e_score_correction_bias = gate.e_score_correction_bias.float()
    return model.to_empty(device="cpu")


def random_init(
    spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float32, numerics: Numerics = PLAIN
) -> Transformer:
    """Fresh weights: normal of `initializer_range`, projections into the residual stream smaller by sqrt(2 * layers).

    Values are bf16-representable, so that saving loses nothing.
    """
    model = empty(spec, dtype, numerics)
    generator = torch.Generator().manual_seed(seed)
    norms = {id(m.weight) for m in model.modules() if isinstance(m, RMSNorm)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in norms:
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                into_residual = any(part in name for part in ("o_proj", "down_proj"))
                std = spec.initializer_range / ((2 * spec.layers) ** 0.5 if into_residual else 1.0)
                values = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
                parameter.copy_(values.to(torch.bfloat16))
        for buffer in model.buffers():
            buffer.zero_()
    return model


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all of it is on disk and replaces what had the name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    replaced = staging.with_name(f"{staging.name}.replaced")
    try:
        staging.chmod(0o755)
        yield staging
        for path in (*staging.iterdir(), staging):
            _sync(path)
        if folder.exists():
            os.rename(folder, replaced)
        os.rename(staging, folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _write(named: dict[str, Tensor], spec: ModelSpec, folder: Path, shard_bytes: int, dtype: torch.dtype) -> None:
    """Weights, in one file or in shards and their index, and the config."""
    config = spec.to_hf() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shards: list[list[str]] = []
    total, room = 0, -1
    for name, tensor in named.items():
        size = tensor.numel() * (4 if name.endswith(CORRECTION) else dtype.itemsize)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        total, room = total + size, room - size
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, names in zip([WEIGHTS] if len(shards) == 1 else files, shards, strict=True):
        tensors = {name: stored(name, named[name], dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(folder: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            where = {name: folder / file for name, file in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from None
    elif (folder / WEIGHTS).is_file():
        where = dict.fromkeys(_keys(folder / WEIGHTS), folder / WEIGHTS)
    else:
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    for path in set(where.values()):
        if not path.is_file():
            raise CheckpointError(f"{index} names {path.name}, which is not in the folder")
        missing = {name for name, file in where.items() if file == path} - set(_keys(path))
        if missing:
            raise CheckpointError(f"{path} lacks {_some(missing)}, which {INDEX} promises")
    return {name: path for name, path in where.items() if not name.endswith(".rotary_emb.inv_freq")}


def _wanted(where: dict[str, Path], spec: ModelSpec) -> dict[str, Path]:
    """Without the heads for multi-token prediction, about which the config of a DeepSeek-V3 may be silent."""
    if spec.model_type not in deepseek.FAMILY and not spec.mtp_layers:
        return where
    return {name: path for name, path in where.items() if _layer(name) < spec.layers}


def _layer(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1 for those outside of layers."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _keys(path: Path) -> Iterable[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None


def _check_names(model: Transformer | Heads, given: Iterable[str], source: str) -> None:
    expected, given = set(named_tensors(model)), set(given)
    if model.spec.tie_embeddings:
        given.discard(HEAD)
    if missing := expected - given:
        raise CheckpointError(f"{source}: missing {_some(missing)}")
    if extra := given - expected:
        raise CheckpointError(f"{source}: {_some(extra)} does not belong to a {model.spec.model_type} of this config")


def _copy(targets: Mapping[str, Tensor], name: str, tensor: Tensor, source: str, scale: Tensor | None = None) -> None:
    if name == HEAD and name not in targets:  # a tied head that was written out: the embedding is what counts
        return
    target = targets[name]
    if tensor.shape != target.shape:
        raise CheckpointError(
            f"{source}: tensor {name} has shape {list(tensor.shape)}, but its config says {list(target.shape)}"
        )
    if scale is not None and tensor.dtype == torch.float8_e4m3fn:
        try:
            tensor = served.join(tensor, scale)
        except ValueError as error:
            raise CheckpointError(f"{source}: tensor {name}: {error}") from None
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise CheckpointError(
            f"{source}: tensor {name} is {tensor.dtype}: quantised weights are read only as fp8 e4m3 with "
            f"{name}{SCALE} beside it"
        )
    target.copy_(tensor)


def _some(names: set[str]) -> str:
    first = min(names)
    return f"tensor {first}" if len(names) == 1 else f"{len(names)} tensors, the first of which is {first}"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
