"""What `stretto bench delta` compares: ways to send the difference of two arrays of bits, one chunk at a time.

Each can encode, decode off to the side, and apply what was decoded to a copy of the old values in place. Others' ways
are written as favourably as numpy allows: separate streams, no copies that are not needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import zstandard

from stretto.weights import codec
from stretto.weights.codec import Tier
from stretto.weights.numberline import moved, steps

OURS, XOR, GAP16 = "stretto", "XOR, zstd-1", "gap16 + value, zstd-1"


@dataclass(frozen=True)
class Coder:
    """`decode` gives what `apply` needs; `apply` writes into an array that holds the old values."""

    name: str
    encode: Callable[[np.ndarray, np.ndarray], Any]
    decode: Callable[[np.ndarray, Any], Any]
    apply: Callable[[np.ndarray, Any], None]
    size: Callable[[Any], int] = len


def coders() -> list[Coder]:
    """Ours first (each chunk in the tier that suits it), then each tier, then the others, as far as installed."""
    rows = [_ours(OURS, None)]
    rows += [_ours(f"{OURS} {tier.name.lower()}", tier) for tier in (Tier.RICE, Tier.SPLIT, Tier.DENSE)]
    rows += [
        Coder("int32 + value", _encode_pairs, lambda _, data: data, _scatter, _total),
        Coder(XOR, _encode_xor, _decode_xor, _apply_xor),
        Coder(GAP16, _encode_gaps, _decode_gaps, _scatter, _total),
        Coder("gap16 + XOR, zstd-1", _encode_gaps_xor, _decode_gaps_xor, _scatter, _total),
    ]
    if find_spec("pcodec"):
        rows.append(_pcodec())
    if find_spec("fireworks_delta_compression"):
        rows += [_fireworks("arc_v2"), _fireworks("arc_v3")]
    return rows


def _ours(name: str, tier: Tier | None) -> Coder:
    return Coder(
        name,
        lambda old, new: codec.encode(old, new, tier),
        lambda old, data: codec.decode(old, data, old.shape, old.dtype),
        lambda target, patches: codec.apply(patches, target),
    )


def _total(parts: tuple[Any, ...]) -> int:
    return sum(part.nbytes if isinstance(part, np.ndarray) else len(part) for part in parts)


def _scatter(target: np.ndarray, change: tuple[np.ndarray, np.ndarray]) -> None:
    target[change[0]] = change[1]


def _encode_pairs(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    where = np.flatnonzero(old != new).astype(np.int32)
    return where, new[where]


def _encode_xor(old: np.ndarray, new: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(1).compress((old ^ new).data.cast("B"))


def _decode_xor(old: np.ndarray, data: bytes) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), old.dtype)


def _apply_xor(target: np.ndarray, change: np.ndarray) -> None:
    target ^= change


def _zstd(array: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(1).compress(np.ascontiguousarray(array).data.cast("B"))


def _unzstd(data: bytes, dtype: Any) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), dtype)


def _gap16(where: np.ndarray) -> np.ndarray:
    """Distances as uint16; 65535 stands for so much and no change yet."""
    gaps = np.diff(where, prepend=-1) - 1
    if gaps.size == 0 or gaps.max() < 0xFFFF:
        return gaps.astype(np.uint16)
    far = gaps // 0xFFFF
    out = np.full(gaps.size + int(far.sum()), 0xFFFF, np.uint16)
    out[np.cumsum(far + 1) - 1] = gaps % 0xFFFF
    return out


def _ungap16(gaps: np.ndarray) -> np.ndarray:
    change = gaps != 0xFFFF
    return (np.cumsum(gaps.astype(np.int64) + change) - 1)[change]


def _encode_gaps(old: np.ndarray, new: np.ndarray) -> tuple[bytes, bytes]:
    where = np.flatnonzero(old != new)
    return _zstd(_gap16(where)), _zstd(new[where])


def _decode_gaps(old: np.ndarray, data: tuple[bytes, bytes]) -> tuple[np.ndarray, np.ndarray]:
    return _ungap16(_unzstd(data[0], np.uint16)), _unzstd(data[1], old.dtype)


def _encode_gaps_xor(old: np.ndarray, new: np.ndarray) -> tuple[bytes, bytes]:
    where = np.flatnonzero(old != new)
    return _zstd(_gap16(where)), _zstd(new[where] ^ old[where])


def _decode_gaps_xor(old: np.ndarray, data: tuple[bytes, bytes]) -> tuple[np.ndarray, np.ndarray]:
    where = _ungap16(_unzstd(data[0], np.uint16))
    return where, old[where] ^ _unzstd(data[1], old.dtype)


def _pcodec() -> Coder:
    from pcodec import ChunkConfig, standalone  # type: ignore[attr-defined]

    def encode(old: np.ndarray, new: np.ndarray) -> tuple[bytes, bytes]:
        where = np.flatnonzero(old != new)
        gaps = np.diff(where, prepend=-1).astype(np.uint32)
        found = steps(old[where], new[where]).astype(np.uint32)
        return standalone.simple_compress(gaps, ChunkConfig()), standalone.simple_compress(found, ChunkConfig())

    def decompress(part: bytes) -> np.ndarray:
        array = standalone.simple_decompress(part)
        return np.zeros(0, np.uint32) if array is None else array  # of nothing it makes None

    def decode(old: np.ndarray, data: tuple[bytes, bytes]) -> tuple[np.ndarray, np.ndarray]:
        gaps, found = (decompress(part) for part in data)
        where = np.cumsum(gaps.astype(np.int64)) - 1
        return where, moved(old[where], found.astype(old.dtype))

    return Coder("pcodec gaps + steps", encode, decode, _scatter, _total)


def _fireworks(form: str) -> Coder:
    """Its deltas are between torch tensors, and decoding makes a new tensor: applying is copying that."""
    import fireworks_delta_compression as fireworks  # pyright: ignore[reportMissingImports]
    import torch

    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # its own buffer

    def tensor(array: np.ndarray) -> Any:
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array.view(f"i{array.itemsize}"))

    def encode(old: np.ndarray, new: np.ndarray) -> tuple[Any, Any]:
        return fireworks.delta_compress(src=tensor(old), dst=tensor(new), compression_format=form)

    def decode(old: np.ndarray, data: tuple[Any, Any]) -> Any:
        new = fireworks.delta_decompress(
            src=tensor(old), compressed_diff=data[0], checksum=data[1], compression_format=form
        )
        return new.contiguous().view(torch.uint8).numpy().view(old.dtype).reshape(old.shape)

    return Coder(f"fireworks {form}", encode, decode, np.copyto, lambda data: data[0].numel() * data[0].element_size())
