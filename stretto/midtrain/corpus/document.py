"""What travels through the corpus builder: documents that are kept so far, and what was left out, with its reason."""

from __future__ import annotations

import enum

import msgspec


class Reason(enum.StrEnum):
    """Why something is not in the corpus. The manifest counts each."""

    UNREADABLE = "unreadable"  # a damaged archive, a row that is no object, a file that can't be opened
    UNSAFE_PATH = "unsafe path"  # an archive member that would land outside
    NOT_A_FILE = "not a file"  # links, devices
    LONG_ROW = "row too long"
    NO_TEXT = "no text column"
    BINARY = "binary"
    ENCODING = "encoding"
    LANGUAGE = "language"
    LICENCE = "licence"
    VENDORED = "vendored"
    GENERATED = "generated"
    MINIFIED = "minified"
    TOO_LARGE = "too large"
    TOO_SMALL = "too small"
    SECRET = "secret"
    EVALUATION = "evaluation task"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near duplicate"


class LeftOut(msgspec.Struct, frozen=True):
    """One file (or row, or whole archive) that is not in the corpus."""

    source: str
    repository: str
    path: str
    reason: Reason
    detail: str = ""
    bytes: int = 0


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One text. `messages` is a transcript's conversation instead (`text` is then its flat form, for comparing)."""

    source: str
    repository: str
    path: str
    text: str
    language: str = ""
    licence: str = ""
    messages: tuple[dict[str, object], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.repository}/{self.path}" if self.path else self.repository


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A file or row as it lies in its source: bytes (or text), and what the source says of it."""

    repository: str
    path: str
    data: bytes | str
    language: str = ""
    licence: str = ""
    messages: tuple[dict[str, object], ...] = ()
