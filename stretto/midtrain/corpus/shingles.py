"""Texts as hashed token n-grams: what duplicates and evaluation answers are found by.

Tokens are words and single marks, so that layout does not count. A 32-bit hash of each token is rolled into 64-bit
hashes of `n` neighbours.
"""

from __future__ import annotations

import re
import zlib

import numpy as np

TOKEN = re.compile(rb"[A-Za-z0-9_\x80-\xff]+|[^\sA-Za-z0-9_\x80-\xff]")
ASIDE = re.compile(
    r"^[ \t]*(?:#|//)[^\n]*\n?|[ \t]+(?:#|//)[^\n]*$|^[ \t]*[rRuU]?(?P<quotes>\"\"\"|''').*?(?P=quotes)[ \t]*$",
    re.M | re.S,
)
ODD = np.uint64(0x9E3779B97F4A7C15)


def bare(text: str) -> str:
    """The text without what looks like comments and docstrings, wherever it stands: for comparing, not for running."""
    return ASIDE.sub("", text)


def token_hashes(text: str) -> np.ndarray:
    """uint64 [T]: one 32-bit hash per token."""
    tokens = TOKEN.findall(text.encode("utf-8", "surrogatepass"))
    return np.fromiter(map(zlib.crc32, tokens), np.uint64, len(tokens))


def ngrams(hashes_T: np.ndarray, n: int) -> np.ndarray:
    """uint64 [T - n + 1], or one hash of everything when there are fewer than `n` tokens (none: empty)."""
    size = len(hashes_T)
    if size == 0:
        return hashes_T
    n = min(n, size)
    rolled = np.zeros(size - n + 1, np.uint64)
    with np.errstate(over="ignore"):
        for at in range(n):
            rolled = (rolled ^ hashes_T[at : size - n + 1 + at]) * ODD
            rolled ^= rolled >> np.uint64(29)
    return rolled
