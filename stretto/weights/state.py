"""What a set of weights *is*: a fingerprint of names, shapes and exact bits.

Trainer, follower and engine each compute it from the bytes they hold; an engine is fit for a version exactly when its
fingerprint is the version's. Each tensor is hashed with xxh3-128 (against accidents, about memory speed), the list of
them with BLAKE3 (against anything). Arrays are looked at as unsigned integers of their width, so that a bf16 tensor
viewed as uint16 here and as int16 there is the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import blake3
import numpy as np
import xxhash

TensorEntry = tuple[str, int, tuple[int, ...], bytes]
"""Name, bits per element, shape, hash of the bits."""


def bits(array: np.ndarray) -> np.ndarray:
    """`array` as contiguous little-endian unsigned integers of the same width and shape; a copy only if it is strided
    or big-endian. Raises ValueError for dtypes without a fixed width."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize not in (1, 2, 4, 8):
        raise ValueError(f"cannot take the bits of dtype {array.dtype}: give a view as uint8, uint16 or uint32")
    shape = array.shape  # ascontiguousarray makes 0-d arrays 1-d
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).view(f"<u{array.dtype.itemsize}").reshape(shape)


def tensor_hash(array: np.ndarray) -> bytes:
    """xxh3-128 of the tensor's bits in row-major order: 16 bytes."""
    return xxhash.xxh3_128_digest(bits(array).reshape(-1).view(np.uint8).data)


def root(entries: Iterable[TensorEntry]) -> str:
    """BLAKE3 over the entries in the order of their names: 64 hex digits."""
    digest = blake3.blake3()
    for name, width, shape, hashed in sorted(entries):
        label = f"{name}\0{width}\0{','.join(map(str, shape))}\0".encode()
        digest.update(len(label).to_bytes(4, "little") + label + hashed)
    return digest.hexdigest()


def fingerprint(tensors: Mapping[str, np.ndarray]) -> str:
    """The state's identity: `root` over (name, bits per element, shape, xxh3-128), sorted by name.

    Example: `fingerprint({"w": np.zeros((2, 3), np.uint16)})`, the same for every process that holds these bits.
    """
    return root((name, array.dtype.itemsize * 8, array.shape, tensor_hash(array)) for name, array in tensors.items())
