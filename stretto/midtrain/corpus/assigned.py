"""Secrets that no scanner knows the form of: random-looking strings beside a word that says what they are.

    PASSWORD = "vT9x…"     api_key: str = 'a3f8…'     getenv("API_KEY", "q7…")     password: kP2…     Bearer eyJ…
    postgres://app:kP2…@db

Random-looking: words, numbers and marks in it are as short as chance makes them, with as many bits a character as
chance gives. A plain word, a path and a placeholder are not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from stretto.midtrain.corpus.notices import ascii_lower

WORDS = (
    "passw", "passphrase", "pwd", "secret", "token", "credential", "key", "auth", "login", "private", "sessionid",
    "_pat", "bearer ", "basic ",
)  # fmt: skip
KEYS = re.compile(
    r"(?:api|access|private|auth|account|signing|encryption|master|shared|service|client|app|storage|ssh|session"
    r"|fernet|jwt|hmac|cookie|cipher|aes|rsa|wallet|deploy|license)"
    r"[_\- ]?\Z",
    re.I,
)
"""Before `key`, which is much else as well."""
VALUE = re.compile(
    r"""[\w\-]{0,24}["'\])]{0,3}[ \t]{0,3}              # the rest of the name
    (?::[ \t]{0,2}[A-Za-z_][\w\[\], .|]{0,30}=[ \t]{0,2}  # an annotation
    |(?::=|=>|==?|:|,|\()\s{0,4}|(?<=[ ]))               # what lies between name and value
    \(?\s{0,8}[bruf]{0,2}
    (?:"([^"\n]{10,300})"|'([^'\n]{10,300})'|(?P<bare>[^\s"'`,;&<>(){}\[\]\\=]{10,300}))""",
    re.X,
)
PAIR = re.compile(r"""\w{0,8}\s{0,2}[=(]\s{0,2}\(?["'][^"'\n]{1,64}["'],\s?["']([^"'\n]{10,300})["']""")
"""A user's name and what goes with it, after `auth` or `login`."""
URL = re.compile(r"://[^\s/:@\"'<>]{0,64}:([^\s/@\"'<>{}]{8,100})@")
PLACEHOLDER = re.compile(
    r"example|test|dummy|fake|sample|your|change|placeholder|xxxx|1234567|abcdef|insecure|mock|redact|\.\.\.|%s|[{}]"
    r"|^[$<%^/[.]|://|\(\?|^[\w.]+@[\w.]+$",
    re.I,
)
CODE = re.compile(r"\w\(|\[['\w]|[<>]=|\*\*|\"")
"""In an expression, and by chance only among many marks."""
PATH = re.compile(r"[a-z_]{2,20}\.[a-z_]{2,20}\.")
GENERATED = "django-insecure-"
"""What Django writes before the keys it makes."""
LEAST = 10
"""Characters of the longest run without `_`, `.`, `/` or `-`."""
MIXED = 12
"""Characters of that run from which on two digits among them are enough."""
PIECE = 2.9
"""Mean length of its PIECES, which by chance is about 2, and in CamelCase 4."""
BITS, SHORT_BITS = 3.5, 3.0
"""Shannon entropy a character, of which English words and identifiers have about 3, and 32 hexadecimal digits 3.3 to
3.9; the second where pieces are short."""
MARKS = re.compile(r"[^\w./\-]")
PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+|[^A-Za-z0-9]")
PHRASE = re.compile(
    r"(?:mnemonic|seed)\w{0,12}[\"'\]]{0,2}\s{0,3}[:=]\s{0,3}[\"']((?:[a-z]{3,8} ){11,23}[a-z]{3,8})[\"']", re.I
)


def kind(text: str) -> str:
    """What sort of secret the text assigns, or empty."""
    for value, code in _named(text):
        if random_looking(value.removeprefix(GENERATED), code=code):
            return "assigned secret"
    if "://" in text:
        for found in URL.finditer(text):
            if random_looking(found.group(1), 8):
                return "password in a URL"
    if ("mnemonic" in text or "seed" in text.lower()) and PHRASE.search(text):
        return "seed phrase"
    return ""


def _named(text: str) -> Iterator[tuple[str, bool]]:
    """(value beside a word that says it is secret, whether it stands there without quotes)."""
    lower = ascii_lower(text)
    for word in WORDS:
        at = lower.find(word)
        while at >= 0:
            end = at + len(word)
            if (word != "key" or KEYS.search(text, max(0, at - 16), at)) and (found := VALUE.match(text, end)):
                yield found.group(found.lastindex or 0), bool(found["bare"])
            if word in ("auth", "login") and (found := PAIR.match(text, end)):
                yield found.group(1), False
            at = lower.find(word, end)


def random_looking(value: str, least: int = LEAST, code: bool = False) -> bool:
    """Whether chance, not a person, chose these characters. `code`: it stands where an expression could."""
    if len(value) < least or " " in value or "\\" in value or PLACEHOLDER.search(value) or PATH.match(value):
        return False
    longest = value if MARKS.search(value) and not code else max(re.split(r"[_./\-]", value), key=len)
    digits, letters = sum(map(str.isdigit, longest)), sum(map(str.isalpha, longest))
    capitals = sum(map(str.isupper, longest))
    if len(longest) < least or letters < 2 or not (digits or 1 < capitals < letters):
        return False
    pieces = len(PIECES.findall(longest))
    short = len(longest) <= PIECE * pieces
    if CODE.search(value) and (len(value) < 24 or len(longest) > 0.6 * PIECE * pieces):
        return False
    if not short and (digits < 2 or len(longest) < MIXED or code):
        return False
    counts = Counter(value).values()
    bits = -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
    return bits >= min(SHORT_BITS if short else BITS, 0.8 * math.log2(len(value)))
