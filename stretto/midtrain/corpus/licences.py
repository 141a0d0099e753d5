"""Which licence a file is under, and whether that is allowed.

A repository's licence is what its licence files say (`templates.py`), else what its package metadata says, or what the
source declares; copyleft that the metadata or the README names counts beside a licence file that says something else.
A licence file or metadata in a folder is for that folder. A file's own notice goes before its repository's licence: an
SPDX tag, or one of the sentences of `notices.py`. What is recognised nowhere is not allowed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from stretto.midtrain.corpus import metadata
from stretto.midtrain.corpus.notices import Notices
from stretto.midtrain.corpus.templates import Templates

NAMES = re.compile(r"(un)?licen[cs]e|copying|copyright", re.I)
README = re.compile(r"readme", re.I)
CODE = (".py", ".js", ".ts", ".go", ".rs", ".c", ".h")
TAG = re.compile(r"SPDX-License-Identifier[ \t]*:[ \t]*([^\n*]+)", re.I)
LICENCE_FOLDERS = {"licenses", "licences", "license", "licence"}
"""Folders that hold nothing but licences, those of the folder above."""
MAX_TEXT = 20_000
"""Characters of a licence file that are compared with templates; longer ones are known by their notices alone."""
RESTRICTED = re.compile(
    r"commons clause|non-?commercial[^.]{0,40}\bonly\b|\bonly\b[^.]{0,40}non-?commercial|used for good, not evil"
    r"|commercial use[^.]{0,40}(?:prohibited|forbidden|not (?:allowed|permitted))",
    re.I,
)
"""Conditions that are added to permissive licences."""


class Licences:
    """licences = Licences(["MIT", "Apache-2.0"])
    licences.permits(licences.of_file(text) or licences.of_repository({"LICENSE": "..."}, declared=""))
    """

    def __init__(self, allowed: Iterable[str]):
        try:
            from license_expression import get_spdx_licensing
        except ImportError:
            raise ValueError("recognising licences takes a few packages: pip install 'stretto[corpus]'") from None
        allowed = tuple(allowed)
        self.allowed = frozenset(name.lower() for name in allowed)
        self._spdx = get_spdx_licensing()
        self._templates = Templates()
        self.permits = functools.lru_cache(4096)(self._permits)
        self._whole = {name: self._templates.flat(self._templates.text(name)) for name in set(allowed)}
        self._notices = Notices(self._templates.names, self.permits)

    def _permits(self, expression: str) -> bool:
        """Whether an SPDX expression can be satisfied with allowed licences alone. An exception only adds to what a
        licence permits."""
        if not expression:
            return False
        try:
            return self._satisfied(self._spdx.parse(expression))
        except Exception:  # license_expression raises kinds of its own for what is no expression
            return expression.lower() in self.allowed

    def _satisfied(self, part: Any) -> bool:
        name = type(part).__name__
        if name in ("AND", "OR"):
            return (all if name == "AND" else any)(self._satisfied(one) for one in part.args)
        return str(getattr(part, "license_symbol", part)).lower().removesuffix("+") in self.allowed

    def of_repository(self, texts: Mapping[str, str], declared: str) -> str:
        """SPDX expression, or empty. `texts`: licence files, metadata and README at its top, by path."""
        if declared:
            return declared
        paths = sorted(texts)
        found = [self._of_licence(texts[path]) for path in paths if is_licence_file(path)]
        said = [one for path in paths if is_metadata(path) for one in metadata.statements(path, texts[path])]
        found = [one for one in found if one]
        if found:
            found += [name for one in said for name in self._notices.refused(one)]
        else:
            found = said
        if found:
            found += [
                name for path in paths if README.match(_name(path)) for name in self._notices.of_file(texts[path])
            ]
        return together(found)

    def _of_licence(self, text: str) -> str:
        """Of a licence file."""
        named = list(self._templates.named(text)) if len(text) <= MAX_TEXT else []
        named = named or self._notices.refused(" ".join(text.split())) or self._verbatim(text)
        named += ["LicenseRef-restricted"] if RESTRICTED.search(" ".join(text.split())) else []
        return (" OR " if _versions(named) else " AND ").join(named)

    def _verbatim(self, text: str) -> list[str]:
        """Allowed licences whose text stands in `text` as it is: not every template matches its own licence."""
        flat = self._templates.flat(text) if len(text) <= MAX_TEXT else ""
        return sorted(name for name, whole in self._whole.items() if whole and whole in flat)

    def of_file(self, text: str) -> str:
        """What the file's own notice says, or empty where it has none."""
        tagged = "dentifier" in text or "DENTIFIER" in text
        tags = [self._clean(tag) for tag in TAG.findall(text)] if tagged else []
        return together([*tags, *self._notices.of_file(TAG.sub("", text) if tags else text)])

    @staticmethod
    def _clean(tag: str) -> str:
        return tag.strip().removesuffix("-->").removesuffix('"""').strip(" \t\r\"'")


def together(expressions: Iterable[str]) -> str:
    """All of them at once."""
    named = [one for one in dict.fromkeys(expressions) if one]
    return " AND ".join(f"({one})" if len(named) > 1 and " OR " in one else one for one in named)


def tells_licence(path: str) -> bool:
    """Whether a repository's file is read for its licence."""
    return is_licence_file(path) or is_metadata(path) or bool(README.match(_name(path)) and path.count("/") <= 1)


def licence_folder(path: str) -> str:
    """The folder for which a licence file, metadata or README speaks; empty: the whole repository."""
    folder = PurePosixPath(path).parent
    while folder.name.lower() in LICENCE_FOLDERS or folder.name.endswith((".dist-info", ".egg-info")):
        folder = folder.parent
    return "" if folder == PurePosixPath(".") else folder.as_posix()


def is_licence_file(path: str) -> bool:
    return bool(NAMES.match(_name(path))) and not path.endswith(CODE)


def is_metadata(path: str) -> bool:
    return _name(path) in metadata.FILES


def _name(path: str) -> str:
    return PurePosixPath(path).name


def _versions(named: list[str]) -> bool:
    """Whether these are spellings of one licence (`GPL-3.0-only`, `GPL-3.0-or-later`), not several."""
    return len({name.removesuffix("-only").removesuffix("-or-later") for name in named}) == 1
