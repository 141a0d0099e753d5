"""Fingerprints: the same for the same bits under any view, another for any difference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.weights.state import bits, fingerprint, tensor_hash

W = np.arange(12, dtype=np.uint16).reshape(3, 4)


def test_only_bits_count() -> None:
    same = [
        {"w": W, "b": W[0]},
        {"b": W[0].copy(), "w": W.copy()},
        {"w": W.view(np.int16), "b": W[0].view(np.float16)},
        {"w": np.asfortranarray(W), "b": np.repeat(W[0], 2)[::2]},
        {"w": W.astype(">u2"), "b": W[0]},
    ]
    assert len({fingerprint(tensors) for tensors in same}) == 1


def test_every_difference_counts() -> None:
    flipped = W.copy()
    flipped[2, 3] ^= 1
    states = [
        {"w": W},
        {"v": W},
        {"w": W.reshape(4, 3)},
        {"w": W.T},
        {"w": flipped},
        {"w": W.view(np.uint8)},
        {"w": W, "x": np.zeros(0, np.uint8)},
        {},
    ]
    assert len({fingerprint(tensors) for tensors in states}) == len(states)


def test_zero_d_and_empty() -> None:
    assert bits(np.array(1.0, np.float32)).shape == ()
    assert bits(np.zeros((0, 3), np.float16)).shape == (0, 3)
    assert fingerprint({"s": np.array(0.0, np.float32)}) != fingerprint({"s": np.array(-0.0, np.float32)})


def test_dtypes_without_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="complex128"):
        bits(np.zeros(2, complex))


@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_flipped_bit_is_another_hash(data: bytes, choice: st.DataObject) -> None:
    array = np.frombuffer(data, np.uint8).copy()
    before = tensor_hash(array)
    array[choice.draw(st.integers(0, len(data) - 1))] ^= 1 << choice.draw(st.integers(0, 7))
    assert tensor_hash(array) != before
