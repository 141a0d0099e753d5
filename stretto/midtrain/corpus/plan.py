"""What a corpus is made of: one TOML file.

    [corpus]
    languages = ["python"]

    [[source]]
    path = "sdists/*.tar.gz"

Paths are relative to the file. What a source is follows from what lies there (`sources.py`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from stretto.config import Positive, Section, read_toml

PERMISSIVE = (
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0",
    "PSF-2.0", "Python-2.0", "Python-2.0.1", "Unlicense", "Zlib",
)  # fmt: skip


class Corpus(Section):
    languages: tuple[str, ...] = ("python",)
    """Languages to keep, in `identify`'s words (python, rust, c++, …). Transcripts are kept whatever they hold."""
    licences: tuple[str, ...] = PERMISSIVE
    """SPDX names. A file is kept when its own notice, or else its repository's licence, is among them."""
    evaluation: tuple[str, ...] = ("repair",)
    """Tasks whose solutions and tests must not be in the corpus: folders of task folders; `repair` is the generator's
    own held-out splits."""
    evaluation_share: float = Field(default=0.5, gt=0, le=1)
    """A file is removed when it holds this share of the n-grams of one solution or test, with or without comments."""
    ngram: Positive = 10
    """Tokens of an n-gram, when files are compared with evaluation tasks."""
    near_duplicate: float = Field(default=0.7, gt=0, le=1)
    """Of two files whose estimated Jaccard similarity of 5-token shingles is at least this, the later is removed; so is
    one that is alike but for comments, layout or names (`duplicates.py`)."""
    min_bytes: Positive = 64
    """Smaller files are left out."""
    max_bytes: Positive = 1 << 20
    """Larger files are left out."""
    max_line: Positive = 1000
    """A file with a longer line is minified or data, and left out."""
    secrets: bool = True
    """Leave out files in which the scanner finds a credential."""


class Source(Section):
    path: str
    """A file, a folder, or a pattern of them: folders of repositories, archives, git bundles, JSONL, parquet."""
    licence: str = ""
    """SPDX name, for a source that does not carry its licence (one's own code, rows without a `license` column)."""
    repository: str = ""
    """Name under which the files go; empty: the name of the folder, archive or row."""


class Plan(Section):
    corpus: Corpus = Corpus()
    source: tuple[Source, ...] = Field(min_length=1)
    """Where the text comes from, in order: of two duplicates the earlier is kept."""


def load(path: Path) -> Plan:
    """Raises ConfigError: a sentence for each key that is wrong."""
    return read_toml(Plan, path)
