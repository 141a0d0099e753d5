"""Exact and near duplicates: of two alike, the earlier in the corpus stays.

Near duplicates by MinHash (Broder 1997) over token shingles with Rensa, 128 hash values a text, in three looks: at all
tokens, without comments and layout (another licence header, another formatter), and with all names alike (renamed).
For all tokens there are 32 bands of 4, so that a pair of similarity 0.7 is compared with a probability of 0.9998. What
is compared is decided by the share of equal hash values, an estimate: `margin` below the threshold is let pass for
above, so that 95 % of the pairs that are just as alike as the threshold says are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from stretto.midtrain.corpus.buckets import Buckets
from stretto.midtrain.corpus.document import Reason
from stretto.midtrain.corpus.grams import PRIME, ngrams_by_text
from stretto.midtrain.corpus.tokenised import Tokens

VALUES = 128
SEED = 1


@dataclass(frozen=True)
class Look:
    """One way to compare: shingles of so many tokens; hash values a band, so many of which must agree for two texts to
    be compared; the least similarity (0: the corpus's own); texts of fewer tokens are alike too easily."""

    shingle: int
    band: int
    threshold: float
    tokens: int
    said: str

    def keys(self, number: int, values: np.ndarray) -> np.ndarray:
        """uint64 [bands]: two texts are compared when they have one in common. `number` tells the looks apart."""
        bands = values[: VALUES // self.band * self.band].reshape(-1, self.band).astype(np.uint64)
        keys = np.arange(len(bands), dtype=np.uint64) + np.uint64(number << 8)
        for at in range(self.band):
            keys = (keys ^ bands[:, at]) * np.uint64(PRIME)
            keys ^= keys >> np.uint64(29)
        return keys


LOOKS = (
    Look(shingle=5, band=4, threshold=0.0, tokens=20, said=""),
    Look(shingle=5, band=6, threshold=0.75, tokens=40, said=" without comments"),
    Look(shingle=8, band=8, threshold=0.85, tokens=150, said=" but for names"),
)


def exact_key(text: str) -> bytes:
    """Equal for texts that differ in blank space at line ends alone."""
    return xxhash.xxh3_128_digest(
        "\n".join(line.rstrip() for line in text.splitlines()).strip().encode("utf-8", "replace")
    )


def sizes(whole: Tokens, plain: Tokens) -> np.ndarray:
    """int64 [D, 3]: tokens of each text for each look."""
    return np.stack([np.diff(tokens.offsets) for tokens in (whole, plain, plain)], 1)


def signatures(whole: Tokens, plain: Tokens) -> np.ndarray:
    """uint32 [D, 3, 128]: MinHashes of each text's tokens, of those of its plain form, and of their shapes."""
    forms = ((whole, whole.hashes_T), (plain, plain.hashes_T), (plain, plain.shapes_T))
    return np.stack(
        [
            _minhash(*ngrams_by_text(values_T, tokens.offsets, look.shingle))
            for (tokens, values_T), look in zip(forms, LOOKS, strict=True)
        ],
        1,
    )


def _minhash(grams: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    matrix = RMinHash.digest_matrix_from_flat_token_hashes(grams, offsets.tolist(), VALUES, SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, VALUES)


def margin(threshold: np.ndarray) -> np.ndarray:
    """By how much 128 hash values underestimate a similarity of `threshold` in one case of twenty."""
    return 1.645 * np.sqrt(threshold * (1.0 - threshold) / VALUES)


class Duplicates:
    """Grows with the texts that are kept: `check` each in the corpus's order. About 2 KB a text."""

    def __init__(self, threshold: float):
        self._least = np.array([look.threshold or threshold for look in LOOKS])
        self._least -= margin(self._least)
        self._exact: dict[bytes, str] = {}
        self._buckets = Buckets()
        self._names: list[str] = []
        self._values = np.empty((1024, len(LOOKS), VALUES), np.uint16)

    def check(self, name: str, key: bytes, signature: np.ndarray, sizes: Sequence[int]) -> tuple[Reason, str] | None:
        """None when the text is new (and is remembered), else why not and of what it is a copy. `signature` is its row
        of `signatures`, `sizes` the number of its tokens for each look."""
        if key in self._exact:
            return Reason.DUPLICATE, f"of {self._exact[key]}"
        if looks := [number for number, look in enumerate(LOOKS) if sizes[number] >= look.tokens]:
            keys = np.concatenate([LOOKS[number].keys(number, signature[number]) for number in looks])
            lower = signature.astype(np.uint16)  # equal by chance once in 65,536 values
            for other in self._buckets.sharing(keys):
                alike = (self._values[other] == lower).mean(1)[looks]
                for number in np.flatnonzero(alike >= self._least[looks]):
                    said = f"of {self._names[other]}, {alike[number]:.0%} alike{LOOKS[looks[number]].said}"
                    return Reason.NEAR_DUPLICATE, said
            self._remember(name, keys, lower)
        self._exact[key] = name
        return None

    def _remember(self, name: str, keys: np.ndarray, values: np.ndarray) -> None:
        number = len(self._names)
        if number == len(self._values):
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        self._values[number] = values
        self._names.append(name)
        self._buckets.add(keys, number)
