"""What must not survive `stretto corpus build`: near duplicates, by recall on real files, and answers of evaluation
tasks in other clothes (PITFALLS MID-5). Secrets: test_secrets.py; copyleft: test_licences.py."""

from __future__ import annotations

import ast
import io
import json
import keyword
import random
import re
import sysconfig
import tokenize
from collections import defaultdict
from pathlib import Path

import numpy as np
from corpora import MIT, made, source

from stretto.midtrain.corpus import duplicates
from stretto.midtrain.corpus.buckets import Buckets
from stretto.midtrain.corpus.grams import index, ngrams, ngrams_by_text, renamed_ngrams
from stretto.midtrain.corpus.plan import Corpus
from stretto.midtrain.corpus.tokenised import plain, tokenise
from stretto.tasks.repair import generate


def files() -> list[str]:
    """Real source: modules of the standard library."""
    found = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in found]
    return [text for text in texts if 3_000 < len(text) < 40_000][::2]


# Edits


def changed(text: str, rng: random.Random) -> str:
    """A tenth of the lines is another."""
    lines = text.split("\n")
    for at in rng.sample(range(len(lines)), len(lines) // 10):
        lines[at] = f"    {rng.choice('abc')} = call_{rng.randrange(999)}({rng.randrange(99)})"
    return "\n".join(lines)


def touched(text: str, rng: random.Random) -> str:
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
    holder = f"# Copyright {rng.randrange(1990, 2026)} Somebody Else\n"
    return holder + "".join(f"# {line}\n" for line in MIT.split("\n")) + text


def renamed(text: str, rng: random.Random) -> str:
    """A third of all names has another, everywhere."""
    words = list(tokenize.generate_tokens(io.StringIO(text).readline))
    names = sorted({one.string for one in words if one.type == tokenize.NAME and not keyword.iskeyword(one.string)})
    others = set(rng.sample(names, len(names) // 3))
    lines = text.splitlines(keepends=True)
    for one in reversed(words):
        if one.type == tokenize.NAME and one.string in others:
            row, column = one.start[0] - 1, one.end[1]
            lines[row] = lines[row][:column] + "_new" + lines[row][column:]
    return "".join(lines)


def formatted(text: str, rng: random.Random) -> str:
    """As another formatter would, without comments."""
    return ast.unparse(ast.parse(text))


def everything(text: str, rng: random.Random) -> str:
    return relicensed(commented(touched(reordered(text, rng), rng), rng), rng)


EDITS = (changed, touched, commented, reordered, relicensed, renamed, everything)


def test_at_least_95_of_100_planted_edits_are_found_of_each_kind_and_no_distinct_file_is() -> None:
    rng = random.Random(0)
    originals = files()
    planted = [(edit.__name__, at, edit(text, rng)) for at, text in enumerate(originals) for edit in EDITS]
    planted += [("formatted", at, formatted(text, rng)) for at, text in enumerate(originals)]
    texts = [*originals, *(text for _, _, text in planted)]
    whole = tokenise(texts)
    bare = plain(whole)
    signatures, sizes = duplicates.signatures(whole, bare), duplicates.sizes(whole, bare).tolist()

    def check(known: duplicates.Duplicates, number: int) -> str:
        why = known.check(str(number), duplicates.exact_key(texts[number]), signatures[number], sizes[number])
        return why[1] if why else ""

    alone = duplicates.Duplicates(Corpus().near_duplicate)
    said = [check(alone, number) for number in range(len(originals))]
    shingles = [np.unique(ngrams(whole.of(number), 5)) for number in range(len(originals))]
    for number, why in enumerate(said):
        if why:
            other = shingles[int(re.findall(r"\d+", why)[0])]
            both = len(np.intersect1d(shingles[number], other, assume_unique=True))
            assert both / (len(other) + len(shingles[number]) - both) > 0.5, "files that share less than half"
    found: dict[str, list[bool]] = defaultdict(list)
    for number, (kind, at, text) in enumerate(planted, len(originals)):
        if not said[at] and text != originals[at]:
            known = duplicates.Duplicates(Corpus().near_duplicate)
            check(known, at)
            found[kind].append(bool(check(known, number)))
    recalls = {kind: sum(hits) / len(hits) for kind, hits in found.items()}
    assert min(map(len, found.values())) >= 30
    assert all(recall >= (0.85 if kind == "formatted" else 0.95) for kind, recall in recalls.items()), recalls


def test_buckets_remember_across_their_runs() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 20, (400, 9)).astype(np.uint64)
    known = Buckets(recent=100)
    for number, row in enumerate(keys):
        alike = [other for other in range(number) if np.isin(keys[other], row).any()]
        assert known.sharing(row) == alike
        known.add(row, number)
    assert len(known._runs) > 1 and sum(len(texts) for _, texts in known._runs) > 3000


# Tokens and n-grams


def test_tokens_of_many_texts_are_those_of_each_alone_and_know_what_they_are() -> None:
    texts = ['def f(x):  # half\n    return "x y" + z7\n', "", '"""Doc."""  # too\na = 1\r\n# café\n', "é" * 40]
    together = tokenise(texts)
    for number, text in enumerate(texts):
        alone = tokenise([text])
        here = slice(together.offsets[number], together.offsets[number + 1])
        assert np.array_equal(together.hashes_T[here], alone.hashes_T)
        assert np.array_equal(together.names_T[here], alone.names_T)
        assert np.array_equal(together.aside_T[here], alone.aside_T)
    first = tokenise(texts[:1])
    words = re.findall(r"\w+|[^\w\s]", texts[0])
    assert [word for word, name in zip(words, first.names_T, strict=True) if name] == ["f", "x", "half", "z7"]
    assert [word for word, aside in zip(words, first.aside_T, strict=True) if aside] == ["#", "half"]
    assert len(plain(tokenise(texts[2:3])).hashes_T) == 3
    one, other = tokenise(["f(('a', g(b),), )\n"]), tokenise(['f("a",\n   g(b))'])
    assert np.array_equal(plain(one).hashes_T, plain(other).hashes_T)


def test_ngrams_never_reach_into_the_next_text_and_renaming_changes_none() -> None:
    texts = ["a b c d", "e f", "", "g h i"]
    tokens = tokenise(texts)
    grams, offsets = ngrams_by_text(tokens.hashes_T, tokens.offsets, 3)
    assert offsets.tolist() == [0, 2, 2, 2, 3]
    assert np.array_equal(grams, np.concatenate([ngrams(tokens.of(number), 3) for number in range(4)]))
    one, other, third = tokenise(["a = b + a * 2"]), tokenise(["x = y + x * 2"]), tokenise(["x = y + y * 2"])
    shapes = [renamed_ngrams(each.of(0), each.names_T, 5) for each in (one, other, third)]
    assert np.array_equal(shapes[0], shapes[1]) and not np.array_equal(shapes[0], shapes[2])
    held = list(index([grams[:2]], 3).held(ngrams(tokens.hashes_T, 3), tokens.offsets))
    assert [(text, entries.tolist(), shares.tolist()) for text, entries, shares in held] == [(0, [0], [1.0])]


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
    test = """from solution import merge

def test_two_rows_of_one_key():
    rows = [{"a": 1, "b": 2}, {"a": 1, "c": 3}, {"a": 2, "b": 9}]
    assert merge(rows, ["a"]) == [{"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 9}]
"""
    (task / "tests/test_merge.py").write_text(test)
    stripped = ast.unparse(ast.parse(own)).replace("'Merge rows by keys.'", "")
    other = re.sub(r"\b(merge|rows?|keys?|groups?|pair)\b", r"\1_of_mine", own)
    lines = own.split("\n")
    forms = {
        "verbatim": own,
        "generated": answer,
        "indented": "class Holder:\n" + "".join(f"\t\t{line}\n" for line in own.split("\n")),
        "stripped": stripped,
        "commented": "\n".join(f"{line}  # step {number}" for number, line in enumerate(lines)),
        "between": "\n".join(f"{line}\n    # step {number}" for number, line in enumerate(lines)),
        "renamed": other,
        "renamed_and_stripped": ast.unparse(ast.parse(other)),
        "typed": own.replace("rows, keys)", "rows: list[dict], keys: list[str]) -> list[dict]"),
        "commented_out": "\n".join(f"# {line}" for line in lines),
        "escaped": f"CODE = {json.dumps(own)}\n",
        "pieces": "CODE = (\n" + "\n".join(f"    {line + chr(10)!r}" for line in lines) + "\n)\n",
        "test": test,
        "test_quoted": test.replace('"', "'").replace("rows", "data"),
        "blank": own.replace("\n", "\n\n"),
        "crlf": own.replace("\n", "\r\n"),
    }
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "LICENSE").write_text(MIT)
    for number, (name, text) in enumerate(forms.items()):
        (folder / f"{name}.py").write_bytes(f"{source(number)}\n\n{text}\n\n{source(50 + number)}".encode())
    alike = "def collect(rows, keys):\n    groups = {}\n    for row in rows:\n        groups[row[keys[0]]] = len(row)\n"
    (folder / "other.py").write_text(f"{source(99)}\n\n{alike}    return groups\n")
    cells = [{"cell_type": "code", "source": [f"{line}\n" for line in own.split("\n")]}]
    (folder / "notes.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=1))
    call = {"function": {"name": "write", "arguments": json.dumps({"path": "x.py", "content": own})}}
    talks = [
        [{"role": "user", "content": "words " * 40}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        [{"role": "user", "content": source(801)}, {"role": "tool", "content": json.dumps({"file": other})}],
        [{"role": "user", "content": source(802)}, {"role": "assistant", "content": "fine"}],
    ]
    rows = [json.dumps({"messages": talk, "license": "MIT"}) for talk in talks]
    (tmp_path / "talks.jsonl").write_text("\n".join(rows))
    kept, left, _ = made(
        tmp_path,
        ["repo", "talks.jsonl"],
        evaluation=["repair", "tasks"],
        secrets=False,
        languages=["python", "jupyter"],
    )
    assert set(kept) == {"repo/other.py", "talks.jsonl/talks.jsonl:3"}
    assert len(left["evaluation task"]) == len(forms) + 3
