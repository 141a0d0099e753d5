"""safetensors files as raw bits, without torch: bf16 and fp8 come and go as unsigned integers plus a dtype tag.

Tags are those of the file format ("BF16", "F32", "F8_E4M3", ...). Left out: reading a part of a file.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from stretto.weights.state import bits

METADATA = {"format": "pt"}

_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "BOOL": "bool",
}
"""Tag -> what the safetensors library calls it."""

_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "U16": 2, "I16": 2, "U32": 4, "I32": 4}

_DEFAULT_TAGS = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8", "uint32": "U32", "int8": "I8"} | {
    "int16": "I16",
    "int32": "I32",
    "bool": "BOOL",
}
"""uint16 is how bf16 travels in Stretto."""

_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F8_E5M2": 0x7C, "F8_E4M3": 0x7F}
"""Bits that are all set exactly in infinities and NaNs."""


def default_tag(array: np.ndarray) -> str:
    """The tag an array gets when nobody names one; ValueError if its dtype has none."""
    try:
        return _DEFAULT_TAGS[array.dtype.name]
    except KeyError:
        raise ValueError(f"tensors of {array.dtype} cannot be published: give 8, 16 or 32-bit values") from None


def count_nonfinite(array: np.ndarray, tag: str) -> int:
    """Infinities and NaNs among values of type `tag`; 0 for integers."""
    mask = _EXPONENTS.get(tag)
    if mask is None:
        return 0
    raw = bits(array)
    mask = raw.dtype.type(mask)
    return int(np.count_nonzero((raw & mask) == mask))


def pack(tensors: Mapping[str, np.ndarray], tags: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file; the same for the same tensors."""
    specs, keep = _specs(tensors, tags)
    data = safetensors.serialize(specs, METADATA)
    del keep
    return data


def save(path: Path, tensors: Mapping[str, np.ndarray], tags: Mapping[str, str]) -> None:
    """Write the file that `pack` makes, without a copy in memory. Whatever is killed when, `path` holds the old bytes
    or all of the new ones. OSError when it cannot be written."""
    specs, keep = _specs(tensors, tags)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".{os.getpid()}-{secrets.token_hex(8)}"
    try:
        try:
            safetensors.serialize_file(specs, part, METADATA)
        except safetensors.SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error
        del keep
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in files of at most `limit` bytes each, in order; a larger tensor is alone in its file."""
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def index(files: Mapping[str, str], total: int) -> bytes:
    """`model.safetensors.index.json`: which file holds which tensor, as Hugging Face has it."""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}, indent=1).encode()


def _specs(tensors: Mapping[str, np.ndarray], tags: Mapping[str, str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What the library wants to know, and what must live until it is done: it reads the memory by address."""
    specs, keep = {}, []
    for name, array in tensors.items():
        raw = bits(array)
        tag = tags[name]
        if tag not in _NAMES or _WIDTHS.get(tag, 1) != raw.itemsize:
            raise ValueError(f"tensor {name}: dtype tag {tag} does not fit values of {raw.itemsize} bytes")
        keep.append(raw)
        specs[name] = safetensors.TensorSpec(
            dtype=_NAMES[tag], shape=list(array.shape), data_ptr=raw.ctypes.data, data_len=raw.nbytes
        )
    return specs, keep


def unpack(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors as read-only unsigned integers, and their tags. ValueError if the bytes are no safetensors file."""
    tensors, tags = {}, {}
    try:
        items = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from error
    for name, item in items:
        tag = item["dtype"]
        if tag not in _NAMES:
            raise ValueError(f"tensor {name} has dtype {tag}, known are {', '.join(_NAMES)}")
        tensors[name] = np.frombuffer(item["data"], f"<u{_WIDTHS.get(tag, 1)}").reshape(item["shape"])
        tags[name] = tag
    return tensors, tags
