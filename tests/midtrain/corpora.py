"""Sources to build corpora from, and what became of them. Used by the tests of the corpus builder."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path

import msgspec
import zstandard

from stretto.config import validated
from stretto.midtrain.corpus import build, plan

MIT = """MIT License

Copyright (c) 2026 Somebody

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""
GPL = """# This program is free software; you can redistribute it and/or modify
# it under the terms of the GNU General Public License as published by
# the Free Software Foundation; either version 2 of the License, or
# (at your option) any later version.
"""


def source(seed: int, functions: int = 6) -> str:
    """Python nobody else wrote."""
    rng = random.Random(seed)
    lines = []
    for _ in range(functions):
        name, one, two = (f"{rng.choice('abcdefgh')}{rng.randrange(10**6)}" for _ in range(3))
        lines += [f"def f_{name}({one}, {two}):", f'    """Adds {rng.randrange(999)} to {one}."""']
        lines += [f"    {two} = {one} * {rng.randrange(99)} + {two}", f"    return {two} - {rng.randrange(99)}", "", ""]
    return "\n".join(lines)


def tar(path: Path, files: dict[str, bytes | str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            body = data.encode() if isinstance(data, str) else data
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))


def made(folder: Path, sources: list[str], **corpus: object) -> tuple[dict[str, str], dict[str, list[str]], dict]:
    """(kept texts by name, what was left out by reason, manifest)."""
    tree = {"corpus": corpus, "source": [{"path": one} for one in sources]}
    out = folder / "out"
    manifest = build.build(validated(plan.Plan, tree), folder, out, workers=1)
    lines = zstandard.ZstdDecompressor().stream_reader((out / build.DOCUMENTS).open("rb")).read().splitlines()
    kept = {f"{row['repository']}/{row['path']}": row["text"] for row in map(msgspec.json.decode, lines)}
    left: dict[str, list[str]] = {}
    for line in (out / build.LEFT_OUT).read_text().splitlines():
        row = json.loads(line)
        left.setdefault(row["reason"], []).append(row["path"])
    return kept, left, manifest
