"""What a text spells in another way than it is read: strings put together, escapes, hexadecimal digits, strings turned
round. Scanned for credentials beside the text itself; base64 the scanner undoes."""

from __future__ import annotations

import re

import numpy as np

GAP = re.compile(rb"""["'][ \t]*(?:\\?\n[ \t]*)?(?:\+[ \t]*)?[bfruBFRU]{0,2}["'](?=[\w/+=.\-])""")
"""Between two string literals that are one."""
JOINED = re.compile(rb"\.join\((?<=[\"']{2}\.join\()\s*[\[(]([^\])]{1,2000})[\])]")
BROKEN = re.compile(rb"\\\n(?<=[\w/+=.\-]\\\n)")
HEXADECIMAL = re.compile(rb"(?:fromhex|unhexlify)\(\s*[bru]?[\"']([0-9a-fA-F]{32,})[\"']")
BYTES = re.compile(rb"\\x[0-9a-fA-F]{2}(?:\\x[0-9a-fA-F]{2}){11,}")
FILLED = re.compile(
    rb"""["']([\w/+=.\-]{0,200})(?:%s|\{\})([\w/+=.\-]{0,200})["'](?:\s?%\s?\(?|\.format\()["']([\w/+=.\-]+)["']"""
)
FILLING = (b'% "', b"% '", b'%"', b"%'", b'% ("', b"% ('", b'%("', b"%('", b'.format("', b".format('")
"""A text without any of these fills in no string."""
TURNED = re.compile(rb"[\"']([^\"'\n]{16,})[\"']\[::-1\]")
BEFORE, AFTER = 80, 200
"""Bytes around a gap that are shown with it: the name before, the string after."""


def _table(these: bytes) -> np.ndarray:
    table = np.zeros(256, bool)
    table[list(these)] = True
    return table


QUOTE, ENDS = _table(b"\"'"), _table(b" \t\n+\\")
INSIDE = _table(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_/+=.-")


def spelled(text: str) -> str:
    """Pieces of the text as they would be read, a line each; empty for most texts."""
    body = text.encode("utf-8", "replace")
    pieces = [GAP.sub(b"", body[begin:end]) for begin, end in _around(_gaps(body))]
    if b".join(" in body:
        pieces += [b'joined = "' + re.sub(rb"[\"',\s+]", b"", inside) + b'"' for inside in JOINED.findall(body)]
    if b"\\\n" in body:
        broken = ((found.start(), found.end()) for found in BROKEN.finditer(body))
        pieces += [BROKEN.sub(b"", body[begin:end]) for begin, end in _around(list(broken))]
    if b"fromhex" in body or b"unhexlify" in body:
        pieces += [bytes.fromhex(digits[: len(digits) & ~1].decode()) for digits in HEXADECIMAL.findall(body)]
    if b"\\x" in body:
        pieces += [bytes.fromhex(run.replace(b"\\x", b"").decode()) for run in BYTES.findall(body)]
    if any(cue in body for cue in FILLING):
        pieces += [b'filled = "' + begin + inside + end + b'"' for begin, end, inside in FILLED.findall(body)]
    if b"[::-1]" in body:
        pieces += [string[::-1] for string in TURNED.findall(body)]
    return b"\n".join(pieces).decode("utf-8", "replace")


def _gaps(body: bytes) -> list[tuple[int, int]]:
    data = np.frombuffer(body, np.uint8)
    at = np.flatnonzero(QUOTE[data[1:-1]] & ENDS[data[2:]] & INSIDE[data[:-2]]) + 1
    found = (GAP.match(body, position) for position in at.tolist())
    return [gap.span() for gap in found if gap]


def _around(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What surrounds the spans, those that meet as one."""
    wide: list[tuple[int, int]] = []
    for begin, end in spans:
        if wide and begin <= wide[-1][1]:
            wide[-1] = (wide[-1][0], end + AFTER)
        else:
            wide.append((max(0, begin - BEFORE), end + AFTER))
    return wide
