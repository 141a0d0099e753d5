"""Files in which somebody left a credential: found by Kingfisher, a scanner with some 500 kinds of secrets.

It runs over plain files, so the texts of one chunk of work are written to a temporary folder first. Nothing found is
tried out (`--no-validate`), and nothing leaves the machine. Beside its own rules go `credentials.toml`'s: what it
reports only together with its other half, such as an AWS key id alone. What has no form of its own: `assigned.py`; what
is spelled so that it is not seen: `hidden.py`.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

import msgspec

from stretto.midtrain.corpus import assigned, hidden

RULES = resources.files("stretto.midtrain.corpus") / "credentials.toml"
FOUND = (0, 200, 205)
"""Its exit codes: nothing found, something found, something found that is still valid."""
SECONDS = 600.0


def find(texts: list[str]) -> tuple[dict[int, str], float]:
    """(number of each text that holds a credential -> which kind, CPU seconds of the scanner). Raises RuntimeError when
    the scanner fails."""
    program = shutil.which("kingfisher") or str(Path(sys.executable).with_name("kingfisher"))
    if not texts:
        return {}, 0.0
    if not Path(program).is_file():
        raise ValueError(
            "finding secrets needs Kingfisher: pip install 'stretto[corpus]', or set corpus.secrets = false"
        )
    inside = [hidden.spelled(text) for text in texts]
    with tempfile.TemporaryDirectory(prefix="stretto-corpus-") as place:
        folder = Path(place, "texts")
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(f"{text}\n{inside[number]}", encoding="utf-8", errors="replace")
        rules = Path(place, "rules.toml")
        rules.write_text(RULES.read_text())
        words = [
            "scan",
            str(folder),
            "--rules-path",
            str(rules),
            "--confidence",
            "low",
            "--format",
            "jsonl",
            "--jobs",
            "1",
        ]
        words += ["--no-validate", "--no-update-check", "--no-dedup", "--git-history", "none", "--no-ignore", "--quiet"]
        before = _children_seconds()
        done = subprocess.run([program, *words], capture_output=True, timeout=SECONDS, check=False)
    if done.returncode not in FOUND:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"kingfisher ended with exit code {done.returncode}: {' '.join(last)}")
    found = {
        number: kind
        for number, text in enumerate(texts)
        if (kind := assigned.kind(text) or (assigned.kind(inside[number]) if inside[number] else ""))
    }
    for line in done.stdout.splitlines():
        row = msgspec.json.decode(line)
        if "finding" in row:
            found[int(Path(row["finding"]["path"]).stem)] = row["rule"]["name"]
    return found, _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
