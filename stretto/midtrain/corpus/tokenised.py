"""Texts as hashed tokens, many at once: what duplicates and evaluation answers are found by.

Tokens are words and single marks, so that layout does not count: `def f(x):  # half` is def f ( x ) : # half. Of each
are known a 32-bit hash, whether it names something (f, x; not what stands in a string), and whether it stands aside:
in a comment or docstring.

    T tokens of all texts, D texts, W words, N bytes
"""

from __future__ import annotations

import keyword
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SPACE, MARK, WORD = range(3)
LONGEST = 24
"""Bytes up to which words are hashed together; longer ones one by one."""
QUOTES = re.compile(rb"\"\"\"|'''")
PREFIX = re.compile(rb"[ \t]*[rRuU]?")
INDENT = 100
"""Bytes of a line before a docstring's quotes that are looked at."""


def _classes() -> np.ndarray:
    kinds = np.full(256, MARK, np.uint8)
    kinds[[byte for byte in range(256) if byte >= 0x80 or chr(byte).isalnum() or byte == ord("_")]] = WORD
    kinds[list(b" \t\n\r\f\v")] = SPACE
    return kinds


def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1)
    return table


CLASSES, CRC = _classes(), _crc_table()
MARKS = np.array([zlib.crc32(bytes([byte])) for byte in range(256)], np.uint32)
COMMA, ESCAPE, HASH, SINGLE, DOUBLE = (MARKS[ord(mark)] for mark in ",\\#'\"")
CLOSERS, ROUND = np.sort(MARKS[list(b")]}")]), np.sort(MARKS[list(b"()")])
NAME = np.uint64(1)
"""What stands for any name where only the shape counts."""
KEYWORDS = np.sort(np.array([zlib.crc32(word.encode()) for word in keyword.kwlist], np.uint32))


@dataclass(frozen=True)
class Tokens:
    """Those of text d are [offsets[d] : offsets[d + 1]]."""

    hashes_T: np.ndarray  # uint32
    names_T: np.ndarray  # bool
    aside_T: np.ndarray  # bool
    offsets: np.ndarray  # int64 [D + 1]

    def of(self, text: int) -> np.ndarray:
        """uint64 [tokens of this text]: their hashes."""
        return self.hashes_T[self.offsets[text] : self.offsets[text + 1]].astype(np.uint64)

    @property
    def shapes_T(self) -> np.ndarray:
        """uint64 [T]: hashes, of all names the same."""
        return np.where(self.names_T, NAME, self.hashes_T)

    def where(self, stay_T: np.ndarray) -> Tokens:
        """These tokens alone."""
        offsets = np.concatenate([[0], np.cumsum(stay_T)])[self.offsets]
        return Tokens(self.hashes_T[stay_T], self.names_T[stay_T], self.aside_T[stay_T], offsets)


def tokenise(texts: Sequence[str]) -> Tokens:
    """All tokens of the texts, in order. A megabyte at a time is fastest."""
    bodies = [text.encode("utf-8", "surrogatepass") for text in texts]
    begins_D = np.cumsum([0, *(len(body) + 1 for body in bodies)], dtype=np.int64)
    data_N = np.frombuffer(b"\n".join([*bodies, b"\n"]), np.uint8)
    kinds_N = CLASSES[data_N]
    word_N = kinds_N == WORD
    inner_N = np.zeros(len(data_N), bool)  # of a word, but its first byte
    np.logical_and(word_N[1:], word_N[:-1], out=inner_N[1:])
    starts_T = np.flatnonzero((kinds_N != SPACE) & ~inner_N)
    first_T = data_N[starts_T]
    hashes_T, word_T = MARKS[first_T], word_N[starts_T]
    starts_W = starts_T[word_T]
    word_N[:-1] &= ~inner_N[1:]  # now the last byte of each word
    hashes_T[word_T] = _crc32(data_N, starts_W, np.flatnonzero(word_N) + 1 - starts_W)
    names_T = word_T & ((first_T < ord("0")) | (first_T > ord("9"))) & ~among(hashes_T, KEYWORDS)
    names_T &= ~_quoted(data_N, starts_T, first_T)
    aside_T = np.zeros(len(starts_T) + 1, np.int8)
    for begins, ends in (_comments(data_N), _blocks(bodies, begins_D)):
        begins, ends = np.searchsorted(starts_T, begins), np.searchsorted(starts_T, ends)
        full = begins < ends
        aside_T[begins[full]] += 1
        aside_T[ends[full]] -= 1
    inside_T = np.cumsum(aside_T, dtype=np.int8)[:-1] > 0
    return Tokens(hashes_T, names_T, inside_T, np.searchsorted(starts_T, begins_D))


def literal(tokens: Tokens) -> Tokens:
    """All but the marks that make code a comment."""
    return tokens.where(tokens.hashes_T != HASH)


def plain(tokens: Tokens) -> Tokens:
    """Without comments and docstrings, and alike for all that a formatter chooses: one kind of quotes, no line
    continuations, no trailing commas, no parentheses around what has some."""
    tokens = tokens.where(~(tokens.aside_T | (tokens.hashes_T == ESCAPE)))
    tokens.hashes_T[tokens.hashes_T == SINGLE] = DOUBLE
    trailing_T = tokens.hashes_T == COMMA
    trailing_T[:-1] &= among(tokens.hashes_T[1:], CLOSERS)
    tokens = tokens.where(~trailing_T)
    again_T = among(tokens.hashes_T, ROUND)
    again_T[1:] &= tokens.hashes_T[1:] == tokens.hashes_T[:-1]
    again_T[:1] = False
    return tokens.where(~again_T)


def among(values: np.ndarray, few: np.ndarray) -> np.ndarray:
    """bool: which of `values` are one of the sorted `few`."""
    at = np.searchsorted(few, values)
    at[at == len(few)] = 0
    return few[at] == values


def _crc32(data_N: np.ndarray, starts_W: np.ndarray, sizes_W: np.ndarray) -> np.ndarray:
    """uint32 [W]: zlib's crc32 of each word, a byte of all words at a time, short words first."""
    short_W = np.minimum(sizes_W, LONGEST + 1).astype(np.uint8)
    order_W = np.argsort(short_W, kind="stable")
    ended = np.cumsum(np.bincount(short_W, minlength=LONGEST + 2))
    at_W = starts_W[order_W]
    crc_W = np.full(len(at_W), 0xFFFFFFFF, np.uint32)
    for byte in range(LONGEST):
        rest = crc_W[ended[byte] :]
        if not len(rest):
            break
        rest[:] = CRC[(rest ^ data_N[at_W[ended[byte] :] + byte]) & 0xFF] ^ (rest >> 8)
    crc_W ^= np.uint32(0xFFFFFFFF)
    for number in range(ended[LONGEST], len(at_W)):
        start, size = at_W[number], sizes_W[order_W[number]]
        crc_W[number] = zlib.crc32(data_N[start : start + size].tobytes())
    out_W = np.empty_like(crc_W)
    out_W[order_W] = crc_W
    return out_W


def _quoted(data_N: np.ndarray, starts_T: np.ndarray, first_T: np.ndarray) -> np.ndarray:
    """bool [T]: after an odd number of quotes in its line, and so most likely in a string."""
    quotes_T = (first_T == ord('"')) | (first_T == ord("'"))
    before_T = np.cumsum(quotes_T) - quotes_T
    lines = np.searchsorted(starts_T, np.flatnonzero(data_N == ord("\n")))
    base_T = np.zeros(len(starts_T) + 1, np.int64)
    lines = lines[lines < len(starts_T)]
    base_T[lines] = before_T[lines]
    return (before_T - np.maximum.accumulate(base_T)[:-1]) % 2 == 1


def _comments(data_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(begins, ends) of `# …` and `// …` where a line begins or after a blank."""
    marks_N = data_N == ord("#")
    slash_N = data_N == ord("/")
    marks_N[:-1] |= slash_N[:-1] & slash_N[1:]
    begins = np.flatnonzero(marks_N)
    before = data_N[np.maximum(begins - 1, 0)]
    begins = begins[(begins == 0) | (before == 32) | (before == 9) | (before == 10)]
    lines = np.flatnonzero(data_N == 10)
    ends = lines[np.searchsorted(lines, begins)]
    first = np.ones(len(ends), bool)
    first[1:] = ends[1:] != ends[:-1]
    return begins[first], ends[first]


def _blocks(bodies: Sequence[bytes], begins_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(begins, ends) of triple-quoted strings that fill their lines."""
    found = [
        (begin + int(base), end + int(base))
        for body, base in zip(bodies, begins_D, strict=False)
        for begin, end in _docstrings(body)
    ]
    spans = np.array(found, np.int64).reshape(-1, 2)
    return spans[:, 0], spans[:, 1]


def _docstrings(body: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of each triple-quoted string with which a line begins and after which it holds a comment at most."""
    unclosed: set[bytes] = set()
    at = 0
    while found := QUOTES.search(body, at):
        at, quotes = found.end(), found.group()
        before = body[max(0, found.start() - INDENT) : found.start()]
        before = before[before.rfind(b"\n") + 1 :]
        if b"#" in before or quotes in unclosed:
            continue
        closing = body.find(quotes, at)
        if closing < 0:
            unclosed.add(quotes)
            continue
        at = closing + len(quotes)
        line = body.find(b"\n", at)
        after = body[at : line if line >= 0 else len(body)].lstrip()
        if PREFIX.fullmatch(before) and (not after or after.startswith(b"#")):
            yield found.start() - len(before.strip()), at
