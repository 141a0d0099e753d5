"""Secrets that no scanner knows the form of: random-looking strings under a name that says what they are.

    PASSWORD = "vT9x…"     api_key: 'a3f8…'     "Authorization": "Bearer eyJ…"

Random-looking: letters and digits mixed, with as many bits a character as chance would give. A plain word, a path and
a placeholder are not.
"""

from __future__ import annotations

import math
import re
from collections import Counter

VALUE = re.compile(r"""(?:[:=]\s{0,4}[bruf]?|\(|,\s?)["']([A-Za-z0-9+/_=.\-]{16,200})["']""")
NAMED = re.compile(
    r"(?:passw(?:or)?d|passphrase|secret|token|credential|(?:api|access|private|auth)[_-]?key)[\w\"' \]\-]{0,24}$", re.I
)
HEADER = re.compile(r"\b(?:Bearer|Basic) +([A-Za-z0-9+/_=.\-]{20,})")
PLACEHOLDER = re.compile(
    r"example|test|dummy|fake|sample|your|change|placeholder|xxxx|1234567|abcdef|insecure|mock", re.I
)
BITS = 3.5
"""Shannon entropy a character; English words and identifiers have about 3."""
BEFORE = 48
"""Characters before a value in which its name is looked for."""


def kind(text: str) -> str:
    """What sort of secret the text assigns, or empty."""
    for found in VALUE.finditer(text):
        if random_looking(found.group(1)) and NAMED.search(text, max(0, found.start() - BEFORE), found.start()):
            return "assigned secret"
    for found in HEADER.finditer(text):
        if random_looking(found.group(1)):
            return "authorization header"
    return ""


def random_looking(value: str) -> bool:
    """Whether chance, not a person, chose these characters."""
    letters, digits = sum(map(str.isalpha, value)), sum(map(str.isdigit, value))
    words = re.split(r"[_./\-]", value)
    if digits < 2 or letters < 2 or max(map(len, words)) < 12 or PLACEHOLDER.search(value):
        return False
    counts = Counter(value).values()
    bits = -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
    return bits >= min(BITS, 0.8 * math.log2(len(value)))
