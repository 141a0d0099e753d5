"""What a package says of its own licence: PKG-INFO, pyproject.toml, setup.cfg, setup.py, Cargo.toml, package.json."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from pathlib import PurePosixPath
from typing import Any

FILES = {"PKG-INFO", "METADATA", "pyproject.toml", "setup.cfg", "setup.py", "Cargo.toml", "package.json"}
LONGEST = 200
"""Characters of a licence's name; what is longer is its text."""
ARGUMENT = re.compile(r"\blicen[cs]e\s*=\s*[\"']([^\"'\n]+)[\"']")
CLASSIFIER = re.compile(r"License\s*::\s*[^\"'\n]*?::\s*([^\"'\n:]+?)\s*(?=[\"'\n]|$)")
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


def statements(path: str, text: str) -> list[str]:
    """Every licence that the file names, as SPDX expressions where their spelling is known."""
    name = PurePosixPath(path).name
    try:
        said = _said(name, text)
    except (ValueError, AttributeError, TypeError, RecursionError, configparser.Error):
        return []
    named = [one.strip() for one in said if isinstance(one, str) and 0 < len(one.strip()) <= LONGEST]
    return [
        SPOKEN.get(one.lower().removesuffix(" license"), one)
        for one in dict.fromkeys(named)
        if one.lower() not in ("unknown", "osi approved")
    ]


def _said(name: str, text: str) -> list[Any]:
    if name in ("PKG-INFO", "METADATA"):
        head = text.partition("\n\n")[0]
        return re.findall(r"(?im)^license(?:-expression)?: *(.+)$", head) + CLASSIFIER.findall(head)
    if name == "setup.py":
        return ARGUMENT.findall(text) + CLASSIFIER.findall(text)
    if name == "setup.cfg":
        tree = configparser.ConfigParser(interpolation=None, strict=False)
        tree.read_string(text)
        return [tree.get("metadata", "license", fallback=""), *CLASSIFIER.findall(text)]
    if name == "package.json":
        said = json.loads(text).get("license")
        return [said.get("type") if isinstance(said, dict) else said]
    tree = tomllib.loads(text)
    poetry = tree.get("tool", {}).get("poetry", {}) if name == "pyproject.toml" else {}
    package = tree.get("project") or tree.get("package") or {}
    said = [package.get("license"), poetry.get("license")]
    said = [one.get("text") if isinstance(one, dict) else one for one in said]
    if name == "Cargo.toml":
        said = [one.replace("/", " OR ") if isinstance(one, str) else one for one in said]
    classifiers = [*package.get("classifiers", []), *poetry.get("classifiers", [])]
    return said + [found for one in classifiers for found in CLASSIFIER.findall(str(one))]
