"""What must not survive `stretto corpus build`: near duplicates by recall on real files, secrets of many kinds,
copyleft in every place where it is declared, and answers of evaluation tasks in other clothes (PITFALLS MID-5)."""

from __future__ import annotations

import json
import random
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from corpora import GPL, MIT, made, source

from stretto.midtrain.corpus import assigned, duplicates
from stretto.midtrain.corpus.plan import Corpus
from stretto.midtrain.corpus.shingles import bare, ngrams, token_hashes
from stretto.tasks.repair import generate

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
HEX = "0123456789abcdef"


# Near duplicates


def files() -> list[str]:
    """Real source: modules of the standard library."""
    found = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in found]
    return [text for text in texts if 3_000 < len(text) < 60_000]


def renamed(text: str, rng: random.Random) -> str:
    """An identifier gets another name in every tenth line or so."""
    lines = text.split("\n")
    for at in rng.sample(range(len(lines)), len(lines) // rng.choice((8, 12, 20))):
        lines[at] = re.sub(r"\b([a-z_]{4,})\b", r"\1_", lines[at], count=1)
    return "\n".join(lines)


def commented(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    for at in sorted(rng.sample(range(len(lines)), len(lines) // 12), reverse=True):
        lines.insert(at, f"# note {rng.randrange(10**6)}")
    return "\n".join(lines)


def reordered(text: str, rng: random.Random) -> str:
    parts = re.split(r"\n(?=def |class )", text)
    rest = parts[1:]
    rng.shuffle(rest)
    return "\n".join([parts[0], *rest])


def relicensed(text: str, rng: random.Random) -> str:
    return (
        f"# Copyright {rng.randrange(1990, 2026)} Somebody Else\n"
        + "".join(f"# {line}\n" for line in MIT.split("\n"))
        + text
    )


def jaccard(one: str, other: str) -> float:
    first, second = (np.unique(ngrams(token_hashes(text), duplicates.SHINGLE)) for text in (one, other))
    both = len(np.intersect1d(first, second, assume_unique=True))
    return both / (len(first) + len(second) - both)


def test_at_least_95_of_100_planted_edits_above_the_threshold_are_found_and_no_distinct_file_is() -> None:
    threshold = Corpus().near_duplicate
    rng = random.Random(0)
    originals = files()
    edits = (
        renamed,
        commented,
        reordered,
        relicensed,
        lambda text, rng: commented(renamed(reordered(text, rng), rng), rng),
    )
    planted = [(at, edit(text, rng)) for at, text in enumerate(originals) for edit in edits]
    known = duplicates.Duplicates(threshold)
    texts = [*originals, *(text for _, text in planted)]
    hashes = [token_hashes(text) for text in texts]
    signatures = duplicates.signatures(hashes)
    distinct = [
        known.check(str(at), duplicates.exact_key(originals[at]), signatures[at], len(hashes[at]))
        for at in range(len(originals))
    ]
    wrong = [
        at
        for at, why in enumerate(distinct)
        if why and jaccard(originals[at], originals[int(why[1].split()[1].rstrip(","))]) < 0.5
    ]
    assert not wrong, "files that share less than half of their shingles"
    near = [
        (similarity, known.check("copy", duplicates.exact_key(text), signatures[number], len(hashes[number])))
        for number, (at, text) in enumerate(planted, len(originals))
        if distinct[at] is None and (similarity := jaccard(originals[at], text)) >= threshold and text != originals[at]
    ]
    close = [why for similarity, why in near if similarity < threshold + 0.1]
    assert len(near) > 300 and len(close) > 30, "edits of every strength"
    recall = sum(why is not None for _, why in near) / len(near)
    assert recall >= 0.95 and sum(why is not None for why in close) / len(close) >= 0.9, recall


# Secrets


def secrets() -> dict[str, str]:
    rng = random.Random(4)

    def draw(count: int, alphabet: str = LETTERS) -> str:
        return "".join(rng.choice(alphabet) for _ in range(count))

    def key(kind: str) -> str:
        body = "\n".join(draw(64) for _ in range(5))
        return f"K = '''-----BEGIN {kind} PRIVATE KEY-----\n{body}\n-----END {kind} PRIVATE KEY-----'''"

    return {
        "github": f'T = "ghp_{draw(36)}"',
        "aws": f'K = "AKIA{draw(16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")}"',
        "aws_secret": f'aws_secret_access_key = "{draw(40)}"',
        "slack": f'T = "xoxb-{draw(12, "123456789")}-{draw(12, "123456789")}-{draw(24)}"',
        "stripe": f'K = "sk_live_{draw(24)}"',
        "google": f'K = "AIza{draw(35)}"',
        "openai": f'K = "sk-proj-{draw(48)}"',
        "gitlab": f'T = "glpat-{draw(20)}"',
        "sendgrid": f'K = "SG.{draw(22)}.{draw(43)}"',
        "hugging_face": f'T = "hf_{draw(34)}"',
        "telegram": f'B = "{draw(10, "123456789")}:AA{draw(33)}"',
        "database": f'U = "postgres://admin:{draw(14)}@db.example.org/app"',
        "rsa": key("RSA"),
        "openssh": key("OPENSSH"),
        "assigned": f'PASSWORD = "{draw(18)}"',
        "quoted": f'C = {{"api_key": "{draw(32, HEX)}"}}',
        "bearer": f'H = {{"Authorization": "Bearer {draw(40)}"}}',
        "netrc": f'N = "machine api.example.com login bob password {draw(14)}"',
    }


def test_no_planted_secret_survives_and_harmless_strings_do(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "LICENSE").write_text(MIT)
    for number, (name, line) in enumerate(secrets().items()):
        (folder / f"bad_{name}.py").write_text(f"{source(number)}\n{line}\n")
    harmless = [
        'password = "correct-horse-battery"',
        'TOKEN_URL = "https://example.org/oauth2/token"',
        'secret = get("name")',
    ]
    for number, line in enumerate(harmless):
        (folder / f"good_{number}.py").write_text(f"{source(100 + number)}\n{line}\n")
    kept, left, _ = made(tmp_path, ["repo"])
    assert set(kept) == {f"repo/good_{number}.py" for number in range(len(harmless))}
    assert len(left["secret"]) == len(secrets()) >= 10


def test_words_placeholders_and_digests_under_other_names_are_no_secrets() -> None:
    for line in (
        'token = "your-api-token-goes-here-1234"',
        'password = "changeme12345678"',
        f'sha = "{HEX * 4}"',
        "token = next(it)",
    ):
        assert not assigned.kind(line), line


# Licences


def test_no_copyleft_file_survives_wherever_it_is_declared(tmp_path: Path) -> None:
    named = "# License\n\nThis project is licensed under the GNU GPL v3.\n"
    mozilla = "# This Source Code Form is subject to the terms of the Mozilla Public\n# License, v. 2.0.\n"
    repositories = {
        "file": {"LICENSE": named, "bad.py": ""},
        "beside": {"LICENSE": MIT, "COPYING": named, "bad.py": ""},
        "below": {"LICENSE": MIT, "a/b/c/COPYING": named, "a/b/c/d/bad.py": "", "a/b/good.py": ""},
        "clause": {"LICENSE": f'"Commons Clause" License Condition v1.0\n\n{MIT}', "bad.py": ""},
        "metadata": {"pyproject.toml": '[project]\nname = "x"\nlicense = "GPL-3.0-or-later"\n', "bad.py": ""},
        "nothing": {"README.md": "hello", "bad.py": ""},
        "headers": {
            "LICENSE": MIT,
            "bad_1.py": GPL,
            "bad_2.py": "# SPDX-License-Identifier: LGPL-3.0-only\n",
            "bad_3.py": "# SPDX-License-Identifier: MIT AND GPL-2.0-only\n",
            "bad_4.py": '__license__ = "GPLv3+"\n',
            "bad_5.py": "# Licence : LGPLv2.1\n",
            "bad_6.py": "import os\n" * 40 + "# SPDX-License-Identifier: AGPL-3.0-or-later\n",
            "bad_7.py": mozilla,
            "bad_8.py": "# License: CC BY-NC 4.0\n",
            "bad_9.py": "# Licensed under the Elastic License 2.0\n",
            "good_1.py": "# SPDX-License-Identifier: Apache-2.0\n",
            "good_2.py": "# License: MIT\n",
        },
    }  # fmt: skip
    number = 0
    for name, tree in repositories.items():
        for path, text in tree.items():
            target = tmp_path / "all" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            number += 1
            target.write_text(text + (source(number) if path.endswith(".py") else ""))
    kept, left, _ = made(tmp_path, ["all"], secrets=False)
    assert set(kept) == {"below/a/b/good.py", "headers/good_1.py", "headers/good_2.py"}
    assert len(left["licence"]) == sum(
        path.rpartition("/")[2].startswith("bad") for tree in repositories.values() for path in tree
    )


# Answers


def test_MID_5_answers_do_not_survive_reindented_commented_or_without_their_comments(tmp_path: Path) -> None:
    repair = next(iter(generate("heldout", 0)))
    answer = "\n".join(repair.fixed)
    own = '''def merge(rows, keys):
    """Merge rows by keys."""
    # first collect what belongs together, in the order in which it came
    groups = {}
    for row in rows:  # every row once
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    # then let the last one win
    return [dict(pair for row in group for pair in row.items()) for group in groups.values()]
'''
    task = tmp_path / "tasks" / "merge"
    for path, text in {
        "task.toml": 'version = "1.0"\n[metadata]\n',
        "instruction.md": "Merge rows.",
        "environment/solution.py": "def merge(rows, keys): ...\n",
        "solution/solution.py": own,
        "tests/oracle.json": json.dumps({"module": "solution", "function": "merge", "arguments": []}),
    }.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    noisy = "\n".join(f"{line}\n    # step {number}" for number, line in enumerate(bare(own).split("\n")))
    forms = {
        "verbatim": own,
        "generated": answer,
        "indented": "class Holder:\n" + "".join(f"\t\t{line}\n" for line in own.split("\n")),
        "stripped": bare(own),
        "commented": noisy,
        "blank": own.replace("\n", "\n\n"),
        "crlf": own.replace("\n", "\r\n"),
    }
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "LICENSE").write_text(MIT)
    for number, (name, text) in enumerate(forms.items()):
        (folder / f"{name}.py").write_bytes(f"{source(number)}\n\n{text}\n\n{source(50 + number)}".encode())
    (folder / "other.py").write_text(source(99))
    kept, left, _ = made(tmp_path, ["repo"], evaluation=["repair", "tasks"], secrets=False)
    assert set(kept) == {"repo/other.py"} and len(left["evaluation task"]) == len(forms)


# Bad input


def test_a_line_of_200_megabytes_is_named_and_never_held(tmp_path: Path) -> None:
    import resource

    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(b'", "license": "MIT"}\n' + json.dumps({"text": source(1), "lang": "py", "license": "MIT"}).encode())
    kept, left, _ = made(tmp_path, ["rows.jsonl"], secrets=False)
    assert set(kept) == {"rows.jsonl/rows.jsonl:2"} and left["row too long"] == ["rows.jsonl:1"]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 << 20, "KiB"


def test_a_parquet_file_without_a_column_and_one_that_is_none_are_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": [source(1)], "license": ["MIT"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "c.jsonl").write_bytes(
        b'{"text": "caf\xe9"}\n' + json.dumps({"text": source(2), "lang": "py", "license": "MIT"}).encode()
    )
    kept, left, _ = made(tmp_path, ["a.parquet", "b.parquet", "c.jsonl"], secrets=False)
    assert (
        left["no text column"] == ["a.parquet:1"]
        and len(left["unreadable"]) == 2
        and set(kept) == {"c.jsonl/c.jsonl:2"}
    )
