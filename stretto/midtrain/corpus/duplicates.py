"""Exact and near duplicates: of two alike, the earlier in the corpus stays.

Near duplicates by MinHash (Broder 1997) over 5-token shingles with Rensa: 128 hash values a text, 32 bands of 4, so
that a pair of similarity 0.7 is compared with a probability of 0.9998. What is compared is decided by the share of
equal hash values, an estimate: `margin` below the threshold is let pass for above, so that 95 % of the pairs that
are just as alike as the threshold says are found.
"""

from __future__ import annotations

import math

import numpy as np
import xxhash

from stretto.midtrain.corpus.document import Reason
from stretto.midtrain.corpus.shingles import ngrams

VALUES, BANDS, SHINGLE = 128, 32, 5
SEED = 1
MIN_TOKENS = 20
"""Shorter texts are near duplicates of each other all too easily, and compared exactly only."""


def exact_key(text: str) -> bytes:
    """Equal for texts that differ in blank space at line ends alone."""
    return xxhash.xxh3_128_digest(
        "\n".join(line.rstrip() for line in text.splitlines()).strip().encode("utf-8", "replace")
    )


def signatures(token_hashes: list[np.ndarray]) -> np.ndarray:
    """uint32 [N, 128]: one MinHash a text."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    sets = [ngrams(hashes_T, SHINGLE) for hashes_T in token_hashes]
    offsets = np.cumsum([0, *map(len, sets)]).tolist()
    flat = np.concatenate(sets) if sets else np.empty(0, np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, VALUES, SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, VALUES)


def margin(threshold: float) -> float:
    """By how much 128 hash values underestimate a similarity of `threshold` in one case of twenty."""
    return 1.645 * math.sqrt(threshold * (1.0 - threshold) / VALUES)


class Duplicates:
    """Grows with the texts that are kept: `check` each in the corpus's order."""

    def __init__(self, threshold: float):
        self._threshold = threshold - margin(threshold)
        self._exact: dict[bytes, str] = {}
        self._buckets: list[dict[bytes, list[int]]] = [{} for _ in range(BANDS)]
        self._kept: list[tuple[str, np.ndarray]] = []

    def check(self, name: str, key: bytes, signature: np.ndarray, tokens: int) -> tuple[Reason, str] | None:
        """None when the text is new (and is remembered), else why not and of what it is a copy."""
        if key in self._exact:
            return Reason.DUPLICATE, f"of {self._exact[key]}"
        if tokens >= MIN_TOKENS:
            bands = [band.tobytes() for band in signature.reshape(BANDS, -1)]
            near = {at for bucket, band in zip(self._buckets, bands, strict=True) for at in bucket.get(band, ())}
            for at in sorted(near):
                other, values = self._kept[at]
                alike = float((values == signature).mean())
                if alike >= self._threshold:
                    return Reason.NEAR_DUPLICATE, f"of {other}, {alike:.0%} alike"
            for bucket, band in zip(self._buckets, bands, strict=True):
                bucket.setdefault(band, []).append(len(self._kept))
            self._kept.append((name, signature))
        self._exact[key] = name
        return None
