"""Decontamination: no file that holds an answer of an evaluation task stays in the corpus (PITFALLS MID-5).

Every solution and test of every evaluation task is an *answer*. A file is removed when it holds a share of the distinct
token n-grams of one answer, wherever in the file they stand. Both are compared in three forms:

    literal      comments, docstrings and data count
    plain        without them, and without the quotes, commas and parentheses that a formatter chooses
    renamed      plain, where of a name only counts how far back it stood before: equal after renaming

Code that lies in a file as text (`"def f(x):\\n"`: notebooks, tool calls, generated tests) is read out and compared
too. Answers of fewer tokens than one n-gram say too little to be searched for, and are counted in the manifest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.config import ConfigError
from stretto.midtrain.corpus.grams import Index, index, ngrams, renamed_ngrams
from stretto.midtrain.corpus.tokenised import Tokens, literal, plain, tokenise
from stretto.records import Task

RENAMED_NGRAM = 16
"""Tokens of an n-gram of the renamed form, each of which says less."""
RENAMED_SHARE = 0.8
"""A file is removed when it holds this share of an answer's renamed n-grams."""
ENDS = re.compile(r"""^[\s(+,\[]*[bfruBFRU]{0,2}["']+|["'][\s,)+\]\\]*$""")
ESCAPES = re.compile(r"\\(.)", re.S)
WHITE = {"n": "\n", "t": "\t", "r": ""}


@dataclass(frozen=True)
class Form:
    """One form of all answers that are long enough for it."""

    names: list[str]
    index: Index

    def worst(self, grams: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, float, str]]:
        """(text, the largest share of an answer that it holds, the answer), for texts that hold any."""
        for text, entries, shares in self.index.held(grams, offsets):
            at = int(shares.argmax())
            yield text, float(shares[at]), self.names[entries[at]]


@dataclass(frozen=True)
class Answers:
    """`count` answers, of which `short` are not searched for. `shape` is `renamed` with every name alike: what does
    not hold an answer in that form does not hold it renamed, and that is cheap to tell."""

    n: int
    literal: Form
    plain: Form
    shape: Form
    renamed: Form
    count: int
    short: int

    def found(self, texts: Sequence[str], tokens: Tokens, simple: Tokens, share: float) -> dict[int, str]:
        """Number of each text that holds `share` of an answer -> which. `tokens` are those of `texts`, `simple` their
        plain form."""
        found = self._found(tokens, simple, share)
        inside = {number: said for number, text in enumerate(texts) if number not in found and (said := quoted(text))}
        read_out = tokenise(list(inside.values()))
        within = self._found(read_out, plain(read_out), share) if inside else {}
        numbers = list(inside)
        return found | {numbers[at]: f"{why}, as text" for at, why in within.items()}

    def _found(self, tokens: Tokens, simple: Tokens, share: float) -> dict[int, str]:
        found: dict[int, str] = {}
        for form, these in ((self.literal, literal(tokens)), (self.plain, simple)):
            for text, held, name in form.worst(ngrams(these.hashes_T, self.n), these.offsets):
                if held >= share:
                    found.setdefault(text, f"{held:.0%} of {name}")
        for text, held, _ in self.shape.worst(ngrams(simple.shapes_T, RENAMED_NGRAM), simple.offsets):
            if held < RENAMED_SHARE or text in found:
                continue
            here = slice(simple.offsets[text], simple.offsets[text + 1])
            grams = renamed_ngrams(simple.of(text), simple.names_T[here], RENAMED_NGRAM)
            whole = np.array([0, here.stop - here.start])
            for _, held, name in self.renamed.worst(grams, whole):
                if held >= RENAMED_SHARE:
                    found[text] = f"{held:.0%} of {name}, renamed"
        return found


def quoted(text: str) -> str:
    """What stands in the lines of `text` that spell line ends, as a string literal does: its escapes undone."""
    if text.count("\\n") < 2:
        return ""
    said = "\n".join(ENDS.sub("", line) for line in text.split("\n") if "\\n" in line)
    for _ in range(2):  # JSON inside of JSON
        said = ESCAPES.sub(lambda found: WHITE.get(found.group(1), found.group(1)), said)
        if "\\n" not in said:
            break
    return said


def answers(tasks: Iterable[Task], n: int) -> Answers:
    """Index the solutions and tests of `tasks`."""
    named = [(f"{task.id}:{path}", text) for task in tasks for path, text in sorted(task.grading.items())]
    whole = tokenise([text for _, text in named])
    tokens, simple = literal(whole), plain(whole)
    grams: dict[str, list[tuple[str, np.ndarray]]] = {"literal": [], "plain": [], "shape": [], "renamed": []}
    short = 0
    for number, (name, _) in enumerate(named):
        here = slice(simple.offsets[number], simple.offsets[number + 1])
        names_T = simple.names_T[here]
        made = {
            "literal": ngrams(tokens.of(number), n),
            "plain": ngrams(simple.of(number), n),
            "shape": ngrams(simple.shapes_T[here], RENAMED_NGRAM),
            "renamed": renamed_ngrams(simple.of(number), names_T, RENAMED_NGRAM),
        }
        short += not len(made["literal"])
        for form, each in made.items():
            grams[form] += [(name, each)] if len(each) else []
    forms = {
        form: Form(
            [name for name, _ in each],
            index([one for _, one in each], n if form in ("literal", "plain") else RENAMED_NGRAM),
        )
        for form, each in grams.items()
    }
    return Answers(n=n, **forms, count=len(named), short=short)


def evaluation_tasks(named: tuple[str, ...], base: Path) -> Iterator[Task]:
    """The tasks a plan names. Raises ConfigError for a folder that holds none."""
    from stretto.tasks import folder, repair

    for name in named:
        if name == "repair":
            for split, count in (("heldout", 200), ("new_templates", 100)):
                yield from (one.task for one in itertools.islice(repair.generate(split, 0), count))
            continue
        root = base / Path(name).expanduser()
        try:
            yield from folder.read_all(root)
        except folder.TaskError as error:
            raise ConfigError(f"corpus.evaluation names {name!r}: {error}") from error
