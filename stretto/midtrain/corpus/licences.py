"""Which licence a file is under, and whether that is allowed.

A repository's licence is what its licence files say (spdx-matcher compares them with the SPDX list's templates), else
what its package metadata says, or what the source declares. A file's own notice goes before its repository's licence:
an SPDX tag, or one of the sentences by which copyleft and proprietary licences are usually declared. What is recognised
nowhere is not allowed.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

NAMES = re.compile(r"(un)?licen[cs]e|copying|copyright", re.I)
METADATA = {"PKG-INFO", "METADATA", "pyproject.toml", "Cargo.toml", "package.json"}
CODE = (".py", ".js", ".ts", ".go", ".rs", ".c", ".h")
HEADER = re.compile(r"(?:[ \t]*(?:#|//|/?\*+|--|;|%|<!--|\"\"\"|''').*\n|[ \t]*\n)+|\"\"\".*?\"\"\"", re.S)
TAG = re.compile(r"SPDX-License-Identifier:[ \t]*([^\n*]+)")
MAX_TEXT = 20_000
"""Characters of a licence file that are compared with templates; longer ones are known by their notices alone."""
NOTICES: list[tuple[str, re.Pattern[str]]] = [
    (name, re.compile(pattern, re.I))
    for name, pattern in (
        ("AGPL-3.0-or-later", r"GNU Affero General Public|\bAGPL"),
        ("LGPL-2.1-or-later", r"GNU (?:Lesser|Library) General Public|\bLGPL"),
        ("GPL-2.0-or-later", r"GNU General Public|\bGPL"),
        ("MPL-2.0", r"Mozilla Public Licen[cs]e"),
        ("EPL-2.0", r"Eclipse Public Licen[cs]e"),
        ("EUPL-1.2", r"European Union Public Licen[cs]e"),
        ("CDDL-1.0", r"Common Development and Distribution Licen[cs]e"),
        ("CC-BY-SA-4.0", r"Attribution[- ](?:Non-?Commercial[- ])?Share-?Alike|\bCC[- ]BY[- ](?:NC[- ])?SA"),
        ("CC-BY-NC-4.0", r"Attribution[- ]Non-?Commercial|\bCC[- ]BY[- ]NC|\bnon-?commercial use only"),
        ("SSPL-1.0", r"Server Side Public Licen[cs]e|\bSSPL\b"),
        ("BUSL-1.1", r"Business Source Licen[cs]e"),
        ("Elastic-2.0", r"\bElastic Licen[cs]e"),
        ("PolyForm-Noncommercial-1.0.0", r"\bPolyForm\b"),
        ("LicenseRef-commons-clause", r"Commons Clause"),
        ("LicenseRef-proprietary", r"proprietary and confidential|confidential and proprietary|unauthori[sz]ed copy"),
    )
]  # fmt: skip
DECLARES = re.compile(
    r"(?:licen[cs]ed|released|distributed|redistribute|available|modify it)\b[^.]{0,80}?\bunder\b[^.]{0,60}"
    r"|(?:\b|_)licen[cs]e[_\"']*\s*[:=][^\n]{0,80}|\bunder the terms of[^.]{0,80}",
    re.I,
)
"""Sentences anywhere in a file that say under which licence something is; a mere mention is none."""
HINTS = (
    "gpl", "general public", "public licen", "share-alike", "sharealike", "-sa", "common development",
    "business source", "proprietary", "unauthori", "spdx-license", "mozilla", "gnu ", "affero", "server side", "sspl",
    "noncommercial", "non-commercial", "by-nc", "by nc", "by-sa", "by sa", "elastic licen", "polyform",
    "commons clause",
)  # fmt: skip
"""In lower case: a text with none of these has no notice that would matter."""


class Licences:
    """licences = Licences(["MIT", "Apache-2.0"])
    licences.permits(licences.of_file(text) or licences.of_repository({"LICENSE": "..."}, declared=""))
    """

    def __init__(self, allowed: Iterable[str]):
        try:
            from license_expression import get_spdx_licensing
            from spdx_matcher import analyse_license_text
        except ImportError:
            raise ValueError("recognising licences takes a few packages: pip install 'stretto[corpus]'") from None
        self.allowed = frozenset(name.lower() for name in allowed)
        self._spdx = get_spdx_licensing()
        self._analyse = functools.lru_cache(1024)(lambda text: analyse_license_text(text)[0]["licenses"])
        self.permits = functools.lru_cache(4096)(self._permits)

    def _permits(self, expression: str) -> bool:
        """Whether an SPDX expression can be satisfied with allowed licences alone."""
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
        return str(part).lower() in self.allowed

    def of_repository(self, texts: dict[str, str], declared: str) -> str:
        """SPDX expression, or empty. `texts`: licence files and metadata of the two upper levels, by path."""
        if declared:
            return declared
        paths = sorted(texts, key=lambda path: (path.count("/"), path))
        found: list[str] = []
        for path in paths:
            if is_licence_file(path):
                text = texts[path]
                named = sorted(self._analyse(text)) if len(text) <= MAX_TEXT else []
                named = named or self._notices(text)
                named += ["LicenseRef-commons-clause"] if "commons clause" in text.lower() else []
                found.append((" OR " if _versions(named) else " AND ").join(named))
        found = [one for one in dict.fromkeys(found) if one]
        if found:
            return " AND ".join(f"({one})" if " OR " in one else one for one in found)
        return next((said for path in paths if (said := self._metadata(path, texts[path]))), "")

    def of_file(self, text: str) -> str:
        """What the file's own notice says, or empty where it has none."""
        lower = text.lower()
        if not any(hint in lower for hint in HINTS):
            return ""
        tags = [self._clean(tag) for tag in TAG.findall(text)]
        head = HEADER.match(text)
        named = self._notices(head.group()) if head and not tags else []
        for sentence in DECLARES.findall(text):
            named += self._notices(sentence)
        return " AND ".join(f"({one})" if " OR " in one else one for one in dict.fromkeys([*tags, *named]))

    def _notices(self, text: str) -> list[str]:
        flat = " ".join(re.sub(r"[#*/;%]+", " ", text).split())
        for name, pattern in NOTICES:
            if pattern.search(flat):
                return [name]
        return []

    @staticmethod
    def _clean(tag: str) -> str:
        return tag.strip().removesuffix("-->").removesuffix('"""').strip(" \t\r\"'")

    def _metadata(self, path: str, text: str) -> str:
        """What a package says of itself."""
        name = PurePosixPath(path).name
        said: Any = None
        try:
            if name in ("PKG-INFO", "METADATA"):
                head = text.partition("\n\n")[0]
                expression = re.search(r"(?im)^license(?:-expression)?: *(.+)$", head)
                classifiers = re.findall(r"(?im)^classifier: license :: .*:: (.+)$", head)
                said = expression.group(1) if expression else " AND ".join(classifiers)
            elif name in ("pyproject.toml", "Cargo.toml"):
                tree = tomllib.loads(text)
                said = (tree.get("project") or tree.get("package") or {}).get("license")
                said = said.get("text") if isinstance(said, dict) else said
            elif name == "package.json":
                said = json.loads(text).get("license")
        except (ValueError, AttributeError, RecursionError):
            return ""
        if not isinstance(said, str) or not said.strip() or len(said) > 200:
            return ""
        return SPOKEN.get(said.strip().lower().removesuffix(" license"), said.strip())


SPOKEN = {
    "mit": "MIT",
    "apache 2.0": "Apache-2.0",
    "apache": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "isc": "ISC",
    "isc license (iscl)": "ISC",
    "python software foundation": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
}
"""How packages spell a licence in free text and in trove classifiers."""


def is_licence_file(path: str) -> bool:
    return bool(NAMES.match(PurePosixPath(path).name)) and not path.endswith(CODE)


def _versions(named: list[str]) -> bool:
    """Whether these are spellings of one licence (`GPL-3.0-only`, `GPL-3.0-or-later`), not several."""
    return len({name.removesuffix("-only").removesuffix("-or-later") for name in named}) == 1
