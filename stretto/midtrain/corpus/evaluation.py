"""Decontamination: no file that holds an answer of an evaluation task stays in the corpus (PITFALLS MID-5).

Every solution and test of every evaluation task is an *answer*, once as it is and once without comments. A file is
removed when it holds a share of the distinct token n-grams of one answer, wherever in the file they stand; one that
holds any is looked at without its comments as well. Answers of fewer tokens than one n-gram say too little to be
searched for, and are counted in the manifest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.config import ConfigError
from stretto.midtrain.corpus.shingles import bare, ngrams, token_hashes
from stretto.records import Task


@dataclass(frozen=True)
class Answers:
    """`grams_G` sorted and unique; gram i belongs to answers `owners[starts[i] : starts[i + 1]]`."""

    names: list[str]
    sizes: np.ndarray
    grams_G: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    n: int
    short: int

    def worst(self, hashes_T: np.ndarray) -> tuple[float, str]:
        """(the largest share of an answer that these tokens hold, the answer's name)."""
        if not len(self.grams_G) or not len(hashes_T):
            return 0.0, ""
        grams = np.unique(ngrams(hashes_T, self.n))
        at = np.searchsorted(self.grams_G, grams)
        at[at == len(self.grams_G)] = 0
        hits = at[self.grams_G[at] == grams]
        if not len(hits):
            return 0.0, ""
        owners = np.concatenate([self.owners[self.starts[hit] : self.starts[hit + 1]] for hit in hits])
        answers, counts = np.unique(owners, return_counts=True)
        shares = counts / self.sizes[answers]
        worst = int(shares.argmax())
        return float(shares[worst]), self.names[answers[worst]]


def answers(tasks: Iterable[Task], n: int) -> Answers:
    """Index the solutions and tests of `tasks`."""
    names: list[str] = []
    grams: list[np.ndarray] = []
    short = 0
    for task in tasks:
        for path, text in sorted(task.grading.items()):
            forms = [hashes for form in dict.fromkeys((text, bare(text))) if len(hashes := token_hashes(form)) >= n]
            short += not forms
            names += [f"{task.id}:{path}"] * len(forms)
            grams += [np.unique(ngrams(hashes, n)) for hashes in forms]
    sizes = np.array([len(each) for each in grams], np.int64)
    flat = np.concatenate(grams) if grams else np.empty(0, np.uint64)
    owners = np.repeat(np.arange(len(grams), dtype=np.int64), sizes)
    order = np.argsort(flat, kind="stable")
    unique, first = np.unique(flat[order], return_index=True)
    return Answers(names, sizes, unique, np.append(first, len(flat)), owners[order], n, short)


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
