"""Which tokens could have been drawn: the support of a truncated distribution, token by token.

Under top-p or top-k the engine draws from a part of the vocabulary, renormalised. The trainer must normalise over the
very same part, or the importance ratio is wrong even on policy; recomputing the cut is not enough, because rounding and
newer weights move its border ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556). So the set itself travels.

A set of n of V tokens takes the smallest of three forms, which n and V alone decide (the first on a tie):

    ids         the n ids that are in it, ascending, of 1, 2 or 3 bytes (4 from 2^24 on)
    complement  the V - n ids that are not
    mask        one bit per token of the vocabulary, lowest first

so it never takes more than V / 8 bytes and is always exact. Small sets are the rule: a trained policy mostly keeps one
or two tokens. Pure numpy: engine, harness and trainer use it. Letters: `N` sampled tokens, `V` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import zstandard

from stretto.records import SupportChunk

_IDS, _COMPLEMENT, _MASK = range(3)
_BLOCK = 1 << 22
"""Elements of the boolean array that `contains` holds at once."""


@dataclass(frozen=True)
class Support:
    """`N` sets of tokens in their compact forms, back to back."""

    vocab: int
    counts_N: np.ndarray  # int64, tokens in each set
    data: np.ndarray  # uint8, the sets

    def __len__(self) -> int:
        return len(self.counts_N)

    @staticmethod
    def of(kept_NV: np.ndarray) -> Support:
        """From bool [N, V]."""
        vocab = kept_NV.shape[1]
        counts_N = np.count_nonzero(kept_NV, axis=1)
        form_N, sizes_N = _forms(counts_N, vocab)
        form_B = np.repeat(form_N, sizes_N)
        data = np.empty(len(form_B), np.uint8)
        for form, listed_RV in ((_IDS, kept_NV[form_N == _IDS]), (_COMPLEMENT, ~kept_NV[form_N == _COMPLEMENT])):
            data[form_B == form] = _bytes(np.nonzero(listed_RV)[1], _width(vocab))
        data[form_B == _MASK] = np.packbits(kept_NV[form_N == _MASK], axis=1, bitorder="little").reshape(-1)
        return Support(vocab, counts_N, data)

    @staticmethod
    def none(vocab: int) -> Support:
        """Of no tokens at all."""
        return Support(vocab, np.zeros(0, np.int64), np.zeros(0, np.uint8))

    @staticmethod
    def join(parts: Sequence[Support]) -> Support:
        """One after the other. Raises ValueError when their vocabularies differ."""
        vocabularies = {part.vocab for part in parts}
        if len(vocabularies) != 1:
            raise ValueError(f"supports over vocabularies of {sorted(vocabularies)} tokens can't be joined")
        counts_N = np.concatenate([part.counts_N for part in parts])
        return Support(parts[0].vocab, counts_N, np.concatenate([part.data for part in parts]))

    def split(self) -> list[Support]:
        """One support per token."""
        bounds = self._layout[1].tolist()
        return [
            Support(self.vocab, self.counts_N[n : n + 1], self.data[start:end])
            for n, (start, end) in enumerate(itertools.pairwise(bounds))
        ]

    def mask(self, start: int, end: int) -> np.ndarray:
        """bool [end - start, V] of the tokens `[start, end)`: true for what is in their sets."""
        form_N, bounds = self._layout[0][start:end], self._layout[1][start : end + 1]
        counts_N = self.counts_N[start:end]
        data, form_B = self.data[bounds[0] : bounds[-1]], np.repeat(form_N, np.diff(bounds))
        kept_NV = np.zeros((len(form_N), self.vocab), bool)
        kept_NV[form_N == _COMPLEMENT] = True
        for form, listed_N, value in ((_IDS, counts_N, True), (_COMPLEMENT, self.vocab - counts_N, False)):
            rows = np.flatnonzero(form_N == form)
            ids = _numbers(data[form_B == form], _width(self.vocab))
            kept_NV[np.repeat(rows, listed_N[rows]), ids] = value
        packed = data[form_B == _MASK].reshape(-1, _mask_bytes(self.vocab))
        kept_NV[form_N == _MASK] = np.unpackbits(packed, axis=1, count=self.vocab, bitorder="little").astype(bool)
        return kept_NV

    def contains(self, ids_N: np.ndarray) -> np.ndarray:
        """bool [N]: whether each token is in its own set."""
        step = max(1, _BLOCK // self.vocab)
        found = [
            self.mask(start, min(start + step, len(self)))[np.arange(len(ids)), ids]
            for start, ids in zip(itertools.count(0, step), np.split(ids_N, range(step, len(ids_N), step)))
        ]
        return np.concatenate(found)

    @cached_property
    def _layout(self) -> tuple[np.ndarray, np.ndarray]:
        """Form of each set [N], and where in `data` each begins and ends [N + 1]."""
        form_N, sizes_N = _forms(self.counts_N, self.vocab)
        return form_N, np.concatenate([[0], np.cumsum(sizes_N)])

    def seal(self) -> SupportChunk:
        """As it travels."""
        plain = _bytes(self.counts_N, 4).reshape(-1, 4).T.tobytes() + self.data.tobytes()  # high bytes side by side
        packed = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(plain)
        return SupportChunk(count=len(self), vocab=self.vocab, sets=packed)

    @staticmethod
    def open(chunk: SupportChunk) -> Support:
        """Raises ValueError when the chunk is damaged or its sets are impossible."""
        head = 4 * chunk.count
        try:
            size = zstandard.frame_content_size(chunk.sets)
            if not head <= size <= head + chunk.count * _mask_bytes(chunk.vocab):
                raise ValueError(f"supports of {chunk.count} tokens can't take {size} bytes")
            plain = zstandard.ZstdDecompressor().decompress(chunk.sets)
        except zstandard.ZstdError as error:
            raise ValueError(f"supports can't be decompressed: {error}") from None
        counts_N = _numbers(np.frombuffer(plain[:head], np.uint8).reshape(4, -1).T.reshape(-1), 4).astype(np.int64)
        if (counts_N < 1).any() or (counts_N > chunk.vocab).any():
            raise ValueError(f"supports of {chunk.count} tokens have sizes outside 1 to {chunk.vocab}")
        data = np.frombuffer(plain[head:], np.uint8)
        if int(_forms(counts_N, chunk.vocab)[1].sum()) != len(data):
            raise ValueError(f"supports of {chunk.count} tokens take another number of bytes than their sizes say")
        return Support(chunk.vocab, counts_N, data)


def _forms(counts_N: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """The form of each set, and its bytes."""
    width, bits = _width(vocab), np.full_like(counts_N, _mask_bytes(vocab))
    sizes_3N = np.stack([width * counts_N, width * (vocab - counts_N), bits])
    return sizes_3N.argmin(axis=0), sizes_3N.min(axis=0)


def _width(vocab: int) -> int:
    return 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 16 else 3 if vocab <= 1 << 24 else 4


def _mask_bytes(vocab: int) -> int:
    return -(-vocab // 8)


def _bytes(numbers: np.ndarray, width: int) -> np.ndarray:
    return numbers.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].reshape(-1)


def _numbers(data: np.ndarray, width: int) -> np.ndarray:
    wide = np.zeros((len(data) // width, 4), np.uint8)
    wide[:, :width] = data.reshape(-1, width)
    return wide.view("<u4").reshape(-1)
