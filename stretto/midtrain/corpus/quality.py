"""Files that are no source somebody wrote: binary, minified, generated, copied in from elsewhere, too large, too small.

Names and marks are those in wide use; GitHub's linguist has longer lists of the same kind.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import PurePosixPath

from stretto.midtrain.corpus.document import Blob, Reason
from stretto.midtrain.corpus.plan import Corpus

VENDORED = {
    "vendor", "vendored", "_vendor", "_vendored", "third_party", "third-party", "thirdparty", "3rdparty",
    "node_modules", "bower_components", "site-packages", "dist-packages", "extern", "externals", "deps",
}  # fmt: skip
GENERATED_NAME = re.compile(
    r"(_pb2(_grpc)?|\.pb|_generated|\.g|\.designer|parsetab|lextab|_version|\.min|-lock)\.\w+$", re.I
)
GENERATED_MARK = re.compile(
    r"@generated\b|\bdo not edit\b|\bauto(?:matically )?-?generated (?:by|from|file|code)|^\W*generated (?:by|from)\b"
    r"|\b(?:file|code) (?:is|was) (?:auto(?:matically)?[- ]?)?generated\b",
    re.I | re.M,
)
HEAD = 1000
"""Characters of a file in which a generator says so."""
MEAN_LINE = 200
"""A file whose lines are longer than this in the mean is minified, or data."""


def by_path(path: str) -> tuple[Reason, str] | None:
    """What the name alone tells, before the bytes are looked at."""
    parts = PurePosixPath(path)
    for part in parts.parts[:-1]:
        if part.lower() in VENDORED or part.endswith((".egg-info", ".dist-info")):
            return Reason.VENDORED, part
    if GENERATED_NAME.search(parts.name):
        return Reason.GENERATED, parts.name
    return None


def decode(blob: Blob) -> str | tuple[Reason, str]:
    """Its text, or why it has none. Python files may name their encoding (PEP 263)."""
    data = blob.data
    if isinstance(data, str):
        return (Reason.BINARY, "holds NUL") if "\0" in data else data
    if b"\0" in data:
        return Reason.BINARY, "holds NUL"
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if blob.path.endswith(".py"):
            try:
                text = data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])
                text.encode()  # some encodings spell what is no character
                return text
            except (SyntaxError, LookupError, UnicodeError):
                pass
        return Reason.ENCODING, f"not UTF-8 at byte {error.start}"


def by_text(text: str, corpus: Corpus) -> tuple[Reason, str] | None:
    """What the text tells."""
    size = len(text)
    if size < corpus.min_bytes:
        return Reason.TOO_SMALL, f"{size} characters"
    if size > corpus.max_bytes:
        return Reason.TOO_LARGE, f"{size} characters"
    lines = text.splitlines()
    longest = max(map(len, lines), default=0)
    if longest > corpus.max_line or size > MEAN_LINE * max(1, len(lines)):
        return Reason.MINIFIED, f"a line of {longest} characters"
    found = GENERATED_MARK.search(text, 0, HEAD)
    return (Reason.GENERATED, found.group()) if found else None
