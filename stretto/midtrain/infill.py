"""Fill-in-the-middle exact match: lines of held-out files are taken out, and the model writes them back.

    before the span ─┐
                     ├─▶ <prefix> before <suffix> after <middle> ─▶ greedy ─▶ equal, but for blank space at line ends?
    after the span ──┘

Spans are whole lines: one of them, or two to four (after Bavarian et al., arXiv 2207.14255, whose infilling benchmarks
cut the same way). Which spans is a matter of the folder and the seed alone, so that models and steps of a run are asked
the same; what a model sees around a span is what fits `CONTEXT` of its tokens. The answer ends at a control token.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stretto.midtrain.complete import greedy
from stretto.midtrain.corpus.document import Document
from stretto.midtrain.corpus.read import held_out
from stretto.midtrain.tokens.marks import FIM, REPOSITORY, Encoder, Marks
from stretto.model import checkpoint
from stretto.model.transformer import Transformer
from stretto.watch.statistics import wilson

SPANS = 200
"""Files of each language that are asked about, one span each."""
CONTEXT = 768
"""Tokens of a prompt, at most; what is farther from the span is not shown."""
LONGEST = 4
"""Lines of a span."""
MEANT = 4
"""Letters and digits that a span must hold: a lone bracket says nothing."""
SLACK = 16
"""Tokens that an answer may have beyond twice those of the right one; a longer one is wrong."""


@dataclass(frozen=True)
class Span:
    """One gap. `before` and `after` are the whole rest of the file."""

    language: str
    before: str
    middle: str
    after: str
    lines: int


@dataclass(frozen=True)
class Match:
    """Of one language. Shares are None where no span of the kind was asked."""

    match: float
    ci95: tuple[float, float]
    spans: int
    one_line: float | None
    several_lines: float | None


def show(model: Path, folder: Path, as_json: bool, console: Console) -> int:
    """`stretto eval MODEL --fim DIR`: measure and print."""
    encoder = Encoder(model)
    marks = encoder.marks(repositories=False)
    found = exact_match(checkpoint.load(model), encoder, marks, spans(held_out(folder)))
    if not found:
        raise ValueError(f"{folder} holds no file with a line to take out")
    if as_json:
        print(json.dumps({name: asdict(one) for name, one in found.items()}))
        return 0
    table = Table(title=f"{model.name} on {folder}: lines written back exactly")
    for column in ("", "match", "95 % interval", "one line", "2 to 4 lines", "spans"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in found.items():
        kinds = ("–" if share is None else f"{share:.1%}" for share in (one.one_line, one.several_lines))
        table.add_row(name, f"{one.match:.1%}", "{:.1%} – {:.1%}".format(*one.ci95), *kinds, f"{one.spans:,}")
    console.print(table)
    return 0


def spans(documents: Iterable[Document], count: int = SPANS, seed: int = 0) -> list[Span]:
    """One span of each of up to `count` files a language, drawn evenly from all of them."""
    rng = random.Random(f"fim/{seed}")
    kept: dict[str, list[Span]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for document in documents:
        if document.messages or (span := cut(document, rng)) is None:
            continue
        seen[span.language] += 1
        if len(kept[span.language]) < count:
            kept[span.language].append(span)
        elif (at := rng.randrange(seen[span.language])) < count:  # a reservoir: every file is as likely as another
            kept[span.language][at] = span
    return [span for language in sorted(kept) for span in kept[language]]


def cut(document: Document, rng: random.Random) -> Span | None:
    """Whole lines that say something, in half of the cases one; None where the file has none."""
    lines = document.text.splitlines(keepends=True)
    wanted = 1 if rng.random() < 0.5 else rng.randint(2, LONGEST)
    starts = [at for at in range(len(lines) - wanted + 1) if _fit(lines[at : at + wanted])]
    if not starts:
        return None
    at = rng.choice(starts)
    middle = "".join(lines[at : at + wanted])
    bare = middle.rstrip("\r\n")
    before, after = "".join(lines[:at]), middle[len(bare) :] + "".join(lines[at + wanted :])
    return Span(document.language or "unknown", before, bare, after, wanted)


def _fit(lines: Sequence[str]) -> bool:
    whole = bool(lines[0].strip()) and bool(lines[-1].strip())
    return whole and sum(character.isalnum() for line in lines for character in line) >= MEANT


def exact_match(model: Transformer, encoder: Encoder, marks: Marks, asked: Sequence[Span]) -> dict[str, Match]:
    """By language, and `all` together; empty without spans. `model` no longer learns afterwards (`complete.greedy`)."""
    room = min(CONTEXT, model.spec.max_positions * 3 // 4)
    prompts, limits = [], []
    for span in asked:
        before, middle, after = encoder.encode([span.before, span.middle, span.after])
        prompts.append(prompt(before, after, marks, room))
        limits.append(max(1, min(2 * len(middle) + SLACK, model.spec.max_positions - len(prompts[-1]))))
    stop = {id for role in (*FIM, *REPOSITORY, "end") if (id := getattr(marks, role)) >= 0} | encoder.ends
    answers = greedy(model, prompts, limits, stop)
    right = [_same(encoder.tokenizer.decode(ids, skip_special_tokens=False), span.middle)
             for ids, span in zip(answers, asked, strict=True)]  # fmt: skip
    by_language: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    for span, hit in zip(asked, right, strict=True):
        by_language[span.language].append((span.lines, hit))
    found = {name: _match(rows) for name, rows in by_language.items()}
    return {**found, "all": _match([row for rows in by_language.values() for row in rows])} if found else {}


def prompt(before: list[int], after: list[int], marks: Marks, room: int) -> list[int]:
    """Prefix, suffix, middle (PSM), cut to `room` tokens: a third for what follows, more where the other is short."""
    room -= 3
    behind = min(len(after), max(room // 3, room - len(before)))
    ahead = min(len(before), room - behind)
    return [marks.prefix, *before[len(before) - ahead :], marks.suffix, *after[:behind], marks.middle]


def _same(answer: str, wanted: str) -> bool:
    return _bare(answer) == _bare(wanted)


def _bare(text: str) -> list[str]:
    """Lines without blank space at their ends, without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _match(rows: list[tuple[int, bool]]) -> Match:
    hits = [hit for _, hit in rows]
    one, several = [hit for lines, hit in rows if lines == 1], [hit for lines, hit in rows if lines > 1]
    share, low_high = sum(hits) / len(hits), wilson(sum(hits), len(hits))
    return Match(share, low_high, len(hits), _mean(one), _mean(several))


def _mean(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None
